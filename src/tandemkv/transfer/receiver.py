"""The decode worker's side of a session: pages are granted, rows land, and the grant is closed.

    ASKING --accept--> RECEIVING --ready--> LINGERING ---------end--------> ENDED
       |                   |                  |   |                           ^
       +------cancel-------+------cancel------+   +--fence--+                 |
                           v                                v                 |
                       CANCELLING --------fence---------> FENCING ----end-----+
                           +----------------------end-------------------------+

    ASKING      the ask is out: from here on the other side may write to our pages at any moment
    RECEIVING   it has answered; rows land, in any order; the first token comes
    LINGERING   the request runs; draft rows that come late are still taken
    CANCELLING  we want no more; the other side's last word is waited for, and asked for again
    FENCING     that word left something in flight, or the other process is gone: the data plane
                to it is being closed

Law: what is covered has landed in this session, was asked for, and was not covered before; pages
are released once, at the end, on proof (session.py says which). This module knows no pages.
"""

from __future__ import annotations

from enum import StrEnum

from tandemkv.transfer import wire
from tandemkv.transfer.chunks import IN_FLIGHT, Chunk, ChunkState
from tandemkv.transfer.session import (
    LATE,
    UNFIT,
    Abort,
    Action,
    Cover,
    Dropped,
    Event,
    Fence,
    Fenced,
    GiveUp,
    PeerDead,
    PeerLost,
    Ready,
    Release,
    Send,
    SessionEvent,
    Story,
    Tick,
    Timing,
)
from tandemkv.transfer.slots import Slots, add, covered_by, groups_of, lacking, meets, slots_of
from tandemkv.transfer.wire import GroupSpans, Lost


class ReceiverState(StrEnum):
    ASKING = "asking"
    RECEIVING = "receiving"
    LINGERING = "lingering"
    CANCELLING = "cancelling"
    FENCING = "fencing"
    ENDED = "ended"


class ReceiverCause(StrEnum):
    ACCEPT = "accept"
    READY = "ready"
    CANCEL = "cancel"
    FENCE = "fence"
    END = "end"


TRANSITIONS: dict[tuple[ReceiverState, ReceiverCause], ReceiverState] = {
    (ReceiverState.ASKING, ReceiverCause.ACCEPT): ReceiverState.RECEIVING,
    (ReceiverState.ASKING, ReceiverCause.CANCEL): ReceiverState.CANCELLING,
    (ReceiverState.RECEIVING, ReceiverCause.READY): ReceiverState.LINGERING,
    (ReceiverState.RECEIVING, ReceiverCause.CANCEL): ReceiverState.CANCELLING,
    (ReceiverState.LINGERING, ReceiverCause.CANCEL): ReceiverState.CANCELLING,
    (ReceiverState.LINGERING, ReceiverCause.FENCE): ReceiverState.FENCING,
    (ReceiverState.LINGERING, ReceiverCause.END): ReceiverState.ENDED,
    (ReceiverState.CANCELLING, ReceiverCause.FENCE): ReceiverState.FENCING,
    (ReceiverState.CANCELLING, ReceiverCause.END): ReceiverState.ENDED,
    (ReceiverState.FENCING, ReceiverCause.END): ReceiverState.ENDED,
}

_WAITING = (ReceiverState.ASKING, ReceiverState.RECEIVING)
_OPEN = (*_WAITING, ReceiverState.LINGERING)

MAX_CHUNK_INDEX = 2**20


class Receiver:
    """One session. Attributes others may read: state, peer, ask, epoch, first, landed, lost.

    peer: the prefill worker's engine id. required: groups that the request cannot start without.
    landed: slots that were delivered, by group. proof: why the pages could be released.
    """

    def __init__(
        self,
        peer: str,
        ask: wire.Ask,
        *,
        required: frozenset[int],
        timing: Timing | None = None,
    ) -> None:
        self.state = ReceiverState.ASKING
        self.peer = peer
        self.ask = ask
        self.required = required
        self.timing = timing or Timing()
        self.lease_s = self.timing.lease_s
        self.chunks: dict[int, Chunk] = {}
        self.landed: Slots = {}
        self.lost: tuple[Lost, ...] = ()
        self.first: wire.FirstToken | None = None
        self.final: wire.Delivered | None = None
        self.ready = False
        self.gave_up = False
        self.proof = ""
        self.dropped = Dropped()
        self.story = Story(f"receiver {peer}#{ask.epoch}")
        self._wanted = slots_of(ask.wanted)
        self._named: Slots = {}
        self._quiet_s = 0.0
        self._unsent_s = 0.0
        self._waited_s = 0.0
        self._reason = ""

    @property
    def epoch(self) -> int:
        return self.ask.epoch

    @property
    def unheard(self) -> bool:
        """Whether the other side has been silent for as long as we are patient."""
        return self._quiet_s >= self.timing.patience_s

    def open(self) -> list[Action]:
        """The first thing to do."""
        return [Send(self.ask)]

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
        over = self.state in (ReceiverState.FENCING, ReceiverState.ENDED)
        if over or message.epoch != self.epoch:
            self.dropped.count(LATE, message)
            return []
        self._quiet_s = 0.0
        match message:
            case wire.Failed():
                return self._cancel(message.reason)
            case wire.Cancelled():
                return self._cancelled(message)
            case wire.Accept() | wire.Chunk() | wire.Delivered() | wire.FirstToken():
                if self.state is ReceiverState.ASKING:
                    self.state = self.story.follow(TRANSITIONS, self.state, ReceiverCause.ACCEPT)
            case _:
                self.dropped.count(UNFIT, message)
                return []
        match message:
            case wire.Accept():
                self.lease_s = message.lease_s
                return []
            case wire.Chunk():
                return self._chunk(message)
            case wire.Delivered():
                return self._delivered(message)
            case wire.FirstToken():
                return self._first_token(message)

    def _chunk(self, message: wire.Chunk) -> list[Action]:
        part, num_parts = message.part, message.num_parts
        chunk = self._known(message.index, message.groups, num_parts)
        if chunk is not None and (part in chunk.done or chunk.state not in IN_FLIGHT):
            self.dropped.count(LATE, message)
            return []
        if chunk is None or num_parts != chunk.num_parts or part >= num_parts:
            return self._unfit(message, f"chunk {message.index} does not fit")
        return [*self._land(chunk, (part,)), *self._advance()]

    def _delivered(self, message: wire.Delivered) -> list[Action]:
        if not all(covered_by(lost.groups, self._wanted) for lost in message.lost):
            return self._unfit(message, "slots are lost that were not asked for")
        if len(message.lost) > len(self.lost):
            self.lost = message.lost
        if message.final:
            self.final = message
        actions = self._notes(message, message.chunks)
        if message.final and self.state is ReceiverState.CANCELLING:
            return actions + self._last_word(message.clean)
        return actions + self._advance()

    def _notes(
        self, message: wire.Delivered | wire.Cancelled, notes: tuple[wire.ChunkNote, ...]
    ) -> list[Action]:
        """Chunks that the other side knows to be delivered, whether we saw a notice or not."""
        actions: list[Action] = []
        for note in notes:
            chunk = self._known(note.index, note.groups, 1)
            if chunk is None:
                return actions + self._unfit(message, f"chunk {note.index} does not fit")
            actions += self._land(chunk, tuple(chunk.missing))
        return actions

    def _known(self, index: int, groups: tuple[GroupSpans, ...], parts: int) -> Chunk | None:
        """The chunk of this index, made when it is first heard of; None if that cannot be."""
        chunk = self.chunks.get(index)
        if chunk is not None:
            return chunk if chunk.groups == groups else None
        asked = covered_by(groups, self._wanted) and not meets(groups, self._named)
        if not asked or index > MAX_CHUNK_INDEX:
            return None
        state = ChunkState.POSTED if self.state in _OPEN else ChunkState.IN_DOUBT
        required = any(part.group in self.required for part in groups)
        chunk = Chunk(index, groups, required=required, num_parts=parts, state=state)
        self.chunks[index] = chunk
        add(self._named, groups)
        return chunk

    def _land(self, chunk: Chunk, parts: tuple[int, ...]) -> list[Action]:
        for part in parts:
            chunk.part_done(part)
        if not parts or chunk.state is not ChunkState.DELIVERED:
            return []
        add(self.landed, chunk.groups)
        return [Cover(chunk.groups)] if self.state in _OPEN else []

    def _first_token(self, message: wire.FirstToken) -> list[Action]:
        if message.num_rows != len(self.ask.tokens):
            return self._unfit(message, f"first token after {message.num_rows} rows")
        self.first = self.first or message
        return self._advance()

    def _cancelled(self, message: wire.Cancelled) -> list[Action]:
        actions = self._notes(message, message.chunks)
        if self.state in _OPEN:
            actions += self._cancel(message.reason or "the prefill worker cancelled", tell=False)
        if self.state is ReceiverState.CANCELLING:
            actions += self._last_word(message.clean)
        return actions

    def _unfit(self, message: wire.SessionMessage, why: str) -> list[Action]:
        self.dropped.count(UNFIT, message)
        return self._cancel(f"the prefill worker broke the protocol: {why}")

    # -- what our worker reports -------------------------------------------------------------------

    def _act(self, event: Event) -> list[Action]:
        match event:
            case Tick():
                return self._tick(event.elapsed_s)
            case Abort():
                return self._cancel(event.reason, give_up=False)
            case PeerLost():
                return self._cancel(event.reason)
            case PeerDead():
                actions = self._cancel(event.reason, tell=False)
                cancelling = self.state is ReceiverState.CANCELLING
                return actions + self._fence() if cancelling else actions
            case Fenced():
                if self.state is ReceiverState.FENCING:
                    return self._end("fenced")
                return self._cancel("the data plane was closed")
            case _:
                raise self.story.error(f"{type(event).__name__} is no event of a receiver")

    def _tick(self, elapsed_s: float) -> list[Action]:
        self._quiet_s += elapsed_s
        self._unsent_s += elapsed_s
        if self.state in _OPEN and self.unheard:
            return self._cancel(f"no word from {self.peer} for {self._quiet_s:g} s")
        if self.state is ReceiverState.LINGERING:
            self._waited_s += elapsed_s
            if self._waited_s >= self.timing.linger_s:
                return self._cancel("draft rows did not come")
        if self.state is ReceiverState.RECEIVING and self.first and not self._lacks_required():
            self._waited_s += elapsed_s
        renew_s = min(self.lease_s, self.timing.patience_s) / 3
        due = {
            ReceiverState.ASKING: (self.timing.resend_s, self.ask),
            ReceiverState.RECEIVING: (renew_s, wire.Renew(epoch=self.epoch)),
            ReceiverState.LINGERING: (renew_s, wire.Renew(epoch=self.epoch)),
            ReceiverState.CANCELLING: (self.timing.resend_s, self._cancel_message()),
        }.get(self.state)
        if due is None or self._unsent_s < due[0]:
            return self._advance()
        self._unsent_s = 0.0
        return [Send(due[1]), *self._advance()]

    # -- moving on ---------------------------------------------------------------------------------

    def _advance(self) -> list[Action]:
        """Start the request when it can start; end when nothing can be in flight any more."""
        actions: list[Action] = []
        missing = groups_of(lacking(self._wanted, self.landed))
        if self.state is ReceiverState.RECEIVING and self.first:
            waited = self._waited_s >= self.timing.draft_wait_s and not self._lacks_required()
            if not missing or self.final or waited:
                self.state = self.story.follow(TRANSITIONS, self.state, ReceiverCause.READY)
                self.ready, self._waited_s = True, 0.0
                actions.append(Ready(self.first, missing, self.lost))
        if self.state in (ReceiverState.LINGERING, ReceiverState.CANCELLING) and not missing:
            return actions + self._end("all that was asked for has landed")
        if self.state is ReceiverState.LINGERING and self.final:
            actions += self._last_word(self.final.clean)
        return actions

    def _cancel(self, reason: str, *, give_up: bool = True, tell: bool = True) -> list[Action]:
        """Want no more. give_up: the request was waiting and must go on elsewhere."""
        if self.state not in _OPEN:
            return []
        actions: list[Action] = []
        if give_up and self.state in _WAITING:
            self.gave_up = True
            actions.append(GiveUp(reason))
        self.state = self.story.follow(TRANSITIONS, self.state, ReceiverCause.CANCEL)
        self._reason, self._unsent_s = reason, 0.0
        for chunk in self.chunks.values():
            chunk.doubt(reason)
        if self.final:
            return actions + self._last_word(self.final.clean)
        return [*actions, Send(self._cancel_message())] if tell else actions

    def _fence(self) -> list[Action]:
        """Close the data plane: nobody is left to say that nothing is in flight."""
        self.state = self.story.follow(TRANSITIONS, self.state, ReceiverCause.FENCE)
        return [Fence()]

    def _last_word(self, clean: bool) -> list[Action]:
        """The other side writes nothing more. clean: and nothing is in flight."""
        if clean:
            return self._end("the prefill worker's last word")
        return self._fence()

    def _end(self, proof: str) -> list[Action]:
        self.state = self.story.follow(TRANSITIONS, self.state, ReceiverCause.END)
        self.proof = proof
        for chunk in self.chunks.values():
            for part in chunk.missing if chunk.state in IN_FLIGHT else ():
                chunk.part_over(part, clean=True)
        return [Release(), Send(wire.Bye(epoch=self.epoch))]

    def _lacks_required(self) -> bool:
        missing = lacking(self._wanted, self.landed)
        return any(missing[g] for g in self.required if g in missing)

    def _cancel_message(self) -> wire.Cancel:
        return wire.Cancel(epoch=self.epoch, reason=self._reason)

    # -- law ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless the module's law holds."""
        for chunk in self.chunks.values():
            chunk.check()
        delivered: Slots = {}
        for chunk in self.chunks.values():
            if chunk.state is ChunkState.DELIVERED:
                if meets(chunk.groups, delivered):
                    raise self.story.error(f"chunk {chunk.index} holds what another one holds")
                add(delivered, chunk.groups)
        if groups_of(delivered) != groups_of(self.landed):
            raise self.story.error("covered slots are not those that were delivered")
        if any(lacking(self.landed, self._wanted)[g] for g in self.landed):
            raise self.story.error("slots landed that were not asked for")
        ended = self.state is ReceiverState.ENDED
        if ended and any(chunk.state in IN_FLIGHT for chunk in self.chunks.values()):
            raise self.story.error("pages released while a chunk is in flight")
        both = self.ready and (self.gave_up or self.first is None)
        if ended != bool(self.proof) or both:
            flags = f"ready {self.ready}, gave up {self.gave_up}"
            raise self.story.error(f"{self.state} with proof {self.proof!r}, {flags}")
