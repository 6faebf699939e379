"""Hand-offs of one worker: its engine, its data plane and its control channel put together.

    engine/peers.py      who fits, and how it is reached
    engine/fetching.py   the decode side: requests whose prompts others compute
    engine/shipping.py   the prefill side: prompts computed for others

Law: every frame, notice and event of the data plane goes to the one side that it is for. Called
between steps, on the engine's thread; it owns no socket and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from tandemkv.engine.engine import Engine
from tandemkv.engine.fetching import Fetch, Fetching
from tandemkv.engine.handoff import offers_of
from tandemkv.engine.peers import Peers
from tandemkv.engine.shipping import Shipping
from tandemkv.sched.batch import Output
from tandemkv.sched.request import Request
from tandemkv.transfer import session as ses
from tandemkv.transfer import wire
from tandemkv.transfer.offer import Offer, WorkerRole
from tandemkv.transfer.transport import (
    CPU,
    Disconnected,
    Done,
    Failed,
    Fenced,
    Memory,
    Notified,
    Over,
    Transport,
)


class HandoffStats(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the prompts that were to be computed elsewhere, since the start.

    fetched: requests whose prompt's KV came; computed_here: those where it did not, by reason;
    aborted: those whose client went before either. left_out: draft groups not exchanged with a
    peer, by reason. By layer group name: asked_bytes, of the slots asked for; received_bytes, as
    the data plane's notices say.
    """

    fetched: int
    aborted: int
    computed_here: dict[str, int]
    left_out: dict[str, int]
    asked_bytes: dict[str, int]
    received_bytes: dict[str, int]


class Exchange:
    """The hand-offs of one engine. send(peer, frame): the control channel, which may lose frames.

    draft_transfer False is the kill switch: draft groups are left out on both sides and counted.
    undecodable: frames that were dropped, by reason.
    """

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        engine_id: str,
        role: WorkerRole,
        send: Callable[[str, bytes], None],
        *,
        draft_transfer: bool = True,
        secret: bytes | None = None,
        timing: ses.Timing | None = None,
    ) -> None:
        self.engine, self.engine_id = engine, engine_id
        self._transport, self._secret = transport, secret
        offer = _offer(engine, transport, engine_id, role, draft_transfer=draft_transfer)
        self.peers = Peers(offer, transport, send, secret)
        self.fetching = Fetching(engine, self.peers, transport, timing)
        self.shipping = Shipping(engine, self.peers, transport, timing)
        self.undecodable: Counter[str] = Counter()

    def greet(self, peer: str) -> None:
        """Say hello to a worker by its engine id; its answer makes it a peer."""
        self.peers.say(peer, wire.Hello(offer=self.peers.offer))

    def fetch(self, fetch: Fetch) -> None:
        """Have a prompt computed by a prefill worker; the request starts when its rows are here."""
        self.fetching.fetch(fetch)

    def abort(self, request_id: str) -> bool:
        """The client went. False: the request is the engine's, or unknown."""
        return self.fetching.abort(request_id) or self.shipping.abort(request_id)

    def hear(self, data: bytes) -> None:
        """A frame of the control channel, or a notice of the data plane."""
        envelope = wire.decode(data, self._secret)
        if isinstance(envelope, wire.Undecodable):
            self.undecodable[envelope.reason] += 1
            return
        message = envelope.message
        self.fetching.spoke(envelope.source)
        if isinstance(message, wire.Hello | wire.Welcome):
            self.peers.meet(message)
        elif isinstance(message, wire.Refused):
            self.peers.turned_down(envelope.source, message)
        elif envelope.target != self.engine_id:  # meant for whoever had our address before
            self.greet(envelope.source)
        elif isinstance(message, wire.Ask | wire.Renew | wire.Cancel | wire.Bye):
            self.shipping.do(self.shipping.senders.receive(envelope))
        else:
            if isinstance(message, wire.Chunk):
                self.fetching.count(envelope.source, message)
            self.fetching.do(self.fetching.receivers.receive(envelope))

    def park(self, request: Request) -> None:
        """Compute a prompt and hold its rows for a worker that will ask for them by its id."""
        self.shipping.park(request)

    def note(self, output: Output) -> Output | None:
        """News from the engine's step; None if it is of a prompt that is computed for others."""
        return self.shipping.note(output)

    def poll(self, elapsed_s: float) -> None:
        """Progress of the data plane, of sessions in time, of prompts that are computed here."""
        for event in self._transport.poll():
            self._data(event)
        for step in self.shipping.senders.tick(elapsed_s):
            self.shipping.do(step)
        for again in self.fetching.receivers.tick(elapsed_s):
            self.fetching.do(again)
        self.shipping.ship()
        self.fetching.start_waiting(elapsed_s)

    @property
    def waits_for(self) -> set[str]:
        """Workers whose end would matter now."""
        return self.fetching.asked | self.shipping.asked

    @property
    def busy(self) -> bool:
        """Whether anything is under way that a poll may move."""
        return self.fetching.busy or self.shipping.busy

    def peer_dead(self, peer: str, reason: str) -> None:
        """A worker's process is known to be gone: what is kept of it goes as well."""
        known = self.peers.forget(peer)
        for step in self.shipping.senders.peer_dead(peer, reason):
            self.shipping.do(step)
        for again in self.fetching.receivers.peer_dead(peer, reason):
            self.fetching.do(again)
        self.fetching.give_up_waiting(peer, "peer_dead")
        self.fetching.spoke(peer)
        if known is not None:
            self._transport.fence(known.name)

    @property
    def stats(self) -> HandoffStats:
        """The counts so far."""
        names = [group.name for group in self.engine.layout.groups]
        return HandoffStats(
            fetched=self.fetching.fetched,
            aborted=self.fetching.aborted,
            computed_here=dict(self.fetching.computed_here),
            left_out=dict(self.peers.left_out),
            asked_bytes=dict(zip(names, self.fetching.bytes_asked, strict=True)),
            received_bytes=dict(zip(names, self.fetching.bytes_received, strict=True)),
        )

    def close(self) -> None:
        """End everything; the engine is not used afterwards."""
        self._transport.close()

    def check(self) -> None:
        """Raise InvariantError unless the sessions' laws hold."""
        self.shipping.senders.check()
        self.fetching.receivers.check()
        self._transport.check()

    def _data(self, event: Any) -> None:
        match event:
            case Notified(message=message):
                self.hear(message)
            case Done(handle=handle):
                self.shipping.written(handle, lambda i: ses.WriteDone(i), over=True)
            case Failed(handle=handle, reason=reason):
                self.shipping.written(handle, lambda i: ses.WriteFailed(i, reason), over=False)
            case Over(handle=handle, clean=clean):
                self.shipping.written(handle, lambda i: ses.WriteOver(i, clean=clean), over=True)
            case Disconnected(peer=peer, reason=reason):
                name = self.peers.name_of(peer)
                for step in self.shipping.senders.peer_lost(name, reason):
                    self.shipping.do(step)
                for again in self.fetching.receivers.peer_lost(name, reason):
                    self.fetching.do(again)
            case Fenced(peer=peer):
                name = self.peers.name_of(peer)
                self.peers.known.pop(name, None)
                for again in self.fetching.receivers.fenced(name):
                    self.fetching.do(again)
                self.fetching.give_up_waiting(name, "peer_fenced")
            case _:
                pass


def _offer(
    engine: Engine,
    transport: Transport,
    engine_id: str,
    role: WorkerRole,
    *,
    draft_transfer: bool,
) -> Offer:
    """What this worker has, its memory registered with the data plane."""
    groups, index = offers_of(engine), engine.storage.device_index
    blob = transport.register(
        [
            Memory(
                address=g.shards[0].address,
                num_bytes=g.num_pages * g.page_bytes(g.shards[0]),
                page_bytes=g.page_bytes(g.shards[0]),
                device=CPU if index is None else index,
            )
            for g in groups
        ]
    )
    drafter = engine.drafter
    return Offer(
        engine_id=engine_id,
        role=role,
        model_fingerprint=engine.target.spec.fingerprint,
        drafter_fingerprint=drafter.spec.fingerprint if drafter else "",
        num_draft_tokens=engine.plan.num_draft_tokens,
        block_size=engine.layout.block_size,
        groups=groups,
        draft_transfer=draft_transfer,
        transport=transport.kind,
        transport_blob=blob,
    )
