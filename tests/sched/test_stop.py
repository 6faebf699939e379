"""The stop rules over a whole accepted run."""

import pytest

from tandemkv.sched.request import FinishReason
from tandemkv.sched.stop import cut

STOP, EOS = 99, 98


@pytest.mark.parametrize(
    ("tokens", "room", "kept", "reason"),
    [
        ([10, 11, STOP, 20, 21, 22], 5, 3, FinishReason.STOP),
        ([EOS, 7, 8], 2, 1, FinishReason.STOP),
        ([1, 2, 3, 4, STOP], 4, 4, FinishReason.LENGTH),
        ([1, 2, 3, STOP], 4, 4, FinishReason.STOP),
        ([1, 2, 3], 4, 3, None),
        ([1, 2, 3, 4], 4, 4, FinishReason.LENGTH),
        ([STOP, STOP], 1, 1, FinishReason.STOP),
    ],
)
def test_a_stop_inside_an_accepted_run_comes_before_the_length(tokens, room, kept, reason):
    assert cut(tokens, room, {STOP, EOS}) == (tokens[:kept], reason)


def test_a_stop_string_ends_the_request_where_it_completes():
    seen = []

    def watch(tokens):
        seen.extend(tokens)
        return 2 if 5 in tokens else None

    assert cut([1, 2, 3], 9, (), watch) == ([1, 2, 3], None)
    assert cut([4, 5, 6], 9, (), watch) == ([4, 5], FinishReason.STOP)
    assert seen == [1, 2, 3, 4, 5, 6]


def test_a_stop_string_sees_nothing_after_a_stop_token_or_the_length():
    seen = []

    def watch(tokens):
        seen.append(list(tokens))

    cut([1, STOP, 3], 9, {STOP}, watch)
    cut([1, 2, 3], 2, (), watch)
    assert seen == [[1, STOP], [1, 2]]


def test_a_stop_string_wins_over_the_length_it_fills():
    assert cut([1, 2, 3], 2, (), lambda tokens: 2) == ([1, 2], FinishReason.STOP)


def length_first(tokens, room, stop_tokens):
    """The fault of the report: the length is looked at before the stop."""
    if len(tokens) >= room:
        return list(tokens[:room]), FinishReason.LENGTH
    return cut(tokens, room, stop_tokens)


def test_checking_the_length_first_is_seen_by_the_same_case():
    assert length_first([10, 11, STOP, 20, 21, 22], 5, {STOP}) != ([10, 11, STOP], "stop")
