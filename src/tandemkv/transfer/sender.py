"""The prefill worker's side of a session: rows become final, are written, and that is proved.

    PARKED --ask--> ASKED --admit--> SHIPPING --settle--> SETTLED --end--> ENDED
       |              |                 |                                    ^
       +----close-----+------close------+-----------> CLOSING ------end-----+

    PARKED    computed ahead, under a lease, for somebody who has not asked yet
    ASKED     the ask is here, our worker decides
    SHIPPING  chunks become final, go out, are done; the first token goes out when it is known
    SETTLED   all of it is out and proved, pages are given back; repeats the news until Bye
    CLOSING   cancelled, failed, or alone: nothing more goes out, what is in flight is waited for

Law: a write is posted only while SHIPPING, only within what was asked for, and never twice; pages
are released once, when no chunk is in flight. This module decides nothing about what is computed.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tandemkv.transfer import wire
from tandemkv.transfer.chunks import IN_FLIGHT, SETTLED, UNPOSTED, Chunk, ChunkEvent, ChunkState
from tandemkv.transfer.session import (
    LATE,
    UNFIT,
    Abort,
    Action,
    Admit,
    Computed,
    Dropped,
    Event,
    PeerDead,
    PeerLost,
    Post,
    Recall,
    Release,
    Sampled,
    Send,
    SessionEvent,
    Start,
    Stop,
    Story,
    Tick,
    Timing,
    Withheld,
    WriteDone,
    WriteFailed,
    WriteOver,
)
from tandemkv.transfer.slots import Slots, add, meets, slots_of, within
from tandemkv.transfer.wire import GroupSpans, Lost


class SenderState(StrEnum):
    PARKED = "parked"
    ASKED = "asked"
    SHIPPING = "shipping"
    SETTLED = "settled"
    CLOSING = "closing"
    ENDED = "ended"


class SenderCause(StrEnum):
    ASK = "ask"
    ADMIT = "admit"
    SETTLE = "settle"
    CLOSE = "close"
    END = "end"


TRANSITIONS: dict[tuple[SenderState, SenderCause], SenderState] = {
    (SenderState.PARKED, SenderCause.ASK): SenderState.ASKED,
    (SenderState.PARKED, SenderCause.CLOSE): SenderState.CLOSING,
    (SenderState.ASKED, SenderCause.ADMIT): SenderState.SHIPPING,
    (SenderState.ASKED, SenderCause.CLOSE): SenderState.CLOSING,
    (SenderState.SHIPPING, SenderCause.SETTLE): SenderState.SETTLED,
    (SenderState.SHIPPING, SenderCause.CLOSE): SenderState.CLOSING,
    (SenderState.SETTLED, SenderCause.END): SenderState.ENDED,
    (SenderState.CLOSING, SenderCause.END): SenderState.ENDED,
}

_COMPUTING = (SenderState.PARKED, SenderState.ASKED, SenderState.SHIPPING)
_OVER = (SenderState.CLOSING, SenderState.ENDED)


class Sender:
    """One session. Attributes others may read: state, peer, ask, epoch, chunks, released, reason.

    peer: the decode worker's engine id, "" while PARKED. optional: draft groups: a chunk of theirs
    that fails is reported as lost and fails nobody. max_in_flight: chunks posted at a time.
    """

    def __init__(
        self,
        peer: str,
        ask: wire.Ask | None = None,
        *,
        optional: frozenset[int] = frozenset(),
        timing: Timing | None = None,
        max_in_flight: int | None = None,
        name: str = "",
    ) -> None:
        self.state = SenderState.ASKED if ask else SenderState.PARKED
        self.peer = peer
        self.ask = ask
        self.optional = optional
        self.timing = timing or Timing()
        self.max_in_flight = max_in_flight
        self.num_parts = 1
        self.chunks: list[Chunk] = []
        self.first: Sampled | None = None
        self.lost: list[Lost] = []
        self.last = False
        self.released = False
        self.reason = ""
        self.dropped = Dropped()
        self.story = Story(name or (f"sender {peer}#{ask.epoch}" if ask else "parked sender"))
        self._wanted: Slots = slots_of(ask.wanted if ask else ())
        self._offered: Slots = {}
        self._quiet_s = 0.0
        self._unsent_s = 0.0
        self._silent = False

    @property
    def epoch(self) -> int:
        """0 while PARKED."""
        return self.ask.epoch if self.ask else 0

    def handle(self, event: SessionEvent) -> list[Action]:
        """What the worker must do now, in order. Raises InvariantError for an event of our own
        worker that does not fit; nothing has changed then."""
        known = isinstance(event, wire.SessionMessage)
        actions = self._hear(event) if known else self._act(event)
        if not isinstance(event, Tick) or actions:
            self.story.note(event, self.state)
        return actions

    # -- what the other side says ------------------------------------------------------------------

    def _hear(self, message: wire.SessionMessage) -> list[Action]:
        taken = self.state is SenderState.PARKED and isinstance(message, wire.Ask)
        if self.state is SenderState.ENDED or (message.epoch != self.epoch and not taken):
            self.dropped.count(LATE, message)
            return []
        self._quiet_s = 0.0
        match message:
            case wire.Ask():
                return self._asked(message)
            case wire.Renew():
                return self._news()
            case wire.Cancel():
                return self._close(message.reason or "cancelled by the decode worker", stop=True)
            case wire.Bye():
                self._silent = True
                return self._close("the decode worker needs nothing more", stop=True)
            case _:
                self.dropped.count(UNFIT, message)
                return []

    def _asked(self, ask: wire.Ask) -> list[Action]:
        if self.state is SenderState.PARKED:
            self.state = self.story.follow(TRANSITIONS, self.state, SenderCause.ASK)
            self.ask, self._wanted = ask, slots_of(ask.wanted)
            return [Start(ask)]
        if self.state is SenderState.SHIPPING:
            return [Send(wire.Accept(epoch=self.epoch, lease_s=self.timing.lease_s))]
        return self._news()

    def _news(self) -> list[Action]:
        """The first token if it is known, and what has been delivered so far."""
        if self.state in _OVER:
            return []
        actions: list[Action] = []
        if self.first is not None and self.state is not SenderState.ASKED:
            actions.append(Send(self._first_token(self.first)))
        final = self.state is SenderState.SETTLED
        delivered = wire.Delivered(
            epoch=self.epoch,
            chunks=self._notes(),
            lost=tuple(self.lost),
            final=final,
            clean=final and self.clean,
        )
        self._unsent_s = 0.0
        return [*actions, Send(delivered)]

    # -- what our worker reports -------------------------------------------------------------------

    def _act(self, event: Event) -> list[Action]:
        crossing = isinstance(event, Admit | Computed | Sampled | Withheld)
        if crossing and self.state in _OVER:  # results that cross with the end of their session
            self.dropped.count(LATE, event)
            return []
        match event:
            case Tick():
                return self._tick(event)
            case Admit():
                return self._admit(event)
            case Computed():
                return self._computed(event)
            case Sampled():
                return self._sampled(event)
            case Withheld():
                return self._withheld(event)
            case WriteDone() | WriteFailed() | WriteOver():
                return self._written(event)
            case Abort():
                return self._close(event.reason, fail=True)
            case PeerLost():
                return self._close(event.reason, fail=True, stop=True)
            case PeerDead():
                self._silent = True
                return self._close(event.reason, stop=True)
            case _:
                raise self.story.error(f"{type(event).__name__} is no event of a sender")

    def _admit(self, event: Admit) -> list[Action]:
        after = self.story.follow(TRANSITIONS, self.state, SenderCause.ADMIT)
        if event.num_parts < 1:
            raise self.story.error(f"{event.num_parts} parts")
        self.state, self.num_parts = after, event.num_parts
        accept = Send(wire.Accept(epoch=self.epoch, lease_s=self.timing.lease_s))
        first = [Send(self._first_token(self.first))] if self.first else []
        return [accept, *first, *self._advance()]

    def _computed(self, event: Computed) -> list[Action]:
        if self.state not in _COMPUTING or self.last:
            raise self.story.error(f"rows computed after the last ones, when {self.state}")
        if meets(event.groups, self._offered):
            raise self.story.error("rows computed twice")
        for groups in self._split(event.groups):
            required = groups[0].group not in self.optional
            self.chunks.append(Chunk(len(self.chunks), groups, required=required))
        add(self._offered, event.groups)
        self.last = event.last
        return self._advance()

    def _sampled(self, event: Sampled) -> list[Action]:
        if self.state not in _COMPUTING or self.first is not None:
            raise self.story.error(f"a first token was known already, when {self.state}")
        self.first = event
        if self.state is not SenderState.SHIPPING:
            return []
        return [Send(self._first_token(event)), *self._advance()]

    def _withheld(self, event: Withheld) -> list[Action]:
        required = any(part.group not in self.optional for part in event.groups)
        if self.state not in _COMPUTING or self.last or required:
            raise self.story.error(f"rows withheld when {self.state}, required: {required}")
        groups = within(event.groups, self._wanted) if self.ask else event.groups
        if groups:
            self.lost.append(Lost(groups, event.reason))
        return []

    def _written(self, event: WriteDone | WriteFailed | WriteOver) -> list[Action]:
        if not 0 <= event.index < len(self.chunks):
            raise self.story.error(f"news of chunk {event.index} of {len(self.chunks)}")
        chunk = self.chunks[event.index]
        if not chunk.expects(event.part):
            raise self.story.error(f"news of part {event.part} of {chunk}")
        match event:
            case WriteDone():
                chunk.part_done(event.part)
            case WriteFailed():
                chunk.part_failed(event.part, event.reason)
            case WriteOver():
                chunk.part_over(event.part, clean=event.clean)
        if self.state is SenderState.CLOSING:
            return self._end_if_drained()
        if chunk.required and chunk.why:
            return self._close(f"chunk {chunk.index}: {chunk.why}", fail=True, stop=True)
        if chunk.state is ChunkState.DRAINED:
            self.lost.append(Lost(chunk.groups, chunk.why))
        return self._advance()

    def _tick(self, event: Tick) -> list[Action]:
        self._quiet_s += event.elapsed_s
        self._unsent_s += event.elapsed_s
        if self.state in _OVER:
            return []
        if self._quiet_s >= self.timing.lease_s:
            return self._close(f"no word for {self._quiet_s:g} s", fail=True, stop=True)
        if self.state is SenderState.SETTLED and self._unsent_s >= self.timing.resend_s:
            return self._news()
        return []

    # -- moving on ---------------------------------------------------------------------------------

    def _advance(self) -> list[Action]:
        """Take offered chunks within the grant, post what has room, settle when all is out."""
        if self.state is not SenderState.SHIPPING:
            return []
        actions: list[Action] = []
        for chunk in self.chunks:
            if chunk.state is ChunkState.OFFERED:
                groups = within(chunk.groups, self._wanted)
                chunk.handle(ChunkEvent.ACCEPT if groups else ChunkEvent.ABORT)
                if groups:
                    chunk.groups, chunk.num_parts = groups, self.num_parts
        room = self.max_in_flight or len(self.chunks)
        room -= sum(chunk.state in IN_FLIGHT for chunk in self.chunks)
        for chunk in self.chunks:
            if room > 0 and chunk.state is ChunkState.ACCEPTED:
                chunk.handle(ChunkEvent.POST)
                actions.append(Post(chunk.index, chunk.groups, chunk.num_parts))
                room -= 1
        if self.last and self.first and all(c.state in SETTLED for c in self.chunks):
            self.state = self.story.follow(TRANSITIONS, self.state, SenderCause.SETTLE)
            actions += [*self._news(), *self._release()]
        return actions

    def _close(self, reason: str, *, fail: bool = False, stop: bool = False) -> list[Action]:
        """Post nothing more; wait for what is in flight. From SETTLED there is nothing to wait for.

        fail: the other side is told at once. stop: our worker is told to stop computing.
        """
        if self.state in _OVER:
            return []
        actions: list[Action] = []
        if self.state is SenderState.SETTLED:
            return self._end()
        if stop and not (self.last and self.first):
            actions.append(Stop(reason))
        if fail and self.ask is not None:
            actions.append(Send(wire.Failed(epoch=self.epoch, reason=reason)))
        self.state = self.story.follow(TRANSITIONS, self.state, SenderCause.CLOSE)
        self.reason = reason
        for chunk in self.chunks:
            if chunk.state in UNPOSTED:
                chunk.handle(ChunkEvent.ABORT)
            elif chunk.state in IN_FLIGHT:
                chunk.doubt(reason)
                actions.append(Recall(chunk.index))
        return actions + self._end_if_drained()

    def _end_if_drained(self) -> list[Action]:
        return [] if any(chunk.state in IN_FLIGHT for chunk in self.chunks) else self._end()

    def _end(self) -> list[Action]:
        self.state = self.story.follow(TRANSITIONS, self.state, SenderCause.END)
        actions = self._release()
        if self.ask is not None and not self._silent:
            actions.append(Send(self.last_word))
        return actions

    def _release(self) -> list[Action]:
        if self.released:
            return []
        self.released = True
        return [Release()]

    # -- what it says ------------------------------------------------------------------------------

    @property
    def clean(self) -> bool:
        """Whether nothing that ended early can land any more."""
        return not any(chunk.unclean for chunk in self.chunks)

    @property
    def last_word(self) -> wire.Cancelled:
        """What to answer when somebody asks after the end."""
        return wire.Cancelled(
            epoch=self.epoch, clean=self.clean, reason=self.reason, chunks=self._notes()
        )

    def _notes(self) -> tuple[wire.ChunkNote, ...]:
        return tuple(c.note for c in self.chunks if c.state is ChunkState.DELIVERED)

    def _first_token(self, first: Sampled) -> wire.FirstToken:
        return wire.FirstToken(epoch=self.epoch, **msgspec.structs.asdict(first))

    def _split(self, groups: tuple[GroupSpans, ...]) -> list[tuple[GroupSpans, ...]]:
        """Target groups first, draft groups by themselves: they may fail alone."""
        required = tuple(part for part in groups if part.spans and part.group not in self.optional)
        rest = tuple(part for part in groups if part.spans and part.group in self.optional)
        return [part for part in (required, rest) if part]

    # -- law ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless the module's law holds."""
        for chunk in self.chunks:
            chunk.check()
        in_flight = [chunk for chunk in self.chunks if chunk.state in IN_FLIGHT]
        if self.released != (self.state in (SenderState.SETTLED, SenderState.ENDED)):
            raise self.story.error(f"released: {self.released} when {self.state}")
        if self.released and any(chunk.state not in SETTLED for chunk in self.chunks):
            raise self.story.error("pages released while a chunk is not settled")
        if in_flight and self.state not in (SenderState.SHIPPING, SenderState.CLOSING):
            raise self.story.error(f"writes in flight when {self.state}")
        if self.max_in_flight and len(in_flight) > self.max_in_flight:
            raise self.story.error(f"{len(in_flight)} chunks in flight")
        seen: Slots = {}
        for chunk in self.chunks:
            if chunk.state in IN_FLIGHT or chunk.state is ChunkState.DELIVERED:
                if within(chunk.groups, self._wanted) != chunk.groups or meets(chunk.groups, seen):
                    raise self.story.error(f"chunk {chunk.index} was not asked for, or is twice")
                add(seen, chunk.groups)
