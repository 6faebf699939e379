"""All sessions of one worker: who gets which message, and what is answered after the end.

Law: an epoch is opened once. A delayed or repeated Ask of an attempt that is over, or that was
cancelled before it came, opens nothing: it gets that attempt's last word again. What is remembered
of ended sessions is bounded: an Ask says which epochs its worker has still open. A message from
another worker than a session's own, or meant for an earlier incarnation of this one, is dropped
and counted. The desk decides nothing and knows no engine: a step goes back to whoever runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from tandemkv.base.errors import InvariantError
from tandemkv.base.sampling import SamplingParams
from tandemkv.kv.keys import Namespace
from tandemkv.transfer import wire
from tandemkv.transfer.receiver import Receiver, ReceiverState
from tandemkv.transfer.sender import Sender, SenderState
from tandemkv.transfer.session import (
    LATE,
    UNFIT,
    Action,
    Dropped,
    Event,
    Fenced,
    PeerDead,
    PeerLost,
    Send,
    SessionEvent,
    Start,
    Tick,
    Timing,
)

MISADDRESSED = "misaddressed"
"""Counted: meant for another worker, or for an earlier incarnation of this one."""

_NEVER = 2**62
"""Above every epoch: the oldest open one of a worker that is dead."""

S = TypeVar("S")


class Step(NamedTuple, Generic[S]):
    """What to do for a session; Sends go to `peer`. session: None for an answer after the end."""

    peer: str
    session: S | None
    actions: list[Action]


class Senders:
    """The prefill worker's sessions, by the decode worker's engine id and epoch.

    optional: draft groups of our layout. closed: last words of ended epochs; oldest: below it all
    epochs of that worker are over.
    """

    def __init__(
        self,
        engine_id: str,
        *,
        optional: frozenset[int] = frozenset(),
        timing: Timing | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.optional = optional
        self.timing = timing or Timing()
        self.max_in_flight = max_in_flight
        self.open: dict[tuple[str, int], Sender] = {}
        self.parked: dict[str, Sender] = {}
        self.closed: dict[str, dict[int, wire.Cancelled]] = {}
        self.oldest: dict[str, int] = {}
        self.dropped = Dropped()

    def park(self, name: str) -> Sender:
        """A prefill that nobody has asked for yet; an Ask that says `name` takes it over."""
        if name in self.parked:
            raise InvariantError(f"a prefill is parked as {name!r} already")
        sender = self._sender("", None, f"parked {name}")
        self.parked[name] = sender
        return sender

    def receive(self, envelope: wire.Envelope) -> Step[Sender]:
        """Take a decode worker's message."""
        peer, message = envelope.source, envelope.message
        if envelope.target != self.engine_id:
            return self._drop(MISADDRESSED, peer, message)
        if not isinstance(message, wire.SessionMessage):
            return self._drop(UNFIT, peer, message)
        if isinstance(message, wire.Ask):
            self._forget(peer, message.oldest)
        session = self.open.get((peer, message.epoch))
        if session is not None:
            return Step(peer, session, self.handle(session, message))
        if message.epoch < self.oldest.get(peer, 0):
            return self._drop(LATE, peer, message)
        word = self.closed.get(peer, {}).get(message.epoch)
        if word is None and isinstance(message, wire.Ask):
            return self._take(peer, message)
        if word is None and not isinstance(message, wire.Renew):
            word = wire.Cancelled(epoch=message.epoch, clean=True, reason="cancelled before asked")
            self._file(peer, word)
        if word is None or isinstance(message, wire.Bye):
            return self._drop(LATE, peer, message)
        self.dropped.count(LATE, message)
        return Step(peer, None, [Send(word)])

    def handle(self, session: Sender, event: SessionEvent) -> list[Action]:
        """Hand an event to a session, and note its end."""
        actions = session.handle(event)
        if session.state is SenderState.ENDED:
            if self.open.pop((session.peer, session.epoch), None) is not None:
                self._file(session.peer, session.last_word)
            for name in [n for n, parked in self.parked.items() if parked is session]:
                del self.parked[name]
        return actions

    def all(self) -> list[Sender]:
        return [*self.open.values(), *self.parked.values()]

    def tick(self, elapsed_s: float) -> list[Step[Sender]]:
        """Time passes for everyone, whether or not there is other work."""
        return self._tell(self.all(), Tick(elapsed_s))

    def peer_lost(self, peer: str, reason: str) -> list[Step[Sender]]:
        """A decode worker cannot be reached, or its data plane broke."""
        return self._tell(self._of(peer), PeerLost(reason))

    def peer_dead(self, peer: str, reason: str) -> list[Step[Sender]]:
        """A decode worker's process is gone. Its engine id never comes back."""
        steps = self._tell(self._of(peer), PeerDead(reason))
        self._forget(peer, _NEVER)
        return steps

    def _take(self, peer: str, ask: wire.Ask) -> Step[Sender]:
        parked = self.parked.pop(ask.parked, None) if ask.parked else None
        if parked is not None:
            parked.peer = peer
            self.open[peer, ask.epoch] = parked
            return Step(peer, parked, self.handle(parked, ask))
        session = self._sender(peer, ask, "")
        self.open[peer, ask.epoch] = session
        return Step(peer, session, [Start(ask)])

    def _sender(self, peer: str, ask: wire.Ask | None, name: str) -> Sender:
        return Sender(
            peer,
            ask,
            optional=self.optional,
            timing=self.timing,
            max_in_flight=self.max_in_flight,
            name=name,
        )

    def _of(self, peer: str) -> list[Sender]:
        return [session for session in self.open.values() if session.peer == peer]

    def _tell(self, sessions: list[Sender], event: Event) -> list[Step[Sender]]:
        steps = [Step(s.peer, s, self.handle(s, event)) for s in sessions]
        return [step for step in steps if step.actions]

    def _file(self, peer: str, word: wire.Cancelled) -> None:
        if word.epoch >= self.oldest.get(peer, 0):
            self.closed.setdefault(peer, {})[word.epoch] = word

    def _forget(self, peer: str, oldest: int) -> None:
        if oldest > self.oldest.get(peer, 0):
            self.oldest[peer] = oldest
            closed = self.closed.get(peer, {})
            self.closed[peer] = {epoch: w for epoch, w in closed.items() if epoch >= oldest}

    def _drop(self, reason: str, peer: str, message: object) -> Step[Sender]:
        self.dropped.count(reason, message)
        return Step(peer, None, [])

    def check(self) -> None:
        """Raise InvariantError unless the module's law holds, and each session's."""
        for (peer, epoch), session in self.open.items():
            session.check()
            if session.peer != peer or session.epoch != epoch or epoch in self.closed.get(peer, {}):
                raise InvariantError(f"session {peer}#{epoch} is filed wrongly")
        for session in self.parked.values():
            session.check()
            if session.state is not SenderState.PARKED:
                raise InvariantError(f"{session.story.name} is {session.state}")
        if any(session.state is SenderState.ENDED for session in self.all()):
            raise InvariantError("an ended session is kept open")


class Receivers:
    """The decode worker's sessions, by epoch; it alone counts epochs."""

    def __init__(self, engine_id: str, *, timing: Timing | None = None) -> None:
        self.engine_id = engine_id
        self.timing = timing or Timing()
        self.open: dict[int, Receiver] = {}
        self.last_epoch = 0
        self.dropped = Dropped()

    def ask(
        self,
        peer: str,
        *,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams,
        seed: int,
        groups: Sequence[wire.GroupAsk],
        required: frozenset[int],
        namespace: Namespace | None = None,
        num_output: int = 0,
        priority: int = 0,
        parked: str = "",
    ) -> Step[Receiver]:
        """Open a session with a prefill worker: a new epoch, and the Ask to send.

        required: groups that the request cannot start without, by the peer's index.
        """
        self.last_epoch += 1
        ask = wire.Ask(
            epoch=self.last_epoch,
            oldest=min(self.open, default=self.last_epoch),
            request_id=request_id,
            tokens=tuple(tokens),
            params=params,
            seed=seed,
            groups=tuple(groups),
            namespace=namespace or Namespace(),
            num_output=num_output,
            priority=priority,
            parked=parked,
        )
        session = Receiver(peer, ask, required=required, timing=self.timing)
        self.open[ask.epoch] = session
        return Step(peer, session, session.open())

    def receive(self, envelope: wire.Envelope) -> Step[Receiver]:
        """Take a prefill worker's message, a notice that came with a write included."""
        peer, message = envelope.source, envelope.message
        if envelope.target != self.engine_id:
            return self._drop(MISADDRESSED, peer, message)
        if not isinstance(message, wire.SessionMessage):
            return self._drop(UNFIT, peer, message)
        session = self.open.get(message.epoch)
        if session is None:
            self.dropped.count(LATE, message)
            last = isinstance(message, wire.Cancelled | wire.Chunk)
            return Step(peer, None, [] if last else [Send(wire.Bye(epoch=message.epoch))])
        if session.peer != peer:
            return self._drop(MISADDRESSED, peer, message)
        return Step(peer, session, self.handle(session, message))

    def handle(self, session: Receiver, event: SessionEvent) -> list[Action]:
        """Hand an event to a session, and note its end."""
        actions = session.handle(event)
        if session.state is ReceiverState.ENDED:
            self.open.pop(session.epoch, None)
        return actions

    def tick(self, elapsed_s: float) -> list[Step[Receiver]]:
        """Time passes for everyone, whether or not there is other work."""
        return self._tell(list(self.open.values()), Tick(elapsed_s))

    def peer_lost(self, peer: str, reason: str) -> list[Step[Receiver]]:
        """A prefill worker cannot be reached, or its data plane broke."""
        return self._tell(self._of(peer), PeerLost(reason))

    def peer_dead(self, peer: str, reason: str) -> list[Step[Receiver]]:
        """A prefill worker's process is gone."""
        return self._tell(self._of(peer), PeerDead(reason))

    def fenced(self, peer: str) -> list[Step[Receiver]]:
        """The data plane to a prefill worker is closed."""
        return self._tell(self._of(peer), Fenced())

    def _of(self, peer: str) -> list[Receiver]:
        return [session for session in self.open.values() if session.peer == peer]

    def _tell(self, sessions: list[Receiver], event: Event) -> list[Step[Receiver]]:
        steps = [Step(s.peer, s, self.handle(s, event)) for s in sessions]
        return [step for step in steps if step.actions]

    def _drop(self, reason: str, peer: str, message: object) -> Step[Receiver]:
        self.dropped.count(reason, message)
        return Step(peer, None, [])

    def check(self) -> None:
        """Raise InvariantError unless the module's law holds, and each session's."""
        for epoch, session in self.open.items():
            session.check()
            if session.epoch != epoch or not 1 <= epoch <= self.last_epoch:
                raise InvariantError(f"session {session.peer}#{epoch} is filed wrongly")
            if session.state is ReceiverState.ENDED:
                raise InvariantError("an ended session is kept open")
