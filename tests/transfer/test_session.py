"""The session machines, one rule at a time. Their laws under every fault: machines/."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tandemkv.base.errors import InvariantError
from tandemkv.base.sampling import SamplingParams
from tandemkv.transfer import chunks, receiver, sender, wire
from tandemkv.transfer import session as s
from tandemkv.transfer.chunks import IN_FLIGHT, SETTLED, UNPOSTED, Chunk, ChunkEvent, ChunkState
from tandemkv.transfer.desk import Receivers, Senders
from tandemkv.transfer.receiver import Receiver, ReceiverState
from tandemkv.transfer.sender import Sender, SenderState
from tandemkv.transfer.wire import ChunkNote, GroupAsk, GroupSpans, Lost

TARGET, DRAFT = 0, 1
TIMING = s.Timing(lease_s=9, resend_s=1, patience_s=6, draft_wait_s=0.5, linger_s=4)


def rows(start: int, stop: int, *groups: int) -> tuple[GroupSpans, ...]:
    return tuple(GroupSpans(g, ((start, stop),)) for g in groups or (TARGET, DRAFT))


def ask(n: int = 8, held: int = 0, *, epoch: int = 5, **kw: Any) -> wire.Ask:
    groups = tuple(GroupAsk(g, ((held, n),), 0, tuple(range(n))) for g in (TARGET, DRAFT))
    return wire.Ask(
        epoch=epoch,
        oldest=epoch,
        request_id="r",
        tokens=tuple(range(n)),
        params=SamplingParams(),
        seed=1,
        groups=groups,
        **kw,
    )


def shipping(question: wire.Ask | None = None, num_parts: int = 1, **kw: Any) -> Sender:
    it = Sender("d1", question or ask(), optional=frozenset({DRAFT}), timing=TIMING, **kw)
    actions = it.handle(s.Admit(num_parts))
    assert actions == [s.Send(wire.Accept(epoch=5, lease_s=9))]
    return it


def receiving(question: wire.Ask | None = None) -> Receiver:
    it = Receiver("p1", question or ask(), required=frozenset({TARGET}), timing=TIMING)
    assert it.open() == [s.Send(it.ask)]
    it.handle(wire.Accept(epoch=5, lease_s=9))
    return it


def said(actions: list[s.Action]) -> list[type]:
    return [type(a.message if isinstance(a, s.Send) else a) for a in actions]


def do(it: Sender | Receiver, *events: s.SessionEvent) -> list[s.Action]:
    """All actions of some events; the law is checked after each."""
    actions: list[s.Action] = []
    for event in events:
        actions += it.handle(event)
        it.check()
    return actions


FIRST = wire.FirstToken(epoch=5, token=3, num_rows=8, seed=1)
SAMPLED = s.Sampled(token=3, num_rows=8, seed=1)


# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(ChunkState, ChunkEvent)), ids=str
)
def test_a_chunk_moves_along_its_table_or_raises_and_stays(state, event):
    chunk = Chunk(0, rows(0, 4), state=state)
    after = chunks.TRANSITIONS.get((state, event))
    if after:
        chunk.handle(event)
        assert chunk.state is after
    else:
        with pytest.raises(InvariantError, match=f"chunk 0: {event} is illegal when {state}"):
            chunk.handle(event)
        assert chunk.state is state


def test_a_chunk_that_may_be_written_leaves_by_proof_alone():
    leaving = {
        event
        for (state, event), after in chunks.TRANSITIONS.items()
        if state in IN_FLIGHT and after in SETTLED
    }
    assert leaving == {ChunkEvent.DELIVER, ChunkEvent.DRAIN}
    assert {s for (s, e) in chunks.TRANSITIONS if e is ChunkEvent.ABORT} == UNPOSTED
    assert not any(state in SETTLED for state, _ in chunks.TRANSITIONS)


@pytest.mark.parametrize("machine", [sender, receiver], ids=["sender", "receiver"])
def test_every_state_can_end_and_the_end_is_the_end(machine):
    states = {s for s, _ in machine.TRANSITIONS} | set(machine.TRANSITIONS.values())
    ended = next(state for state in states if state == "ended")
    reach = {ended}
    for _ in states:
        reach |= {s for (s, _), after in machine.TRANSITIONS.items() if after in reach}
    assert reach == states == set(type(ended))
    assert not any(state is ended for state, _ in machine.TRANSITIONS)


# -- ranks -----------------------------------------------------------------------------------------


def test_a_chunk_is_delivered_when_every_rank_is():
    it = shipping(num_parts=2)
    do(it, s.Computed(rows(0, 8, TARGET), last=True), SAMPLED)
    do(it, s.WriteDone(0, part=1))
    assert it.chunks[0].state is ChunkState.POSTED
    assert it.state is SenderState.SHIPPING
    do(it, s.WriteDone(0, part=0))
    assert it.chunks[0].state is ChunkState.DELIVERED
    assert it.state is SenderState.SETTLED


def test_a_chunk_fails_when_one_rank_fails_and_is_over_when_every_rank_is():
    it = shipping(num_parts=3)
    do(it, s.Computed(rows(0, 8, DRAFT)))
    do(it, s.WriteDone(0, 0), s.WriteFailed(0, "timeout", 1))
    assert it.chunks[0].state is ChunkState.IN_DOUBT
    do(it, s.WriteOver(0, 1))
    assert it.chunks[0].state is ChunkState.IN_DOUBT
    do(it, s.WriteDone(0, 2))
    assert it.chunks[0].state is ChunkState.DRAINED
    assert it.lost == [Lost(rows(0, 8, DRAFT), "timeout")]


def test_a_receiver_covers_a_chunk_when_every_rank_has_said_so():
    it = receiving()
    one, two = (
        wire.Chunk(epoch=5, index=0, groups=rows(0, 4), part=p, num_parts=2) for p in (0, 1)
    )
    assert do(it, one, one) == []
    assert it.dropped.total(s.LATE) == 1
    assert do(it, two) == [s.Cover(rows(0, 4))]
    assert do(it, one, two) == []


# -- the sender ------------------------------------------------------------------------------------


def test_chunks_go_out_as_they_are_computed_target_and_draft_apart():
    it = shipping()
    assert do(it, s.Computed(rows(0, 4))) == [
        s.Post(0, rows(0, 4, TARGET), 1),
        s.Post(1, rows(0, 4, DRAFT), 1),
    ]
    assert do(it, s.WriteDone(0), s.WriteDone(1)) == []
    assert do(it, s.Computed(rows(4, 8), last=True), SAMPLED)[-1] == s.Send(FIRST)
    assert do(it, s.WriteDone(2)) == []
    assert do(it, s.WriteDone(3)) == [
        s.Send(FIRST),
        s.Send(
            wire.Delivered(
                epoch=5,
                chunks=tuple(
                    ChunkNote(i, rows(4 * (i // 2), 4 * (i // 2) + 4, i % 2)) for i in range(4)
                ),
                final=True,
                clean=True,
            )
        ),
        s.Release(),
    ]
    assert do(it, wire.Bye(epoch=5)) == []
    assert it.state is SenderState.ENDED


def test_only_what_was_asked_for_goes_out():
    it = shipping(ask(8, held=5))
    assert do(it, s.Computed(rows(0, 4))) == []
    assert it.chunks[0].state is ChunkState.ABORTED
    assert do(it, s.Computed(rows(4, 7, TARGET))) == [s.Post(2, rows(5, 7, TARGET), 1)]


def test_a_limit_on_writes_in_flight_holds_back_the_next_chunk():
    it = shipping(max_in_flight=1)
    assert said(do(it, s.Computed(rows(0, 4)))) == [s.Post]
    assert it.chunks[1].state is ChunkState.ACCEPTED
    assert said(do(it, s.WriteDone(0))) == [s.Post]


def test_signal_of_completion_waits_for_the_drafters_last_write():
    it = shipping()
    do(it, s.Computed(rows(0, 8, TARGET)), SAMPLED, s.WriteDone(0))
    assert it.state is SenderState.SHIPPING
    do(it, s.Computed(rows(0, 8, DRAFT), last=True))
    assert it.state is SenderState.SHIPPING
    assert s.Release() in do(it, s.WriteDone(1))


def test_the_loss_of_a_draft_chunk_is_reported_and_fails_nobody():
    it = shipping()
    do(it, s.Computed(rows(0, 4)), s.Withheld(rows(4, 8, DRAFT), "masked"))
    do(it, s.Computed(rows(4, 8, TARGET), last=True), SAMPLED, s.WriteDone(0), s.WriteDone(2))
    do(it, s.WriteFailed(1, "no route"))
    assert it.state is SenderState.SHIPPING
    *_, delivered, release = do(it, s.WriteOver(1))
    assert release == s.Release()
    assert delivered.message.lost == (
        Lost(rows(4, 8, DRAFT), "masked"),
        Lost(rows(0, 4, DRAFT), "no route"),
    )
    assert [note.index for note in delivered.message.chunks] == [0, 2]


def test_the_failure_of_a_target_chunk_fails_the_session_at_once_and_frees_nothing():
    it = shipping()
    do(it, s.Computed(rows(0, 4)), s.WriteDone(1))
    actions = do(it, s.WriteFailed(0, "no route"))
    assert said(actions) == [s.Stop, wire.Failed, s.Recall]
    assert not it.released
    assert do(it, s.Tick(1000)) == []
    assert said(do(it, s.WriteOver(0, clean=False))) == [s.Release, wire.Cancelled]
    assert not it.last_word.clean
    assert it.last_word.chunks == (ChunkNote(1, rows(0, 4, DRAFT)),)


def test_a_cancelled_write_that_was_done_all_the_same_is_delivered():
    it = shipping()
    do(it, s.Computed(rows(0, 4, TARGET)), wire.Cancel(epoch=5))
    assert it.chunks[0].state is ChunkState.IN_DOUBT
    do(it, s.WriteDone(0))
    assert it.chunks[0].state is ChunkState.DELIVERED
    assert it.last_word == wire.Cancelled(
        epoch=5,
        clean=True,
        reason="cancelled by the decode worker",
        chunks=(ChunkNote(0, rows(0, 4, TARGET)),),
    )


@pytest.mark.parametrize("end", [wire.Cancel(epoch=5), s.Abort("shutdown"), s.PeerLost("reset")])
def test_what_was_not_posted_is_aborted_when_a_session_closes(end):
    it = shipping(max_in_flight=1)
    do(it, s.Computed(rows(0, 4)), end)
    assert [chunk.state for chunk in it.chunks] == [ChunkState.IN_DOUBT, ChunkState.ABORTED]
    assert do(it, s.Computed(rows(4, 8)), SAMPLED) == []
    assert it.dropped.total(s.LATE) == 2


def test_a_lease_that_is_not_renewed_ends_a_session_without_other_work():
    it = shipping()
    do(it, s.Computed(rows(0, 4, TARGET)))
    assert do(it, s.Tick(5), wire.Renew(epoch=5), s.Tick(5))[-1:] != [s.Release()]
    assert said(do(it, s.Tick(4.5))) == [s.Stop, wire.Failed, s.Recall]
    assert said(do(it, s.WriteOver(0))) == [s.Release, wire.Cancelled]


def test_a_parked_prefill_keeps_its_rows_until_its_lease_ends():
    it = Sender("", optional=frozenset({DRAFT}), timing=TIMING)
    assert do(it, s.Computed(rows(0, 8), last=True), SAMPLED, s.Tick(8.9)) == []
    assert [c.state for c in it.chunks] == [ChunkState.OFFERED] * 2
    assert do(it, s.Tick(0.2)) == [s.Release()]
    assert [c.state for c in it.chunks] == [ChunkState.ABORTED] * 2


def test_a_parked_prefill_ships_what_is_asked_of_it_in_one_go():
    it = Sender("", optional=frozenset({DRAFT}), timing=TIMING)
    do(it, s.Computed(rows(0, 8), last=True), SAMPLED)
    question = ask(8, held=6, parked="x")
    assert do(it, question) == [s.Start(question)]
    actions = do(it, s.Admit(2))
    assert said(actions) == [wire.Accept, wire.FirstToken, s.Post, s.Post]
    assert actions[2:] == [s.Post(0, rows(6, 8, TARGET), 2), s.Post(1, rows(6, 8, DRAFT), 2)]


def test_a_repeated_ask_and_a_renewal_are_answered_with_the_news():
    it = Sender("d1", ask(), timing=TIMING)
    assert said(do(it, it.ask)) == [wire.Delivered]
    do(it, s.Admit())
    assert said(do(it, it.ask)) == [wire.Accept]
    do(it, SAMPLED, s.Computed(rows(0, 8), last=True))
    assert said(do(it, wire.Renew(epoch=5))) == [wire.FirstToken, wire.Delivered]


def test_a_settled_sender_repeats_the_end_until_it_hears_bye():
    it = shipping(ask(8, held=7))
    do(it, s.Computed((), last=True), SAMPLED)
    assert it.state is SenderState.SETTLED
    assert said(do(it, s.Tick(1))) == [wire.FirstToken, wire.Delivered]
    assert do(it, s.Tick(0.5)) == []
    assert said(do(it, s.Tick(0.5))) == [wire.FirstToken, wire.Delivered]
    do(it, s.Tick(9))
    assert it.state is SenderState.ENDED


# -- the receiver ----------------------------------------------------------------------------------


def chunk(index: int, groups: tuple[GroupSpans, ...], epoch: int = 5) -> wire.Chunk:
    return wire.Chunk(epoch=epoch, index=index, groups=groups)


def test_a_request_is_ready_when_all_has_landed_and_the_session_is_over_by_that():
    it = receiving()
    assert do(it, chunk(0, rows(0, 8, TARGET)), FIRST) == [s.Cover(rows(0, 8, TARGET))]
    assert do(it, chunk(1, rows(0, 8, DRAFT))) == [
        s.Cover(rows(0, 8, DRAFT)),
        s.Ready(FIRST, (), ()),
        s.Release(),
        s.Send(wire.Bye(epoch=5)),
    ]


def test_nothing_but_the_first_token_is_waited_for_when_all_rows_are_held():
    it = receiving(_empty())
    assert said(do(it, FIRST)) == [s.Ready, s.Release, wire.Bye]


def _empty() -> wire.Ask:
    return wire.Ask(
        epoch=5,
        oldest=5,
        request_id="r",
        tokens=tuple(range(8)),
        params=SamplingParams(),
        seed=1,
        groups=(),
    )


def test_a_request_that_lacks_only_draft_rows_waits_a_little_and_takes_them_later():
    it = receiving()
    do(it, chunk(0, rows(0, 8, TARGET)), FIRST)
    assert do(it, s.Tick(0.4)) == []
    assert do(it, s.Tick(0.2)) == [s.Ready(FIRST, rows(0, 8, DRAFT), ())]
    assert not it.proof
    assert said(do(it, chunk(1, rows(0, 8, DRAFT)))) == [s.Cover, s.Release, wire.Bye]


def test_draft_rows_that_never_come_are_cancelled_and_pages_wait_for_the_last_word():
    it = receiving()
    do(it, chunk(0, rows(0, 8, TARGET)), FIRST, s.Tick(0.6))
    assert said(do(it, s.Tick(4))) == [wire.Cancel]
    assert do(it, chunk(1, rows(0, 4, DRAFT))) == []  # it landed, but nobody takes it any more
    assert said(do(it, wire.Cancelled(epoch=5, clean=True))) == [s.Release, wire.Bye]


def test_rows_that_are_lost_are_named_and_the_request_starts():
    it = receiving()
    lost = Lost(rows(0, 8, DRAFT), "masked")
    delivered = wire.Delivered(
        epoch=5,
        chunks=(ChunkNote(0, rows(0, 8, TARGET)),),
        lost=(lost,),
        final=True,
        clean=True,
    )
    assert said(do(it, delivered)) == [s.Cover]
    assert do(it, FIRST) == [
        s.Ready(FIRST, rows(0, 8, DRAFT), (lost,)),
        s.Release(),
        s.Send(wire.Bye(epoch=5)),
    ]


def test_target_rows_that_the_sender_lacks_are_missing_not_waited_for():
    it = receiving()
    do(it, FIRST, chunk(0, rows(0, 6, TARGET)), chunk(1, rows(0, 8, DRAFT)))
    assert do(it, s.Tick(1)) == []
    final = wire.Delivered(epoch=5, final=True, clean=True)
    assert do(it, final)[0] == s.Ready(FIRST, rows(6, 8, TARGET), ())


def test_a_failure_gives_the_request_back_at_once_and_the_pages_later():
    it = receiving()
    do(it, chunk(0, rows(0, 4)))
    assert said(do(it, wire.Failed(epoch=5, reason="too long"))) == [s.GiveUp, wire.Cancel]
    assert said(do(it, s.Tick(1), s.Tick(1))) == [wire.Cancel, wire.Cancel]
    assert do(it, s.PeerLost("reset"), s.Tick(0.1)) == []
    assert said(do(it, wire.Cancelled(epoch=5, clean=True))) == [s.Release, wire.Bye]


def test_silence_is_no_proof_however_long():
    it = receiving()
    assert said(do(it, s.Tick(6))) == [s.GiveUp, wire.Cancel]
    for _ in range(100):
        assert said(do(it, s.Tick(100))) == [wire.Cancel]


def test_a_dead_workers_pages_wait_for_the_data_plane_to_be_closed():
    it = receiving()
    do(it, chunk(0, rows(0, 4)))
    assert said(do(it, s.PeerDead("killed"))) == [s.GiveUp, s.Fence]
    assert do(it, s.PeerDead("killed"), s.Tick(99), chunk(1, rows(4, 8))) == []
    assert said(do(it, s.Fenced())) == [s.Release, wire.Bye]
    assert it.proof == "fenced"


def test_a_last_word_that_is_not_clean_is_followed_by_closing_the_data_plane():
    it = receiving()
    do(it, s.Abort("client went"))
    assert do(it, wire.Cancelled(epoch=5, clean=False)) == [s.Fence()]
    assert said(do(it, s.Fenced())) == [s.Release, wire.Bye]


def test_a_data_plane_that_somebody_else_closed_proves_nothing_while_the_sender_may_post():
    it = receiving()
    assert said(do(it, s.Fenced())) == [s.GiveUp, wire.Cancel]
    assert do(it, s.Fenced()) == []


def test_the_client_going_gives_nothing_up_and_covers_no_more():
    it = receiving()
    assert said(do(it, s.Abort("client went"))) == [wire.Cancel]
    assert do(it, chunk(0, rows(0, 4)), FIRST) == []


@pytest.mark.parametrize(
    "bad",
    [
        chunk(0, rows(7, 9)),
        chunk(0, rows(0, 4, 7)),
        chunk(0, ()),
        chunk(1, rows(2, 6, TARGET)),
        chunk(9, rows(4, 8)),
        chunk(2**30, rows(4, 8)),
        wire.Chunk(epoch=5, index=3, groups=rows(4, 8), part=2, num_parts=2),
        wire.Delivered(epoch=5, chunks=(ChunkNote(0, rows(0, 5, TARGET)),)),
        wire.Delivered(epoch=5, lost=(Lost(rows(0, 99, DRAFT), "x"),)),
        wire.FirstToken(epoch=5, token=1, num_rows=7, seed=1),
    ],
    ids=str,
)
def test_a_peer_that_says_what_cannot_be_is_left_and_counted(bad):
    it = receiving()
    do(it, chunk(0, rows(0, 4, TARGET)))
    do(it, wire.Chunk(epoch=5, index=9, groups=rows(0, 4, DRAFT), part=0, num_parts=2))
    assert said(do(it, bad)) == [s.GiveUp, wire.Cancel]
    assert it.dropped.total(s.UNFIT) == 1


# -- epochs, and what does not fit -----------------------------------------------------------------


@pytest.mark.parametrize("machine", [shipping, receiving], ids=["sender", "receiver"])
def test_a_word_of_another_attempt_changes_nothing_and_is_counted(machine):
    it = machine()
    story = list(it.story.events)
    before = it.state
    messages = [
        wire.Cancel(epoch=4),
        wire.Cancelled(epoch=4, clean=True),
        wire.Failed(epoch=6, reason="x"),
        chunk(0, rows(0, 4), epoch=4),
        wire.Bye(epoch=6),
    ]
    assert do(it, *messages) == []
    assert it.state is before
    assert it.dropped.total(s.LATE) == len(messages)
    assert [e.split()[0] for e in it.story.events][len(story) :] == [
        type(m).__name__ for m in messages
    ]


@pytest.mark.parametrize(
    "event",
    [
        s.Admit(),
        s.Computed(rows(2, 6)),
        s.Withheld(rows(0, 4, TARGET), "no"),
        s.WriteDone(2),
        s.WriteDone(-1),
        s.WriteDone(0, part=1),
        s.WriteFailed(1, "done already"),
        s.WriteOver(1),
        s.Fenced(),
    ],
    ids=str,
)
def test_a_report_that_does_not_fit_raises_with_the_story_and_changes_nothing(event):
    it = shipping()
    do(it, s.Computed(rows(0, 4)), s.WriteDone(1))
    before = (it.state, [repr(c) for c in it.chunks], it.lost, it.first, it.last)
    with pytest.raises(InvariantError, match=r"sender d1#5: .*story: Admit -> shipping, Computed"):
        it.handle(event)
    assert before == (it.state, [repr(c) for c in it.chunks], it.lost, it.first, it.last)
    it.check()


@pytest.mark.parametrize("event", [s.Admit(), s.Computed(rows(0, 4)), s.WriteDone(0)], ids=str)
def test_a_receiver_refuses_what_only_a_sender_is_told(event):
    it = receiving()
    with pytest.raises(InvariantError, match=r"is no event of a receiver; story: Accept"):
        it.handle(event)


def test_nothing_is_computed_after_the_last_rows_nor_sampled_twice():
    it = shipping()
    do(it, s.Computed(rows(0, 4), last=True), SAMPLED)
    for event in (s.Computed(rows(4, 8)), SAMPLED, s.Withheld(rows(4, 8, DRAFT), "late")):
        with pytest.raises(InvariantError):
            it.handle(event)


# -- cancelling in every state, from either side ---------------------------------------------------

SENDERS = {
    SenderState.PARKED: [],
    SenderState.ASKED: [ask()],
    SenderState.SHIPPING: [ask(), s.Admit(), s.Computed(rows(0, 4, TARGET))],
    SenderState.SETTLED: [ask(), s.Admit(), s.Computed((), last=True), SAMPLED],
    SenderState.CLOSING: [ask(), s.Admit(), s.Computed(rows(0, 4, TARGET)), s.Abort("x")],
}
ENDS = [
    wire.Cancel(epoch=5),
    wire.Bye(epoch=5),
    s.Abort("shutdown"),
    s.PeerLost("reset"),
    s.PeerDead("killed"),
    s.Tick(9),
]


@pytest.mark.parametrize("state", SENDERS, ids=str)
@pytest.mark.parametrize("end", ENDS, ids=lambda e: type(e).__name__)
def test_a_sender_ends_from_every_state_when_its_writes_do(state, end):
    it = Sender("d1", optional=frozenset({DRAFT}), timing=TIMING)
    actions = do(it, *SENDERS[state])
    assert it.state is state
    if state is SenderState.PARKED and isinstance(end, wire.SessionMessage):
        return  # nobody has asked: there is no epoch to say this of
    actions += do(it, end)
    if any(c.state in IN_FLIGHT for c in it.chunks):
        assert s.Release() not in actions
        actions += do(it, s.WriteOver(0))
    assert it.state is SenderState.ENDED
    assert actions.count(s.Release()) == 1
    assert do(it, *ENDS) == []


RECEIVERS = {
    ReceiverState.ASKING: [],
    ReceiverState.RECEIVING: [wire.Accept(epoch=5, lease_s=9), chunk(0, rows(0, 4))],
    ReceiverState.LINGERING: [chunk(0, rows(0, 8, TARGET)), FIRST, s.Tick(1)],
    ReceiverState.CANCELLING: [s.Abort("client went")],
    ReceiverState.FENCING: [s.PeerDead("killed")],
}


@pytest.mark.parametrize("state", RECEIVERS, ids=str)
@pytest.mark.parametrize(
    "end",
    [
        s.Abort("client went"),
        s.PeerLost("reset"),
        s.PeerDead("killed"),
        wire.Failed(epoch=5, reason="x"),
        wire.Cancelled(epoch=5, clean=True),
        wire.Cancelled(epoch=5, clean=False),
        s.Tick(7),
    ],
    ids=lambda e: type(e).__name__,
)
def test_a_receiver_ends_from_every_state_on_proof(state, end):
    it = Receiver("p1", ask(), required=frozenset({TARGET}), timing=TIMING)
    actions = do(it, *RECEIVERS[state], end)
    if it.state is ReceiverState.CANCELLING:
        assert s.Release() not in actions
        actions += do(it, wire.Cancelled(epoch=5, clean=False))
    if it.state is ReceiverState.FENCING:
        assert s.Release() not in actions
        actions += do(it, s.Fenced())
    assert it.state is ReceiverState.ENDED
    assert actions.count(s.Release()) == 1
    assert sum(isinstance(a, s.GiveUp | s.Ready) for a in actions) <= 1
    assert do(it, end, FIRST, s.Fenced()) == []


# -- the desks -------------------------------------------------------------------------------------


def desk() -> Senders:
    return Senders("p1", optional=frozenset({DRAFT}), timing=TIMING)


def hear(desk: Senders, message: wire.AnyMessage, source: str = "d1", target: str = "p1"):
    step = desk.receive(wire.Envelope(source, target, message))
    desk.check()
    return step


def test_an_epoch_is_opened_once():
    it = desk()
    session = hear(it, ask()).session
    assert session is not None
    assert hear(it, ask()).session is session
    assert said(hear(it, wire.Cancel(epoch=5)).actions) == [s.Stop, s.Release, wire.Cancelled]
    assert not it.open
    again = hear(it, ask())
    assert again.session is None
    assert said(again.actions) == said(hear(it, wire.Cancel(epoch=5)).actions) == [wire.Cancelled]


def test_an_ask_that_comes_after_its_cancellation_opens_nothing():
    it = desk()
    early = hear(it, wire.Cancel(epoch=5))
    assert early.actions[0].message.clean
    assert hear(it, ask()).actions == early.actions
    assert not it.open


def test_two_decode_workers_count_their_own_epochs():
    it = desk()
    assert hear(it, ask(), "d1").session is not hear(it, ask(), "d2").session
    assert set(it.open) == {("d1", 5), ("d2", 5)}


def test_what_is_remembered_of_the_past_is_bounded():
    it = desk()
    for epoch in range(1, 200):
        hear(it, ask(epoch=epoch))
        hear(it, wire.Bye(epoch=epoch))
        assert len(it.closed["d1"]) <= 1
    assert hear(it, ask(epoch=7)).actions == []
    assert not it.open
    assert it.dropped.total(s.LATE) == 1


def test_a_message_for_an_earlier_incarnation_is_dropped():
    it = desk()
    assert hear(it, ask(), target="p0") == ("d1", None, [])
    assert it.dropped.total("misaddressed") == 1


def test_a_dead_decode_worker_asks_for_nothing_ever_again():
    it = desk()
    hear(it, ask())
    it.peer_dead("d1", "killed")
    it.check()
    assert not it.open
    assert hear(it, ask(epoch=6)).actions == []
    assert not it.closed["d1"]


def test_a_parked_prefill_is_taken_by_the_ask_that_names_it():
    it = desk()
    parked = it.park("cmpl-1")
    with pytest.raises(InvariantError, match="parked as 'cmpl-1' already"):
        it.park("cmpl-1")
    it.handle(parked, s.Computed(rows(0, 8), last=True))
    assert hear(it, ask(parked="cmpl-1")).session is parked
    assert not it.parked
    other = hear(it, ask(epoch=6, parked="cmpl-1")).session
    assert other is not None
    assert other is not parked
    it.park("cmpl-2")
    assert said([a for step in it.tick(9) for a in step.actions]).count(s.Release) == 3
    assert not it.parked
    assert not it.open


def receivers() -> Receivers:
    return Receivers("d1", timing=TIMING)


def new(it: Receivers, peer: str = "p1") -> Receiver:
    question = ask()
    step = it.ask(
        peer,
        request_id="r",
        tokens=question.tokens,
        params=question.params,
        seed=1,
        groups=question.groups,
        required=frozenset({TARGET}),
    )
    it.check()
    assert step.session is not None
    return step.session


def test_epochs_only_grow_and_the_oldest_open_one_is_told():
    it = receivers()
    first, second = new(it), new(it, "p2")
    assert (first.epoch, first.ask.oldest) == (1, 1)
    assert (second.epoch, second.ask.oldest) == (2, 1)
    assert it.receive(wire.Envelope("p1", "d1", wire.Cancelled(epoch=1, clean=True))).session
    third = new(it)
    assert (third.epoch, third.ask.oldest) == (3, 2)


def test_only_the_worker_that_was_asked_is_heard():
    it = receivers()
    session = new(it)
    step = it.receive(wire.Envelope("p2", "d1", wire.Failed(epoch=1, reason="x")))
    assert step.actions == []
    assert session.state is ReceiverState.ASKING
    assert it.dropped.total("misaddressed") == 1


def test_a_word_after_the_end_is_answered_with_bye():
    it = receivers()
    step = it.receive(wire.Envelope("p1", "d1", FIRST))
    assert step == ("p1", None, [s.Send(wire.Bye(epoch=5))])
    assert it.receive(wire.Envelope("p1", "d1", chunk(0, rows(0, 4)))).actions == []


def test_a_workers_death_ends_its_sessions_and_no_others():
    it = receivers()
    one, other = new(it, "p1"), new(it, "p2")
    assert [step.session for step in it.peer_dead("p1", "killed")] == [one]
    assert [step.session for step in it.fenced("p1")] == [one]
    assert list(it.open.values()) == [other]
    assert [step.session for step in it.peer_lost("p2", "reset")] == [other]
