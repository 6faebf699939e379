"""What a sequence says it must write, owns, and may publish."""

import pytest
from driving import LAYOUTS, Driver

PROMPT = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1]


@pytest.mark.parametrize("name", ["eagle", "mtp", "target_only", "two_drafters"])
def test_a_pass_writes_each_row_where_its_newest_token_is(name):
    driver = Driver(LAYOUTS[name], [40, 40, 80, 80][: len(LAYOUTS[name].groups)])
    seq = driver.claim(PROMPT).seq
    for spans, group in zip(seq.writes(0, 4), driver.layout.groups, strict=True):
        assert spans == ((group.lookahead, 4 + group.lookahead),)
    assert all(spans == () for spans in seq.writes(3, 3))


def test_held_rows_are_not_written_again():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT)
    seq = driver.claim([*PROMPT, 1, 1]).seq
    assert seq.writes(9, 12) == (((10, 12),), ((10, 13),))


def test_a_sequence_owns_new_and_copied_pages_and_no_shared_ones():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT)
    seq = driver.claim([*PROMPT, 1, 1]).seq
    assert [seq.owns(0, slot) for slot in (0, 7, 8, 12, -1, 99)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_rows_past_a_gap_can_be_read_and_are_not_canonical():
    driver = Driver(LAYOUTS["mtp"], [20, 20])
    driver.pass_through(PROMPT)
    driver.evict(1, 20)
    live = driver.serve([*PROMPT, 1, 1], policy="fast")
    assert list(live.seq.tainted[1]) == [(10, 13)]
    assert live.seq.canonical(1, 0, 12) == ()
    driver.finish(live)
    assert driver.manager.match([*PROMPT, 1, 1]).coverage[1] == ()
