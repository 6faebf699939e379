"""Every way a request can end or pause, in every state, and results that come too late."""

import pytest
from scheduling import Rig, draft_model_layout, eagle_layout

from tandemkv.base.errors import InvariantError, RequestError
from tandemkv.sched.batch import SegmentResult, StepResult


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * 5 + salt) % 11 for i in range(n)]


def at(point: str) -> Rig:
    """A rig with request r0 at a point of its life, r1 beside it."""
    rig = Rig(eagle_layout(), (40, 80), prefill_chunk=4)
    rig.add(prompt(9), max_tokens=20)
    if point == "waiting":
        return rig
    rig.add(prompt(9, 3), max_tokens=20)
    rig.step()
    if point == "prefill":
        return rig
    while not rig.requests["r0"].decoding:
        rig.step()
    rig.step()
    if point == "decode":
        return rig
    rig.scheduler.suspend("r0")
    if point == "resumed":
        rig.step()
    return rig


POINTS = ["waiting", "prefill", "decode", "suspended", "resumed"]


@pytest.mark.parametrize("point", POINTS)
def test_an_abort_frees_everything_in_every_state(point):
    rig = at(point)
    output = rig.scheduler.abort("r0")
    rig.take([output])
    rig.settle()
    assert (output.finish_reason, rig.requests["r0"].state) == ("abort", "finished")
    assert rig.requests["r0"].seq is None
    assert rig.scheduler.abort("r0") is None
    rig.run()


@pytest.mark.parametrize("point", POINTS)
def test_an_abort_in_flight_drops_the_late_result(point):
    rig = at(point)
    plan = rig.plan()
    result = rig.model.run(plan)
    rig.take([rig.scheduler.abort("r0")])
    rig.settle()
    text = list(rig.outputs["r0"])
    rig.take(rig.scheduler.apply(plan, result))
    rig.settle()
    assert rig.outputs["r0"] == text
    rig.run()


@pytest.mark.parametrize("point", ["prefill", "decode", "resumed"])
def test_a_suspension_in_any_running_state_changes_no_text(point):
    rig = at(point)
    rig.scheduler.suspend("r0")
    rig.settle()
    assert rig.requests["r0"].state == "suspended"
    rig.run()
    rig.check_text(rig.requests["r0"])
    rig.check_text(rig.requests["r1"])


@pytest.mark.parametrize("point", ["waiting", "suspended"])
def test_a_request_without_pages_cannot_be_suspended(point):
    rig = at(point)
    with pytest.raises(InvariantError, match="holds no sequence"):
        rig.scheduler.suspend("r0")
    rig.settle()
    rig.run()


def test_an_unknown_request_is_named():
    scheduler = at("decode").scheduler
    with pytest.raises(RequestError, match="no request 'x' is live"):
        scheduler.suspend("x")
    with pytest.raises(RequestError, match="no request 'x' is live"):
        scheduler.set_num_draft_tokens("x", 1)
    assert scheduler.abort("x") is None


def test_a_result_after_a_suspension_changes_no_counter_twice_over():
    rig = at("decode")
    for _ in range(2):
        while not rig.requests["r0"].decoding:
            rig.step()
        r = rig.requests["r0"]
        plan = rig.plan()
        assert any(s.request is r and s.num_drafts == 3 for s in plan.segments)
        result = rig.model.run(plan)
        rig.scheduler.suspend("r0")
        before = (list(r.output), r.acceptance.num_steps, r.acceptance.num_accepted)
        late = rig.scheduler.stats.late_results
        rig.take(rig.scheduler.apply(plan, result))
        rig.settle()
        assert (list(r.output), r.acceptance.num_steps, r.acceptance.num_accepted) == before
        assert rig.scheduler.stats.late_results == late + 1
        rig.step()
        assert r.seq is not None
    rig.run()
    rig.check_text(r)


def test_a_late_result_does_not_land_in_the_next_sequence_of_the_same_request():
    rig = at("decode")
    while rig.requests["r0"].seq.committed < 14:
        rig.step()
    plan = rig.plan()
    result = rig.model.run(plan)
    rig.scheduler.suspend("r0")
    rig.take(rig.scheduler.apply(plan, result))
    rig.step()
    assert rig.requests["r0"].seq.id not in {part.seq for part in result.segments}
    with pytest.raises(InvariantError, match="in flight: none"):
        rig.scheduler.apply(plan, result)
    rig.run()
    rig.check_text(rig.requests["r0"])


def test_a_suspension_between_claim_and_copy_publishes_nothing_unmade():
    rig = Rig(eagle_layout(), (40, 80))
    rig.add(prompt(11), max_tokens=3)
    rig.run()
    rig.add([*prompt(10), 7, 7], name="branch", max_tokens=4)
    plan = rig.plan()
    assert plan.copies
    rig.scheduler.suspend("branch")
    rig.scheduler.fail(plan, "the device was lost")  # the copies were never made
    rig.settle()
    rig.run()
    rig.check_text(rig.requests["branch"])


def test_a_failed_step_ends_its_requests_and_no_others():
    rig = Rig(eagle_layout(), (40, 80), max_running=2)
    for i in range(3):
        rig.add(prompt(9, i), max_tokens=8)
    rig.step()
    plan = rig.plan()
    rig.take(rig.scheduler.fail(plan, "the step failed: out of memory"))
    rig.settle()
    assert {e.error for e in rig.ends.values()} == {"the step failed: out of memory"}
    assert {e.finish_reason for e in rig.ends.values()} == {"error"}
    assert set(rig.ends) == {"r0", "r1"}
    rig.run()
    rig.check_text(rig.requests["r2"])


def test_planning_while_a_step_is_in_flight_is_refused():
    rig = at("decode")
    plan = rig.plan()
    with pytest.raises(InvariantError, match="in flight"):
        rig.scheduler.plan()
    rig.take(rig.scheduler.apply(plan, rig.model.run(plan)))
    rig.run()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda part: SegmentResult(part.seq, part.tokens, -1, part.drafts),
        lambda part: SegmentResult(part.seq, [*part.tokens, 1], part.num_accepted, part.drafts),
        lambda part: SegmentResult(part.seq, part.tokens * 9, 8, part.drafts),
        lambda part: SegmentResult(part.seq, [], 0, part.drafts),
    ],
    ids=["negative", "one_token_more", "more_than_drafted", "nothing"],
)
def test_an_impossible_result_changes_nothing(spoil):
    rig = at("decode")
    plan = rig.plan()
    result = rig.model.run(plan)
    bad = StepResult(result.step, [spoil(part) for part in result.segments])
    before = list(rig.requests["r0"].output), rig.requests["r0"].seq.committed
    with pytest.raises(InvariantError, match="drafts accepted"):
        rig.scheduler.apply(plan, bad)
    assert before == (list(rig.requests["r0"].output), rig.requests["r0"].seq.committed)
    rig.take(rig.scheduler.apply(plan, result))
    rig.run()


def test_a_missing_result_is_refused():
    rig = at("decode")
    plan = rig.plan()
    with pytest.raises(InvariantError, match="no result for sequence"):
        rig.scheduler.apply(plan, StepResult(plan.step, []))


@pytest.mark.parametrize("layout", [eagle_layout(), draft_model_layout()], ids=["eagle", "model"])
def test_a_resumed_request_drafts_from_its_anchor_without_sampling(layout):
    rig = Rig(layout, (40, 80), accept=256, trace=True)
    r = rig.add(prompt(9), max_tokens=20)
    while len(r.output) < 5:
        rig.step()
    drafts, output = list(r.drafts), list(r.output)
    rig.scheduler.suspend("r0")
    plan = rig.step()
    (segment,) = plan.segments
    assert not segment.samples
    assert segment.num_propose == 3
    assert segment.num_rows <= layout.lookahead + 1
    assert r.output == output
    assert r.drafts == drafts
    assert rig.scheduler.stats.resumed["warm"] == 1
    rig.run()
    rig.check_text(r)
