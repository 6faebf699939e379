"""Which pages of a match are shared, copied, or new."""

from driving import LAYOUTS, D, Driver, T, layout
from oracle import group

PROMPT = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1]


def test_whole_blocks_are_shared_and_the_partial_one_is_copied_page_by_page():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT)
    before = driver.manager.usage()
    live = driver.claim([*PROMPT, 1, 1])
    assert [(copy.group, copy.src != copy.dst) for copy in live.copies] == [(0, True), (1, True)]
    assert len(live.seq.runs[0]) >= 2
    assert live.seq.runs[0][0] is not None
    assert driver.manager.usage()[0].free < before[0].free


def test_an_exact_repeat_that_ends_with_a_block_copies_nothing():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT[:8])
    live = driver.claim(PROMPT[:8])
    assert live.copies == ()
    assert live.seq.writes(6, 8) == ((), ((8, 9),))


def test_a_page_with_a_hole_to_fill_is_copied_and_not_written_in_place():
    drafter = group("d", D, 4, lookahead=1, pointwise=True)
    driver = Driver(layout(group("t", T, 4), drafter), [20, 20])
    driver.manager.faults = frozenset({"withhold_draft_rows"})
    driver.pass_through(PROMPT[:6])
    driver.pass_through([*PROMPT[:6], 1, 1, 0])  # its first draft row lies inside a page
    driver.manager.faults = frozenset()
    held = driver.manager.match([*PROMPT[:6], 1, 1]).coverage[1]
    assert held == ((1, 4), (6, 8))
    live = driver.claim([*PROMPT[:6], 1, 1])
    assert live.plan.filled == 2
    assert [copy.group for copy in live.copies] == [1]
    driver.complete(live)
    assert driver.manager.match([*PROMPT[:6], 1, 1]).coverage[1] == ((1, 8),)


def test_a_pool_too_small_for_copies_is_served_by_sharing_alone():
    driver = Driver(LAYOUTS["eagle_small_pages"], [8, 16])
    driver.pass_through([1] * 11)
    live = driver.claim([*([1] * 11), 0, 0])
    assert live.copies == ()
    assert live.seq.pages[0][:4] != [-1] * 4
    assert live.plan.end == 8


def test_only_the_window_of_a_windowed_group_is_held():
    driver = Driver(LAYOUTS["block_drafter"], [20, 40])
    driver.pass_through([1] * 24)
    live = driver.claim([*([1] * 24), 0])
    assert live.seq.first_block[1] == 4
    assert live.seq.pages[1][:8] == [-1] * 8
    assert all(page >= 0 for page in live.seq.pages[0])


def test_a_windowed_pool_of_the_least_size_still_serves_hits():
    probe = Driver(LAYOUTS["block_drafter"], [20, 40]).manager
    least = next(n for n in range(1, 40) if probe._pages_for(probe.layout.groups[1], 99, 0, 0) == n)
    driver = Driver(LAYOUTS["block_drafter"], [20, least])
    driver.max_span = 4
    driver.pass_through([1] * 24)
    assert driver.pass_through([*([1] * 24), 0]).end == 24
