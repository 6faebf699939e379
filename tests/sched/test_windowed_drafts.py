"""Windowed drafters under a scheduler: K that changes, missed steps, suspensions, chunks, gaps.

The stand-in drafter is right if and only if it reads every row of its window: a row that is lost
without a reason is an error, one that is lost with a reason costs its drafts.
"""

from __future__ import annotations

import random

import pytest
from scheduling import Rig, block_drafter_layout, two_drafts_layout

from tandemkv.base.errors import InvariantError
from tandemkv.kv.layout import LayerGroup, Layout
from tandemkv.kv.publish import Publisher
from tandemkv.sched.request import RequestState

LAYOUTS = {
    "page 1": block_drafter_layout(5),
    "page 2": block_drafter_layout(8, draft_page=2),
    "page 4": block_drafter_layout(3, draft_page=4),
    "block 16": block_drafter_layout(16, block=16, target_page=16, draft_page=4),
    "window 1": block_drafter_layout(1),
    "wide": block_drafter_layout(24, block=8, target_page=4, draft_page=2),
    "unwindowed": block_drafter_layout(None, draft_page=4),
    "two groups": two_drafts_layout(5),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
K = 3


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * 5 + i // 7 + salt) % 31 for i in range(n)]


def roomy(layout: Layout, slots: int = 640, **options) -> Rig:
    """Pools with room for everything and a drafter that is right unless it lacks a row."""
    pages = [slots // g.page_size for g in layout.groups]
    given = {"vocab": 31, "accept": 256, "trace": True, "num_draft_tokens": K}
    return Rig(layout, pages, **{**given, **options})


def check_parity(rig: Rig) -> None:
    """Every request has its text, and no draft was wrong: nothing was lacking anywhere."""
    for request in rig.requests.values():
        rig.check_text(request)
        assert all(step.num_accepted == len(step.drafts) for step in request.steps)
        assert not request.draft_use.gaps
    assert not rig.manager.stats.draft_gap_tokens


@every_layout
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_chunks_of_any_size_leave_no_gap(layout: Layout, chunk: int) -> None:
    rig = roomy(layout, prefill_chunk=chunk)
    for n in (1, 5, 16, 33):
        rig.add(prompt(n, n), max_tokens=20)
    rig.run()
    check_parity(rig)


@every_layout
def test_k_may_change_with_every_step_and_be_nothing(layout: Layout) -> None:
    rig, rng = roomy(layout), random.Random(1)
    for i in range(4):
        rig.add(prompt(9, i), max_tokens=40)
    while rig.scheduler.has_work:
        for name in rig.requests.keys() - rig.ends.keys():
            rig.scheduler.set_num_draft_tokens(name, rng.choice([None, 0, 0, 1, 2, 3]))
        rig.step()
    check_parity(rig)


@every_layout
def test_a_request_that_misses_steps_drafts_on_as_before(layout: Layout) -> None:
    rig = roomy(layout, max_batch_tokens=5)
    for i in range(4):
        rig.add(prompt(7, i), max_tokens=24)
    rig.run()
    assert rig.scheduler.stats.num_missed > 4
    check_parity(rig)


@every_layout
@pytest.mark.parametrize("lost", [False, True])
def test_a_resumed_request_drafts_on_as_before(layout: Layout, lost: bool) -> None:
    """At any time, with its pages still cached or all of them gone."""
    rig, rng = roomy(layout, prefill_chunk=5), random.Random(2)
    for i in range(3):
        rig.add(prompt(12, i), max_tokens=40)
    while rig.scheduler.has_work:
        running = [r for r in rig.requests.values() if r.state is RequestState.RUNNING]
        if running and rng.random() < 0.3:
            rig.scheduler.suspend(rng.choice(running).id)
            if lost:
                rig.manager.reset_cache()
        rig.step()
    assert rig.scheduler.stats.preemptions > 2
    check_parity(rig)


@every_layout
def test_a_request_that_lost_its_draft_rows_alone_pays_for_its_window(layout: Layout) -> None:
    rig = roomy(layout)
    request = rig.add(prompt(40), max_tokens=30)
    while request.num_tokens < 50:
        rig.step()
    rig.scheduler.suspend(request.id)
    for g in layout.draft_groups:
        rig.manager._make_room(g, rig.manager.usage()[g].total)
    rows = request.num_tokens - 1
    rig.run()
    check_parity(rig)
    windows = [layout.groups[g].window for g in layout.draft_groups]
    wanted = rows if None in windows else max(w - 1 for w in windows if w)
    assert request.draft_use.recomputed.get("holes", 0) == wanted


@every_layout
def test_small_pools_suspend_and_change_nothing(layout: Layout) -> None:
    pages = [
        (64 if g.window is None else 3 * (g.window + 3 * layout.block_size)) // g.page_size
        for g in layout.groups
    ]
    rig = Rig(layout, pages, vocab=31, accept=256, trace=True, num_draft_tokens=K)
    for i in range(6):
        rig.add(prompt(8, i), max_tokens=30)
    rig.run()
    assert rig.scheduler.stats.preemptions
    check_parity(rig)


@pytest.mark.parametrize("window", [1, 3, 5, 12])
def test_a_gap_is_felt_for_a_window_and_then_forgotten(window: int) -> None:
    """The context pass is off for six steps, then on again."""
    rig = roomy(block_drafter_layout(window))
    request = rig.add(prompt(9), max_tokens=60, draft_context=False)
    while not request.decoding:
        rig.step()
    rig.scheduler.set_num_draft_tokens(request.id, 0)
    for _ in range(6):
        rig.step()
    rig.scheduler.set_num_draft_tokens(request.id, None)
    back = request.num_tokens
    rig.run()
    rig.check_text(request)
    wrong = [s.anchor for s in request.steps if s.num_accepted < len(s.drafts)]
    assert all(anchor < back + window for anchor in wrong)
    assert bool(wrong) == (window > 2)
    assert request.draft_use.gaps == rig.manager.stats.draft_gap_tokens == {"speculation_off": 6}


@every_layout
def test_a_long_request_holds_its_window_and_what_a_step_writes(layout: Layout) -> None:
    chunk = 16
    rig = roomy(layout, max_batch_tokens=chunk, max_model_len=400)
    request = rig.add(prompt(250), max_tokens=60)
    most = [0] * len(layout.groups)
    while rig.scheduler.has_work:
        rig.step()
        if request.seq is not None:
            for g, table in enumerate(request.seq.pages):
                most[g] = max(most[g], sum(page >= 0 for page in table))
    for g in layout.draft_groups:
        group = layout.groups[g]
        if group.window is not None:
            slots = group.window + K + chunk + 2 * layout.block_size
            assert most[g] <= -(-slots // group.page_size)
    check_parity(rig)


# -- the tests can fail -----------------------------------------------------------------------


def one_slot_too_few_is_needed(patch: pytest.MonkeyPatch) -> None:
    needed = LayerGroup.first_needed
    patch.setattr(LayerGroup, "first_needed", lambda self, n: needed(self, n) + bool(self.window))


def one_slot_too_many_is_needed(patch: pytest.MonkeyPatch) -> None:
    needed = LayerGroup.first_needed
    patch.setattr(
        LayerGroup,
        "first_needed",
        lambda self, n: max(self.lookahead, needed(self, n) - bool(self.window)),
    )


def a_window_slides_a_block_too_far(patch: pytest.MonkeyPatch) -> None:
    lowest = Publisher._lowest_block
    patch.setattr(Publisher, "_lowest_block", lambda self, g, rows: lowest(self, g, rows) + 1)


def no_window_slides(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "slide", lambda self, seq, caching: None)


def lost_draft_rows(layout: Layout) -> None:
    test_a_request_that_lost_its_draft_rows_alone_pays_for_its_window(layout)


def changing_k(layout: Layout) -> None:
    test_k_may_change_with_every_step_and_be_nothing(layout)


def long_request(layout: Layout) -> None:
    test_a_long_request_holds_its_window_and_what_a_step_writes(layout)


FAULTS = [
    (one_slot_too_few_is_needed, lost_draft_rows),
    (one_slot_too_many_is_needed, lost_draft_rows),
    (a_window_slides_a_block_too_far, changing_k),
    (no_window_slides, long_request),
]


@pytest.mark.parametrize(("fault", "scenario"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_a_window_that_is_not_kept_would_be_seen(fault, scenario, monkeypatch) -> None:
    scenario(LAYOUTS["page 1"])
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError)):
        scenario(LAYOUTS["page 1"])
