"""Too few pages: admission, head-room, suspension, and that nothing starves or thrashes."""

import pytest
from scheduling import Rig, draft_model_layout, eagle_layout, target_layout, windowed_layout

from tandemkv.sched.admission import Admission


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * 5 + salt) % 11 for i in range(n)]


def first_step(rig: Rig, name: str, after: int = 0) -> int:
    """The first step from `after` on in which the request ran."""
    return next(p.step for p in rig.plans[after:] if name in {s.request.id for s in p.segments})


def crowd(layout, pages, *, n=6, tokens=30, **options) -> Rig:
    rig = Rig(layout, pages, **options)
    for i in range(n):
        rig.add(prompt(8, i), max_tokens=tokens)
    return rig


@pytest.mark.parametrize(
    ("layout", "pages"),
    [
        (eagle_layout(), (14, 40)),
        (eagle_layout(), (40, 24)),
        (eagle_layout(8, 4), (12, 12)),
        (windowed_layout(), (14, 30, 30)),
        (draft_model_layout(), (14, 14)),
        (target_layout(), (14,)),
    ],
    ids=["target_short", "draft_short", "unequal", "windowed", "draft_model", "plain"],
)
def test_text_does_not_depend_on_suspensions(layout, pages):
    rig = crowd(layout, pages)
    rig.run()
    assert rig.scheduler.stats.preemptions
    for request in rig.requests.values():
        rig.check_text(request)


def test_drafts_after_a_suspension_are_those_of_a_request_left_alone():
    rig = Rig(eagle_layout(), (16, 32), accept=256, trace=True, max_running=4)
    for i in range(4):
        rig.add(prompt(4, i), max_tokens=28)
    rig.run()
    assert rig.scheduler.stats.preemptions >= 2
    for request in rig.requests.values():
        rig.check_text(request)
        for step in request.steps:
            assert step.num_accepted == len(step.drafts)


def test_a_group_without_pages_keeps_a_request_out_of_every_group():
    rig = Rig(eagle_layout(4, 4), (40, 9))
    rig.add(prompt(20), max_tokens=8, name="big")
    rig.step()
    rig.add(prompt(12, 3), max_tokens=4, name="next")
    while "big" not in rig.ends:
        assert len(rig.manager.sequences) == 1
        assert rig.requests["next"].state == "waiting"
        rig.step()
    rig.run()
    rig.check_text(rig.requests["next"])


def test_drafts_are_given_up_before_a_request_is():
    rig = Rig(draft_model_layout(), (8, 8), accept=256)
    rig.add(prompt(8), max_tokens=25)
    rig.run()
    assert rig.scheduler.stats.preemptions == 0
    assert rig.scheduler.stats.drafts_skipped > 0
    rig.check_text(rig.requests["r0"])


def test_a_lone_request_may_fill_the_pool_to_the_last_slot():
    rig = Rig(target_layout(), (8,))
    rig.add(prompt(8), max_tokens=25)
    rig.run()
    rig.check_text(rig.requests["r0"])
    assert max(u.peak_held for u in rig.manager.usage()) == 8


def test_a_request_that_fits_only_without_drafts_runs_beside_others():
    rig = Rig(eagle_layout(4, 4), (9, 9))
    rig.add(prompt(4, 1), max_tokens=6, name="small")
    rig.step()
    rig.add(prompt(32, 2), max_tokens=4, name="large")
    rig.run()
    rig.check_text(rig.requests["small"])
    rig.check_text(rig.requests["large"])


def test_the_first_in_rank_is_never_suspended():
    rig = crowd(eagle_layout(), (12, 24))
    rig.run()
    assert rig.scheduler.stats.preemptions
    assert rig.requests["r0"].num_preemptions == 0


def test_the_victim_is_the_last_in_rank():
    rig = Rig(target_layout(), (9,), num_draft_tokens=0)
    rig.add(prompt(8, 1), max_tokens=20, priority=1, name="low")
    rig.add(prompt(8, 2), max_tokens=20, priority=0, name="high")
    rig.run()
    assert rig.requests["low"].num_preemptions == 1
    assert rig.requests["high"].num_preemptions == 0


def test_a_suspended_request_waits_before_newer_ones():
    rig = Rig(target_layout(), (8,))
    for i in range(2):
        rig.add(prompt(8, i), max_tokens=16)
    while not rig.scheduler.stats.preemptions:
        rig.step()
    rig.add(prompt(2, 5), name="new", max_tokens=2)
    assert [r.id for r in rig.scheduler.waiting] == ["r1", "new"]
    resumed = len(rig.plans)
    rig.run()
    assert first_step(rig, "r1", resumed) <= first_step(rig, "new")


def crowded_by_one_running() -> Rig:
    """One runs, the next does not fit beside it, the last would."""
    rig = Rig(target_layout(), (12,))
    rig.add(prompt(20, 1), max_tokens=12, name="running")
    rig.step()
    rig.add(prompt(24, 2), max_tokens=4, name="big")
    rig.add(prompt(2, 3), max_tokens=2, name="small")
    return rig


def test_a_head_that_does_not_fit_is_not_overtaken():
    rig = crowded_by_one_running()
    rig.run()
    assert first_step(rig, "big") > 1
    assert first_step(rig, "big") <= first_step(rig, "small")


def test_a_claim_refused_for_head_room_is_not_counted():
    rig = Rig(target_layout(), (12,))
    rig.add(prompt(20, 1), max_tokens=12, name="running")
    rig.step()
    rig.add(prompt(20, 2), max_tokens=4, name="next")  # would leave no page to the first
    rig.step()
    assert rig.requests["next"].state == "waiting"
    assert rig.manager.stats.claims == 1
    assert rig.manager.stats.prefix_queries_tokens == 20


def test_a_resumed_request_stays():
    """Each of five younger requests is suspended at most once: they do not come back too soon."""
    rig = crowd(eagle_layout(), (16, 32), accept=0, num_draft_tokens=2)
    rig.run()
    assert 0 < rig.scheduler.stats.preemptions <= 5


def test_without_head_room_they_thrash(monkeypatch):
    monkeypatch.setattr(Admission, "_headroom", lambda self, request: [0] * len(self._groups))
    rig = crowd(eagle_layout(), (16, 32), accept=0, num_draft_tokens=2)
    rig.run()
    assert rig.scheduler.stats.preemptions > 5


def test_a_stream_of_urgent_work_does_not_starve_the_rest():
    rig = Rig(target_layout(), (40,), max_running=1, patience=4)
    rig.add(prompt(4), name="patient", priority=9, max_tokens=2)
    rig.add(prompt(4), name="first", priority=0, max_tokens=2)
    for i in range(12):
        rig.add(prompt(4, i), name=f"urgent{i}", priority=0, max_tokens=2)
        rig.step()
    rig.run()
    assert rig.requests["patient"].urgent
    assert list(rig.ends).index("patient") == 4


def test_a_refused_head_is_not_looked_up_again_while_no_page_became_spare():
    rig = Rig(target_layout(), (12,))
    rig.add(prompt(20, 1), max_tokens=20, name="running")
    rig.step()
    rig.add(prompt(24, 2), max_tokens=4, name="big")
    rig.step()
    claims = []
    claim = rig.manager.claim
    rig.manager.claim = lambda *a, **kw: claims.append(1) or claim(*a, **kw)
    for _ in range(5):
        rig.step()
    assert not claims


def test_peak_pages_stay_below_the_formula():
    """Pages of the known tokens, of one step's drafts and of one proposal, rounded up, each."""
    k, page = 3, 4
    rig = Rig(eagle_layout(4, 4), (200, 200), max_running=6, num_draft_tokens=k)
    for i in range(50):
        rig.add(prompt(5 + i % 7, i), max_tokens=10)
        rig.step()
        if i % 5 == 1 and rig.scheduler.running:
            rig.take([rig.scheduler.abort(rig.scheduler.running[0].id)])
        if i % 7 == 2 and rig.scheduler.waiting:
            rig.take([rig.scheduler.abort(rig.scheduler.waiting[-1].id)])
        if i % 9 == 3 and rig.scheduler.running:
            rig.scheduler.suspend(rig.scheduler.running[-1].id)
        rig.settle()
    rig.run()
    longest = 11 + 10
    for usage in rig.manager.usage():
        assert usage.peak_held <= 6 * -(-(longest + 2 * k + 1) // page)


def test_speculation_costs_no_more_hits_than_its_slots():
    hits = {}
    for k in (0, 3):
        rig = Rig(eagle_layout(4, 4), (46, 46), num_draft_tokens=k, max_running=3, accept=256)
        history = {i: prompt(10, i) for i in range(3)}
        for turn in range(3):
            for i, tokens in history.items():
                rig.add(tokens, name=f"{turn}-{i}", max_tokens=8)
            rig.run()
            for i in history:
                history[i] = history[i] + rig.outputs[f"{turn}-{i}"] + prompt(3, turn)
        hits[k] = rig.manager.stats.prefix_hit_tokens
    assert hits[0] > 0
    assert hits[3] >= hits[0] - 3 * 3


def test_a_windowed_pool_shrinks_the_chunk_instead_of_failing():
    rig = Rig(windowed_layout(), (40, 14, 14), prefill_chunk=64)
    rig.add(prompt(40), max_tokens=4)
    rig.run()
    rig.check_text(rig.requests["r0"])
    assert max(p.num_rows for p in rig.plans) < 40
