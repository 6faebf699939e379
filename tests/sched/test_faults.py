"""Tests of the tests: each seeded fault of the scheduler is caught by a scenario that passes
without it."""

from __future__ import annotations

import pytest
from scheduling import Rig, eagle_layout, target_layout

from tandemkv.base.errors import InvariantError
from tandemkv.kv.manager import KVManager
from tandemkv.sched import queues as queues_module
from tandemkv.sched import scheduler as scheduler_module
from tandemkv.sched.admission import Admission
from tandemkv.sched.limits import Limits
from tandemkv.sched.planner import Planner
from tandemkv.sched.request import FinishReason
from tandemkv.sched.scheduler import Scheduler
from tandemkv.sched.stop import cut


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * 5 + salt) % 11 for i in range(n)]


# -- scenarios ---------------------------------------------------------------------------------


def plain_text() -> None:
    rig = Rig(eagle_layout(), (40, 80), vocab=5, eos=(0,), max_running=4)
    for i in range(12):
        rig.add([1 + (i + j) % 4 for j in range(6)], max_tokens=12)
    rig.run(300)
    for request in rig.requests.values():
        rig.check_text(request)


def suspended_in_flight() -> None:
    rig = Rig(eagle_layout(), (40, 80))
    r = rig.add(prompt(9), max_tokens=20)
    rig.step()
    rig.step()
    plan = rig.plan()
    result = rig.model.run(plan)
    rig.scheduler.suspend("r0")
    rig.take(rig.scheduler.apply(plan, result))
    rig.settle()
    rig.run(100)
    rig.check_text(r)


def aborted() -> None:
    rig = Rig(eagle_layout(), (40, 80))
    rig.add(prompt(9), max_tokens=20)
    rig.step()
    rig.take([rig.scheduler.abort("r0")])
    rig.settle()


def stop_in_the_last_run() -> None:
    """The last step fills max_tokens and has a stop token inside."""
    rig = Rig(eagle_layout(), (40, 80), vocab=251, accept=256)
    probe = rig.add(prompt(5), max_tokens=9)
    text, _ = rig.expected(probe)
    assert text.count(text[6]) == 1
    rig.add(prompt(5), name="stops", max_tokens=9, stop_token_ids=(text[6],))
    rig.run(100)
    rig.check_text(rig.requests["stops"])


def head_blocked() -> None:
    """A big request waits for one that runs, small ones come after it."""
    rig = Rig(target_layout(), (12,))
    rig.add(prompt(20, 1), max_tokens=12, name="running")
    rig.step()
    rig.add(prompt(24, 2), max_tokens=4, name="big")
    for i in range(6):
        rig.add(prompt(3, i), max_tokens=2, name=f"small{i}")
        rig.step()
    rig.run(600)
    started = [s.request.id for plan in rig.plans for s in plan.segments]
    assert started.index("big") < min(started.index(f"small{i}") for i in range(6))


def crowded() -> None:
    rig = Rig(eagle_layout(), (16, 32), accept=0, num_draft_tokens=2)
    for i in range(6):
        rig.add(prompt(8, i), max_tokens=30)
    rig.run(400)
    assert rig.requests["r0"].num_preemptions == 0
    assert rig.scheduler.stats.preemptions <= 5
    for request in rig.requests.values():
        rig.check_text(request)


def low_priority() -> None:
    rig = Rig(target_layout(), (40,), max_running=1, patience=4)
    rig.add(prompt(4), name="patient", priority=9, max_tokens=2)
    for i in range(40):
        rig.add(prompt(4, i), name=f"urgent{i}", priority=0, max_tokens=2)
        rig.step()
    assert "patient" in rig.ends


def context_off() -> None:
    rig = Rig(eagle_layout(), (40, 80))
    rig.add(prompt(9), draft_context=False, num_draft_tokens=0)
    rig.run(100)
    assert sum(rig.manager.stats.draft_gap_tokens.values()) > 9


def within_budget() -> None:
    rig = Rig(eagle_layout(), (40, 80), max_batch_tokens=6)
    for i in range(4):
        rig.add(prompt(9, i))
    rig.run(200)
    assert max(plan.num_rows for plan in rig.plans) <= 6


# -- faults ------------------------------------------------------------------------------------


def commits_one_too_many(monkeypatch):
    commit = Scheduler._commit

    def faulty(self, segment, kept):
        if segment.verify and len(kept) < segment.num_rows:
            segment.start += 1
        commit(self, segment, kept)

    monkeypatch.setattr(Scheduler, "_commit", faulty)


def keeps_late_results(monkeypatch):
    apply = Scheduler.apply

    def faulty(self, plan, result):
        for segment, part in zip(plan.segments, result.segments, strict=True):
            if segment.request.seq is not segment.seq:
                segment.request.output += part.tokens
        return apply(self, plan, result)

    monkeypatch.setattr(Scheduler, "apply", faulty)


def checks_the_length_first(monkeypatch):
    def faulty(tokens, room, stop_tokens, watch=None):
        if len(tokens) >= room:
            return list(tokens[:room]), FinishReason.LENGTH
        return cut(tokens, room, stop_tokens, watch)

    monkeypatch.setattr(scheduler_module, "cut", faulty)


def lets_small_ones_pass(monkeypatch):
    claim = Admission.claim

    def faulty(self, request):
        got = claim(self, request)
        waiting = self._queues.waiting
        if got is None and len(waiting) > 1:
            waiting.append(waiting.pop(0))
        return got

    monkeypatch.setattr(Admission, "claim", faulty)
    monkeypatch.setattr(queues_module.Queues, "check", lambda self: None)


def lets_anyone_in(monkeypatch):
    monkeypatch.setattr(Admission, "_headroom", lambda self, request: [0] * len(self._groups))


def suspends_the_oldest(monkeypatch):
    def faulty(self, request):
        self.suspend(self._queues.running[0], "fault")
        return request.seq is not None

    monkeypatch.setattr(Planner, "_make_room", faulty)


def forgets_patience(monkeypatch):
    monkeypatch.setattr(queues_module.Queues, "_count_overtaken", lambda self, request: None)


def leaks_on_abort(monkeypatch):
    monkeypatch.setattr(KVManager, "finish", lambda self, seq: None)


def samples_the_anchor_again(monkeypatch):
    chunk = Planner._chunk

    def faulty(self, request, rows):
        segment = chunk(self, request, rows)
        if segment is not None and segment.num_propose:
            segment.samples = True
        return segment

    monkeypatch.setattr(Planner, "_chunk", faulty)


def keeps_drafts_of_another_anchor(monkeypatch):
    forget = queues_module._forget_work

    def faulty(request):
        drafts = request.drafts
        forget(request)
        request.drafts = drafts

    monkeypatch.setattr(queues_module, "_forget_work", faulty)


def masks_in_silence(monkeypatch):
    monkeypatch.setattr(Scheduler, "_mask_unwritten", lambda self, segment, final: None)


def forgets_the_drafts_in_the_budget(monkeypatch):
    share = Planner._share_rows

    def faulty(self):
        return {r.id: max(share(self).get(r.id, 1), 1) for r in self._queues.running}

    monkeypatch.setattr(Planner, "_share_rows", faulty)


def reserves_too_little(monkeypatch):
    monkeypatch.setattr(Limits, "reach", lambda self, num_propose: 0)


FAULTS = [
    (commits_one_too_many, plain_text),
    (keeps_late_results, suspended_in_flight),
    (checks_the_length_first, stop_in_the_last_run),
    (lets_small_ones_pass, head_blocked),
    (lets_anyone_in, crowded),
    (suspends_the_oldest, crowded),
    (forgets_patience, low_priority),
    (leaks_on_abort, aborted),
    (samples_the_anchor_again, suspended_in_flight),
    (keeps_drafts_of_another_anchor, suspended_in_flight),
    (masks_in_silence, context_off),
    (forgets_the_drafts_in_the_budget, within_budget),
    (reserves_too_little, plain_text),
]


@pytest.mark.parametrize("scenario", sorted({s for _, s in FAULTS}, key=lambda s: s.__name__))
def test_a_scenario_passes_without_a_fault(scenario):
    scenario()


@pytest.mark.parametrize(("fault", "scenario"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_a_fault_is_caught(fault, scenario, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError)):
        scenario()
