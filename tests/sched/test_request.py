"""The life of a request as a table, and its acceptance record."""

import itertools

import pytest

from tandemkv.base.errors import InvariantError
from tandemkv.base.sampling import SamplingParams
from tandemkv.sched.request import (
    TRANSITIONS,
    Acceptance,
    Request,
    RequestEvent,
    RequestState,
)


def request(**kw) -> Request:
    return Request(id="a", prompt=[1, 2], params=SamplingParams(**kw))


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(RequestState, RequestEvent)), ids=str
)
def test_an_event_moves_along_the_table_or_raises_and_changes_nothing(state, event):
    r = request()
    r.state = state
    if (state, event) in TRANSITIONS:
        r.handle(event)
        assert r.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(InvariantError, match=f"{event} is illegal when {state}"):
            r.handle(event)
        assert r.state is state
        assert not r.story


def test_nothing_leaves_the_finished_state_and_every_other_state_can_end():
    for state in RequestState:
        ends = {e for s, e in TRANSITIONS if s is state}
        if state is RequestState.FINISHED:
            assert not ends
        else:
            assert {RequestEvent.ABORT, RequestEvent.FAIL} <= ends


def test_an_illegal_event_tells_the_story():
    r = request()
    r.handle(RequestEvent.ADMIT)
    r.handle(RequestEvent.SUSPEND, "pages for b")
    with pytest.raises(InvariantError, match=r"admit -> running, suspend \(pages for b\)"):
        r.handle(RequestEvent.FINISH)


def test_a_seed_is_the_clients_or_drawn_once():
    assert request(seed=7).seed == 7
    assert request().seed != request().seed


def test_acceptance_by_position_adds_up():
    a = Acceptance()
    for drafts, accepted in ((3, 3), (3, 0), (1, 1), (4, 2)):
        a.record(drafts, accepted)
    assert (a.num_steps, a.num_drafts, a.num_accepted) == (4, 11, 6)
    assert a.drafted_at == [4, 3, 3, 1]
    assert a.accepted_at == [3, 2, 1, 0]
    assert a.mean_length == 2.5


def test_acceptance_length_is_one_when_nothing_was_drafted():
    assert Acceptance().mean_length == 1.0
