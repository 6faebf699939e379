"""What enters the tree, what replaces what, and what a sequence gives up."""

import pytest
from driving import LAYOUTS, Driver

from tandemkv.kv.keys import pack_tokens, token_bytes
from tandemkv.kv.publish import covers_all

PROMPT = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0]


def packed(tokens) -> bytes:
    return token_bytes(pack_tokens(tokens))


def drop_draft_rows(driver: Driver) -> None:
    """Evict every cached draft run, target pages stay."""
    pool = driver.manager.pools[-1]
    driver.evict(len(driver.num_pages) - 1, pool.total)
    assert not pool.cached
    driver.check()


def test_nothing_is_seen_before_it_is_published():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    live = driver.claim(PROMPT)
    while not live.decoding:
        driver.prefill(live, 99, 1, late=True)
    assert driver.manager.match(PROMPT).end == 0
    assert driver.manager.publish(live.seq) == 3
    assert driver.manager.match(PROMPT).end == len(PROMPT)


def test_a_running_request_publishes_whole_blocks_and_a_finished_one_its_last_rows():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    live = driver.serve([*PROMPT, 1, 1])
    assert driver.manager.match([*PROMPT, 1, 1]).end == 12
    driver.finish(live)
    assert driver.manager.match([*PROMPT, 1, 1, 0]).end == 14


def test_rejected_rows_are_never_published():
    """Drafts rejected across a page boundary: 15 rows, three drafts, none accepted."""
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    prompt = [*PROMPT, 1, 0, 1]
    live = driver.serve(prompt, 0)
    driver.decode(live, [1, 1, 1], 0, 1)
    driver.check()
    assert driver.manager.match([*prompt, 0, 1, 1, 1]).end == 16
    driver.finish(live)
    driver.check()
    assert driver.manager.match([*prompt, 0, 1, 1, 1]).end == 16


def test_a_later_request_fills_the_hole_and_the_one_after_it_pays_nothing():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT)
    drop_draft_rows(driver)
    first = driver.pass_through(PROMPT)
    assert first.compute == ((0, 10), (10, 12))
    assert first.filled == 10
    second = driver.pass_through(PROMPT)
    assert second.compute == ((10, 12),)
    assert second.filled == 0


def test_a_filled_hole_is_seen_before_its_filler_has_finished():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT)
    drop_draft_rows(driver)
    driver.serve(PROMPT)
    assert driver.manager.match(PROMPT).coverage[1] == ((1, 12),)


def test_better_coverage_replaces_less_and_never_the_other_way_round():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT)
    drop_draft_rows(driver)
    poor = driver.serve(PROMPT, policy="fast")
    rich = driver.serve(PROMPT)
    driver.finish(rich)
    driver.finish(poor)
    driver.check()
    assert driver.manager.match(PROMPT).coverage[1] == ((1, 12),)


def test_the_same_prompt_run_twice_at_once_ends_in_one_set_of_pages():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    one, two = driver.claim(PROMPT), driver.claim(PROMPT)
    driver.complete(one)
    driver.complete(two)
    driver.check()
    assert one.seq.pages[0][:3] == two.seq.pages[0][:3]
    assert driver.manager.usage()[0].held == 3 + 2  # shared, and a page of room for each


def test_a_longer_block_supersedes_the_partial_leaf_it_extends():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT[:6])
    driver.pass_through(PROMPT[:7])
    assert len(driver.manager.tree.nodes()) == 2
    driver.pass_through(PROMPT[:8])
    assert len(driver.manager.tree.nodes()) == 2
    driver.pass_through(PROMPT[:6])
    assert len(driver.manager.tree.nodes()) == 2


def test_a_leaf_with_better_coverage_than_its_extension_stays():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT[:7])
    driver.manager.faults = frozenset({"withhold_draft_rows"})
    driver.pass_through(PROMPT[:8])
    driver.manager.faults = frozenset()
    assert len(driver.manager.tree.nodes()) == 3
    assert driver.manager.match(PROMPT[:7]).coverage[1] == ((1, 7),)
    assert driver.manager.match(PROMPT[:8]).coverage[1] == ((1, 4), (7, 8))


def test_a_windowed_group_is_charged_its_window_and_not_the_length():
    driver = Driver(LAYOUTS["block_drafter"], [40, 80])
    live = driver.serve([1] * 12)
    for _ in range(12):
        driver.decode(live, [], 0, 1)
        driver.check()
    held = sum(page >= 0 for page in live.seq.pages[1])
    assert held * 2 <= 6 + 2 * 4 + 2
    assert driver.manager.match([1] * 24).coverage[1] == ((0, 24),)


def test_rows_that_left_every_window_are_the_first_to_be_evicted():
    driver = Driver(LAYOUTS["block_drafter"], [40, 80])
    driver.pass_through([0, 1, 1])
    live = driver.serve([1, 0] * 8)
    left = driver.manager.pools[1].oldest
    assert left.node.tokens == packed([1, 0, 1, 0])
    driver.abort(live)


def test_without_prefix_caching_nothing_is_matched_and_all_is_free_again():
    driver = Driver(LAYOUTS["eagle"], [20, 40], prefix_caching=False)
    driver.pass_through(PROMPT)
    assert driver.manager.match(PROMPT).end == 0
    assert [usage.free for usage in driver.manager.usage()] == [20, 40]


def test_windows_slide_without_prefix_caching_too():
    driver = Driver(LAYOUTS["block_drafter"], [40, 80], prefix_caching=False)
    live = driver.serve([1] * 20)
    assert sum(page >= 0 for page in live.seq.pages[1]) * 2 <= 6 + 2 * 4 + 2


@pytest.mark.parametrize(
    ("spans", "wanted", "covered"),
    [
        ([], [], True),
        ([], [(0, 1)], False),
        ([(0, 4)], [(1, 2), (3, 4)], True),
        ([(0, 2)], [(1, 3)], False),
    ],
)
def test_coverage_is_compared_slot_by_slot(spans, wanted, covered):
    assert covers_all(spans, wanted) is covered
