"""The claim rule, exhaustively on small coverage and case by case."""

from __future__ import annotations

import itertools

import pytest
from driving import HIDDEN, TOKENS, D, T, layout
from oracle import group

from tandemkv.base.errors import RequestError
from tandemkv.base.spans import SpanSet
from tandemkv.kv.coverage import ClaimCost, GroupCost, plan_claim
from tandemkv.kv.layout import Layout


def slots(spans) -> set[int]:
    return {s for a, b in spans for s in range(a, b)}


def runs(members: set[int]) -> list[tuple[int, int]]:
    return list(SpanSet((s, s + 1) for s in sorted(members)))


def by_brute_force(chosen: Layout, target: set[int], draft: set[int], n: int, limit: int):
    """(m, spans, slots masked), one target and one pointwise draft group, slot by slot."""
    t, d = chosen.groups
    ahead = d.lookahead

    def read_from(p: int) -> int:
        return 0 if t.window is None else max(0, p - t.window + 1)

    m = limit
    while m and not set(range(read_from(max(0, m - ahead)), m)) <= target:
        m -= 1
    needed = max(ahead, 0 if d.window is None else n - d.window + 1)
    wished = max(ahead, 0 if d.window is None else m - d.window + 1)
    spans, masked = [], set()
    if set(range(needed, m)) - draft:
        for a, b in runs(set(range(wished, m)) - draft):
            if set(range(read_from(a - ahead), b - ahead)) <= target:
                spans.append((a - ahead, b - ahead))
            else:
                masked |= set(range(max(a, needed), b))
    tail = (max(0, m - ahead), n)
    return m, [*spans, tail] if tail[0] < n else spans, masked


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("target_window", [None, 3])
@pytest.mark.parametrize("draft_window", [None, 3])
def test_the_rule_is_what_brute_force_finds_on_every_coverage(ahead, target_window, draft_window):
    chosen = layout(
        group("t", T, 1, target_window),
        group("d", D, 1, draft_window, lookahead=ahead, pointwise=True),
    )
    n = 6
    for bits, more in itertools.product(range(2**n), repeat=2):
        target = {s for s in range(n) if bits >> s & 1}
        draft = {s for s in range(ahead, n) if more >> s & 1}
        found = [SpanSet(runs(target)), SpanSet(runs(draft))]
        for resume in (False, True):
            plan = plan_claim(chosen, found, n, resume=resume)
            masked = {s for gap in plan.masked for s in range(gap.start, gap.stop)}
            want = by_brute_force(chosen, target, draft, n, n if resume else n - 1)
            assert (plan.end, list(plan.compute), masked) == want, (target, draft)


EAGLE = layout(group("t", T, 4), group("d", D, 2, lookahead=1, pointwise=True))
BLOCK_DRAFTER = layout(group("t", T, 16), group("d", D, 4, 16, pointwise=True), block=16)


def test_a_windowed_drafter_that_looks_ahead_needs_its_window_and_no_page_more():
    """n = 16, page 4, W = 4, lookahead 1: slots [13, 16), and slot 16 with the next step."""
    drafter = group("d", D, 4, 4, lookahead=1, pointwise=True)
    assert drafter.first_needed(16) == 13
    chosen = layout(group("t", T, 4), drafter)
    lacking = [SpanSet([(0, 16)]), SpanSet([(14, 16)])]
    assert plan_claim(chosen, lacking, 16, resume=True).holes == ((12, 13),)
    assert plan_claim(chosen, [lacking[0], SpanSet([(13, 16)])], 16, resume=True).holes == ()


def test_a_full_hit_recomputes_the_lookahead_and_one_token():
    plan = plan_claim(EAGLE, [SpanSet([(0, 64)]), SpanSet([(1, 64)])], 64)
    assert plan.end == 63
    assert plan.compute == ((62, 64),)


def test_slots_below_the_lookahead_are_no_hole():
    plan = plan_claim(EAGLE, [SpanSet([(0, 8)]), SpanSet([(1, 8)])], 10)
    assert plan.compute == ((7, 10),)
    assert not plan.masked


def test_a_resumed_request_that_lost_nothing_runs_for_hidden_states_only():
    found = [SpanSet([(0, 40)]), SpanSet([(1, 40)])]
    plan = plan_claim(EAGLE, found, 40, resume=True)
    assert (plan.end, plan.compute) == (40, ((39, 40),))
    alone = layout(group("t", T, 4))
    assert plan_claim(alone, [SpanSet([(0, 40)])], 40, resume=True).compute == ()


@pytest.mark.parametrize("page", [4, 8, 16])
def test_no_row_is_lost_to_a_page_boundary(page):
    """A hit of 50 in a prompt of 60, W = 16: what is lost is zero for every draft page size."""
    chosen = layout(group("t", T, 16), group("d", D, page, 16, pointwise=True), block=16)
    plan = plan_claim(chosen, [SpanSet([(0, 50)]), SpanSet([(35, 50)])], 60)
    assert (plan.end, plan.compute, plan.masked) == (50, ((50, 60),), ())


def test_a_request_whose_tail_covers_the_window_pays_nothing():
    plan = plan_claim(BLOCK_DRAFTER, [SpanSet([(0, 48)]), SpanSet()], 70)
    assert plan.compute == ((48, 70),)
    assert plan.filled == 0


def test_a_hole_at_a_branch_is_filled_for_the_whole_window_of_the_branch():
    plan = plan_claim(BLOCK_DRAFTER, [SpanSet([(0, 48)]), SpanSet()], 54)
    assert plan.compute == ((33, 48), (48, 54))
    assert plan.filled == 15


def test_the_fast_policy_masks_what_is_needed_and_says_why():
    found = [SpanSet([(0, 48)]), SpanSet()]
    plan = plan_claim(BLOCK_DRAFTER, found, 54, policy="fast")
    assert plan.compute == ((48, 54),)
    assert [(g.start, g.stop, g.reason) for g in plan.masked] == [(39, 48, "policy")]


def test_the_auto_policy_fills_when_the_output_is_long_and_masks_when_it_is_short():
    found = [SpanSet([(0, 400)]), SpanSet([(1, 200)])]
    kept = plan_claim(EAGLE, found, 410, policy="auto", expected_tokens=2)
    filled = plan_claim(EAGLE, found, 410, policy="auto", expected_tokens=500)
    assert (kept.filled, filled.filled) == (0, 200)
    assert kept.masked[0].reason == "policy"


def test_the_price_of_a_gap_grows_with_the_gap_and_the_output():
    price, drafter = ClaimCost(), EAGLE.groups[1]
    assert not price.pays(drafter, 100, 0, 10, 1000)
    assert not price.pays(drafter, 100, 100, 10_000, 10)
    assert price.pays(drafter, 100, 100, 100, 1000)
    windowed = group("d", D, 1, 8, pointwise=True)
    assert not price.pays(windowed, 8, 8, 900, 100_000)  # felt for eight tokens only


def test_a_gap_costs_a_block_drafter_more_and_measured_numbers_win():
    """Half of 1000 slots are gone and 500 tokens are to come: is a recompute of 10,000 worth it?"""
    eagle, block = EAGLE.groups[1], group("b", D, 4, 1000, pointwise=True)
    assert ClaimCost().pays(block, 1000, 500, 10_000, 500)
    assert not ClaimCost().pays(eagle, 1000, 500, 10_000, 500)
    assert ClaimCost().pays(eagle, 1000, 500, 5000, 500)
    measured = ClaimCost(groups={"b": GroupCost(acceptance_length=3.0, loss=0.0)})
    assert not measured.pays(block, 1000, 1000, 1, 10_000)
    assert measured.of(eagle) == GroupCost()


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(RequestError, match="claim_policy"):
        plan_claim(EAGLE, [SpanSet(), SpanSet()], 3, policy="sometimes")


def test_a_drafter_that_rebuilds_from_tokens_runs_alone():
    chosen = layout(group("t", T, 4), group("d", D, 4, rebuild_from=TOKENS))
    plan = plan_claim(chosen, [SpanSet([(0, 20)]), SpanSet([(0, 4), (8, 12)])], 24)
    assert plan.compute == ((20, 24),)
    assert plan.draft_compute == ((), ((4, 8), (12, 20)))
    assert plan.filled == 12


def test_a_drafter_that_is_not_pointwise_needs_its_own_rows_before_a_hole():
    chosen = layout(group("t", T, 4), group("d", D, 4, 4, rebuild_from=HIDDEN))
    lost = plan_claim(chosen, [SpanSet([(0, 20)]), SpanSet([(0, 16)])], 21)
    assert lost.compute == ((20, 21),)
    assert [(gap.start, gap.stop) for gap in lost.masked] == [(18, 20)]
    whole = plan_claim(chosen, [SpanSet([(0, 20)]), SpanSet([(0, 17)])], 21)
    assert whole.compute == ((17, 20), (20, 21))
    assert [gap.reason for gap in lost.masked] == ["draft_context"]


def test_a_hole_behind_a_lost_target_window_is_masked_with_that_reason():
    chosen = layout(group("w", T, 1, 4), group("d", D, 1, 8, pointwise=True))
    plan = plan_claim(chosen, [SpanSet([(14, 20)]), SpanSet()], 21)
    assert plan.end == 20
    assert [(gap.start, gap.stop, gap.reason) for gap in plan.masked] == [(14, 20, "target_window")]


def test_holes_of_several_drafters_are_run_once():
    chosen = layout(
        group("t", T, 4),
        group("a", D, 4, lookahead=1, pointwise=True),
        group("b", D, 4, 8, pointwise=True),
    )
    plan = plan_claim(chosen, [SpanSet([(0, 20)]), SpanSet([(1, 14)]), SpanSet([(0, 12)])], 22)
    assert plan.compute == ((13, 19), (19, 22))
    assert plan.end == 20


def test_withheld_rows_are_masked_and_never_refilled():
    plan = plan_claim(EAGLE, [SpanSet([(0, 16)]), SpanSet()], 20, withheld="fault")
    assert plan.compute == ((15, 20),)
    assert [(g.start, g.stop, g.reason) for g in plan.masked] == [(1, 16, "fault")]
