"""N-gram lookup against a plain search, over small vocabularies where matches abound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.base.errors import ConfigError
from tandemkv.base.sampling import SamplingParams
from tandemkv.model.drafter import DraftInputs, DraftSegment
from tandemkv.model.ngram import Ngram


def plain_search(tokens, num, longest, shortest):
    """The definition, read literally."""
    for length in range(longest, shortest - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for start in range(len(tokens) - length - 1, -1, -1):
            if len(suffix) == length and tokens[start : start + length] == suffix:
                text = list(tokens)
                for j in range(num):
                    text.append(text[start + length + j])
                return text[len(tokens) :]
    return []


@settings(deadline=None, max_examples=300)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 2, 256, 65536]), min_size=1, max_size=30),
    num=st.integers(1, 8),
    bounds=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
)
def test_drafts_are_what_a_plain_search_finds(tokens, num, bounds):
    shortest, longest = bounds
    drafter = Ngram(max_ngram=longest, min_ngram=shortest)
    assert drafter.propose(tokens, num) == plain_search(tokens, num, longest, shortest)


def test_the_longest_suffix_wins_and_then_the_newest_occurrence():
    assert Ngram().propose([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1) == [9]
    assert Ngram().propose([2, 3, 8, 2, 3, 9, 2, 3], 1) == [9]


def test_a_period_is_continued_past_the_end_of_the_text():
    assert Ngram().propose([5, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_bytes_that_match_across_id_borders_are_no_match():
    tokens = [0x01000000, 0x00000001, 0x02000000, 0x00000001 << 8 | 0, 7, 0x00010000]
    assert Ngram(min_ngram=1, max_ngram=1).propose(tokens, 2) == []
    assert Ngram(min_ngram=1, max_ngram=1).propose([0, 256, 1, 0x01000000, 256], 1) == [1]


def test_it_reads_the_known_tokens_of_each_segment_and_holds_no_kv():
    drafter = Ngram(num_draft_tokens=3)
    assert drafter.layer_groups(16, "float32") == ()
    drafter.bind(())
    assert drafter.spec.taps == ()
    text = [1, 2, 3, 4, 1, 2]
    segments = [
        DraftSegment(0, 0, 0, [], [], [], tokens, num_rows, want, SamplingParams())
        for tokens, num_rows, want in ((text, 5, 3), (text, 5, 0), (text, 4, 3), ([], 0, 0))
    ]
    empty = torch.empty(0, dtype=torch.long)
    drafts = drafter.run(DraftInputs(empty, empty, empty, None, segments))
    assert drafts.tokens == [[3, 4, 1], [], [], []]
    assert drafts.probs == [None] * 4
    assert drafts.gaps == [float("inf")] * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_ngram": 0}, "prompt_lookup_max must be an integer of at least 1, got 0"),
        ({"min_ngram": True}, "prompt_lookup_min .* got True"),
        ({"max_ngram": 2, "min_ngram": 3}, "prompt_lookup_min 3 exceeds prompt_lookup_max 2"),
    ],
)
def test_bad_bounds_are_refused_by_their_option(options, words):
    with pytest.raises(ConfigError, match=words):
        Ngram(**options)
