"""The manager as its callers meet it: claims, room, atomicity, suspension, namespaces, counters."""

from __future__ import annotations

import pytest
from driving import LAYOUTS, NAMESPACES, D, Driver, Live, T, layout
from oracle import group

from tandemkv.base.errors import ConfigError, InvariantError, RequestError
from tandemkv.kv.keys import Namespace
from tandemkv.kv.manager import KVManager

EAGLE_32 = layout(
    group("t", T, 32), group("d", D, 8, lookahead=1, pointwise=True), block=32
)  # a large unit, as where a lost unit hurts


def prompt(n: int) -> list[int]:
    return [i * 7 % 61 + 2 for i in range(n)]


def big(chosen=EAGLE_32, tokens: int = 1024) -> Driver:
    return Driver(chosen, [tokens // g.page_size for g in chosen.groups])


# -- hits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 31, 32, 33, 63, 64, 65, 96, 97])
def test_a_hit_loses_no_block(length):
    driver = big()
    driver.pass_through(prompt(length))
    plan = driver.pass_through(prompt(length))
    assert plan.end == length - 1
    assert sum(b - a for a, b in plan.compute) == min(length, 2)


@pytest.mark.parametrize("more", range(1, 70, 11))
def test_a_hit_recomputes_the_lookahead_and_the_new_tail_only(more):
    driver = big()
    driver.pass_through(prompt(64))
    plan = driver.pass_through([*prompt(64), *([1] * more)])
    assert plan.end == 64
    assert sum(b - a for a, b in plan.compute) == 1 + more


def test_a_block_is_shared_by_both_groups_whatever_token_follows_it():
    driver = Driver(layout(group("t", T, 16), group("d", D, 4, lookahead=1, pointwise=True),
                           block=16), [20, 80])  # fmt: skip
    driver.pass_through([*prompt(16), 9])
    match = driver.manager.match([*prompt(16), 10])
    assert match.end == 16
    assert match.coverage == (((0, 16),), ((1, 16),))


def test_a_drafter_without_layers_of_its_own_loses_no_hit():
    driver = big(layout(group("t", T, 32), block=32))
    driver.pass_through(prompt(41))
    assert driver.pass_through(prompt(41)).end == 40


def test_a_second_turn_reads_the_drafter_rows_of_the_first():
    driver = big(LAYOUTS["eagle"], 256)
    driver.pass_through(prompt(100)[60:])  # recycled pages hold another request's rows
    driver.manager.reset_cache()
    live = driver.serve(prompt(40))
    for _ in range(6):
        driver.decode(live, [1, 1], 1, 0)
    turn = list(live.seq.tokens)
    driver.finish(live)
    plan = driver.pass_through([*turn, *prompt(8)])
    assert plan.end == len(turn) - 1  # the last token had no row yet
    assert plan.compute == ((plan.end - 1, len(turn) + 8),)
    assert plan.masked == ()


def test_a_branch_window_is_recomputed_at_most_once():
    """A system prompt of 48 and three short tails; W = 8."""
    chosen = layout(group("t", T, 16), group("d", D, 4, 8, pointwise=True), block=16)
    driver = big(chosen)
    first = driver.serve([*prompt(48), 1, 2, 3, 4, 5, 6])
    for _ in range(20):
        driver.decode(first, [], 0, 9)
    driver.finish(first)
    driver.evict(1, 10**6)  # the branch window is gone
    plans = [driver.pass_through([*prompt(48), *tail]) for tail in ([7, 8, 9], [10, 11, 12])]
    assert [plan.filled for plan in plans] == [7, 0]
    assert [plan.end for plan in plans] == [48, 48]


def test_the_reused_rows_of_a_plan_are_those_of_the_sequence():
    driver = big()
    driver.pass_through(prompt(70))
    live = driver.claim(prompt(70))
    assert live.plan.reused == (((0, 70),), ((1, 70),))
    assert live.seq.reused == live.plan.end == 69


# -- namespaces -------------------------------------------------------------------------------


def test_salted_twins_share_neither_target_nor_draft_pages():
    driver = Driver(LAYOUTS["eagle"], [40, 80])
    driver.pass_through(prompt(20))
    assert driver.manager.match(prompt(20), NAMESPACES[1]).end == 0
    driver.pass_through(prompt(20), namespace=NAMESPACES[1])
    assert driver.manager.usage()[1].cached == 20


def test_an_adapter_and_a_salt_of_the_same_name_do_not_meet():
    driver = Driver(LAYOUTS["eagle"], [40, 80])
    driver.pass_through(prompt(20), namespace=Namespace(adapter="x"))
    assert driver.manager.match(prompt(20), Namespace(salt="x")).end == 0


# -- room -------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", range(13))
@pytest.mark.parametrize("more", range(9))
def test_any_number_of_rows_is_reserved_exactly(held, more):
    driver = big(LAYOUTS["eagle"], 64)
    live = driver.serve([1] * (held + 1))
    target = live.seq.committed + more
    assert driver.manager.reserve(live.seq, target)
    driver.check()
    for table, g in zip(live.seq.pages, driver.layout.groups, strict=True):
        needed = max(target, live.seq.reserved) + g.lookahead
        assert len(table) == -(-needed // g.page_size)


def test_a_refused_reservation_changes_nothing():
    driver = Driver(LAYOUTS["eagle"], [20, 6])  # the drafter's pool is the small one
    live = driver.serve([1] * 9)
    before = driver.manager.usage(), [list(t) for t in live.seq.pages]
    assert not driver.manager.reserve(live.seq, 13)
    assert (driver.manager.usage(), [list(t) for t in live.seq.pages]) == before
    driver.check()


def test_a_claim_that_one_group_cannot_hold_holds_nothing_in_the_other():
    driver = Driver(LAYOUTS["eagle"], [20, 6])
    driver.serve([1] * 9)
    before = driver.manager.usage()
    assert driver.claim([0] * 5) is None
    assert driver.manager.usage() == before


def test_a_dummy_request_is_held_in_every_group_and_published_in_none():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    live = driver.serve([1] * 9, dummy=True)
    assert all(usage.held for usage in driver.manager.usage())
    driver.finish(live)
    driver.check()
    assert driver.manager.match([1] * 9).end == 0
    assert driver.manager.stats.claims == 0


def test_a_request_that_can_never_fit_is_refused_with_the_group_that_is_short():
    manager = KVManager(LAYOUTS["eagle"], [20, 6])
    with pytest.raises(RequestError, match="pages of d for 20 tokens but the pool has 6"):
        manager.claim([1] * 20, reserve=4)
    assert manager.fits(11, 0) is None
    assert manager.fits(11, 1) is not None


def test_a_windowed_group_does_not_limit_the_length_of_a_request():
    manager = KVManager(LAYOUTS["block_drafter"], [250, 12])
    assert manager.fits(990, 4) is None
    assert manager.can_admit(990)
    assert KVManager(LAYOUTS["block_drafter"], [250, 3]).fits(990, 4) is not None


def test_a_lone_request_that_fits_an_empty_cache_is_served_from_a_full_one():
    """Copies would hold their sources as well: then the claim goes on without them."""
    driver = Driver(LAYOUTS["eagle_small_pages"], [8, 16])
    driver.pass_through([1] * 11)
    plan = driver.pass_through([*([1] * 11), 0, 0])
    assert plan.end == 8
    driver.check()


def test_a_long_prompt_runs_through_a_small_windowed_pool_chunk_by_chunk():
    driver = Driver(LAYOUTS["sliding_target"], [20, 14, 64])
    driver.serve([1, 0] * 25)
    assert driver.manager.usage()[1].peak_held <= 14


def test_free_and_cached_and_held_add_up_after_every_end():
    driver = Driver(LAYOUTS["eagle"], [60, 120])
    ends = (driver.finish, driver.suspend, driver.abort)
    for i in range(51):
        live = driver.claim(prompt(3 + i % 17))
        if i % 4:
            driver.complete(live)
        if i % 4 > 1:
            driver.decode(live, [1, 1], i % 3, 0)
        ends[i % 3](live)
        driver.check()
        for usage in driver.manager.usage():
            assert usage.held == 0
            assert usage.free + usage.cached == usage.total
    assert driver.manager.usage()[0].peak_held <= -(-(19 + 5) // 4) + 1


def test_speculative_room_does_not_evict_reusable_prefixes():
    """Three turns over a pool of 1.2 times the working set; scratch costs at most K rows each."""

    def hits(num_drafts: int) -> int:
        driver = Driver(LAYOUTS["eagle"], [30, 60])
        turns = [prompt(40), [*prompt(40)[::-1]], prompt(40)]
        for tokens in turns * 3:
            live = driver.serve(tokens[:44])
            for _ in range(4):
                driver.decode(live, [1] * num_drafts, 0, 1)
            driver.finish(live)
        return driver.manager.stats.prefix_hit_tokens

    assert hits(3) >= hits(0) - 3 * 9


# -- suspension -------------------------------------------------------------------------------


def test_a_suspended_request_finds_every_row_again():
    driver = big(LAYOUTS["eagle"], 256)
    live = driver.serve(prompt(21))
    driver.decode(live, [1, 1, 1], 2, 0)
    rows = live.seq.committed
    driver.suspend(live)
    assert driver.resume(0)
    plan = driver.live[-1].plan
    assert plan.end == rows
    assert plan.compute == ((rows - 1, rows),)
    driver.complete(driver.live[-1])
    stats = driver.manager.stats
    assert (stats.suspensions, stats.resumptions) == (1, 1)


def test_a_request_that_misses_a_batch_keeps_everything():
    driver = big(LAYOUTS["eagle"], 256)
    one, two = driver.serve(prompt(9)), driver.serve(prompt(12)[::-1])
    before = [list(table) for table in one.seq.pages], one.seq.committed
    for _ in range(3):
        driver.decode(two, [1], 1, 0)
    assert ([list(table) for table in one.seq.pages], one.seq.committed) == before
    driver.decode(one, [1], 1, 0)
    driver.check()


def test_a_request_suspended_in_the_middle_of_its_prompt_goes_on_from_there():
    driver = big(LAYOUTS["eagle"], 256)
    driver.max_span = 30
    live = driver.claim(prompt(30))
    driver.prefill(live, 13, 1)
    driver.suspend(live)
    assert driver.manager.match(prompt(30)).end == 13
    assert driver.pass_through(prompt(30)).compute == ((12, 30),)


def test_a_sequence_whose_copies_were_never_made_publishes_nothing_of_them():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(prompt(10))
    live = driver.claim([*prompt(10), 1, 1])
    assert live.copies
    driver.finish(live)
    driver.check()
    assert all(usage.held == 0 for usage in driver.manager.usage())


# -- refusals ---------------------------------------------------------------------------------


def ready() -> tuple[Driver, Live]:
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(prompt(8))
    return driver, driver.serve([*prompt(8), 1, 2, 3])


def test_rows_are_not_committed_before_their_tokens_are_known():
    driver, live = ready()
    with pytest.raises(InvariantError, match="commit to 13"):
        driver.manager.commit(live.seq, 13, [[(11, 13)], []])


def test_rows_are_not_committed_unwritten():
    driver, live = ready()
    driver.manager.append(live.seq, [4])
    with pytest.raises(InvariantError, match="not all written"):
        driver.manager.commit(live.seq, 12, [[], []])


def test_a_draft_row_is_not_canonical_before_the_token_it_looks_ahead_to():
    driver, live = ready()
    with pytest.raises(InvariantError, match="cannot be canonical"):
        driver.manager.commit(live.seq, 12, [[(11, 12)], [(12, 13)]])


def test_a_write_outside_a_sequences_own_pages_raises():
    driver, live = ready()
    for bad in ([(2, 3)], [(-4, -3)], [(999, 1000)]):
        with pytest.raises(InvariantError):
            driver.manager.commit(live.seq, 11, [bad, []])
    driver.check()


def test_a_sequence_is_released_once():
    driver, live = ready()
    driver.finish(live)
    with pytest.raises(InvariantError, match="twice"):
        driver.manager.release(live.seq)


def test_more_rows_than_were_reserved_are_not_launched():
    driver, live = ready()
    with pytest.raises(InvariantError, match="launched"):
        driver.manager.launch(live.seq, 1000)


def test_rewinding_forgets_what_was_computed_and_not_committed():
    driver, live = ready()
    driver.manager.reserve(live.seq, 16)
    driver.manager.launch(live.seq, 15)
    assert live.seq.computed == 15
    driver.manager.rewind(live.seq)
    assert live.seq.computed == live.seq.committed == 11


@pytest.mark.parametrize(
    ("pages", "options", "message"),
    [
        ([1], {}, "1 pool sizes for 2"),
        ([1, 0], {}, "at least one page"),
        ([1, 1], {"faults": frozenset({"gremlins"})}, "gremlins"),
    ],
)
def test_a_manager_that_cannot_work_is_refused(pages, options, message):
    with pytest.raises(ConfigError, match=message):
        KVManager(LAYOUTS["eagle"], pages, **options)


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="at least one token"):
        KVManager(LAYOUTS["eagle"], [4, 4]).claim([])


# -- counters ---------------------------------------------------------------------------------


def test_the_counters_tell_hits_gaps_and_recomputed_rows():
    driver = big(LAYOUTS["eagle"], 256)
    driver.pass_through(prompt(16))
    driver.pass_through(prompt(16))
    driver.evict(1, 10**6)
    driver.pass_through(prompt(16), policy="fast")
    driver.evict(1, 10**6)
    driver.pass_through(prompt(16))
    stats = driver.manager.stats
    assert (stats.claims, stats.prefix_queries_tokens, stats.prefix_hit_tokens) == (4, 64, 45)
    assert stats.draft_hit_tokens == {"d": 14}
    assert stats.draft_gap_tokens == {"policy": 14}
    assert stats.draft_recomputed_tokens == 14
    assert stats.evicted_pages["d"] > 0


def test_withheld_draft_rows_are_a_gap_of_their_own_kind():
    driver = big(LAYOUTS["eagle"], 256)
    driver.pass_through(prompt(16))
    driver.manager.faults = frozenset({"withhold_draft_rows"})
    live = driver.serve(prompt(16))
    assert driver.manager.stats.draft_gap_tokens == {"fault": 14}
    assert list(live.seq.coverage[1]) == [(15, 17)]
    assert live.plan.filled == 0


def test_a_masked_gap_is_counted_once_and_only_where_rows_are_missing():
    driver, live = ready()
    driver.manager.mask(live.seq, 1, 0, 4, "test")
    assert driver.manager.stats.draft_gap_tokens == {"test": 1}  # slot 0 alone holds no row
