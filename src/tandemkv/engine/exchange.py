"""Hand-offs of one worker: its engine, its sessions, its data plane and its control channel.

    decode side   fetch -> Sink, Ask -> rows land -> Ready, Release -> the request resumes
    prefill side  Ask -> Source -> chunks as they become final -> first token -> Release -> close

Law: sessions decide, this module does: it turns their actions into pages, writes and frames, and
reports what came of them. A request that is fetched goes on whatever happens: with the rows that
landed, or computed here, with the reason counted. Called between steps, on the engine's thread; it
owns no socket and no clock.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandemkv.base.errors import PeerError, RequestError
from tandemkv.base.spans import SpanSet
from tandemkv.engine.engine import Engine
from tandemkv.engine.handoff import Sink, Source, offers_of
from tandemkv.sched.batch import Output
from tandemkv.sched.request import Request
from tandemkv.transfer import session as ses
from tandemkv.transfer import wire
from tandemkv.transfer.desk import Receivers, Senders, Step
from tandemkv.transfer.offer import GroupPair, Offer, PeerPlan, Refusal, WorkerRole, match
from tandemkv.transfer.plan import Route, due, expected_bytes, lacks, regions, routes
from tandemkv.transfer.receiver import Receiver
from tandemkv.transfer.sender import Sender
from tandemkv.transfer.transport import (
    Batch,
    Disconnected,
    Done,
    Failed,
    Fenced,
    Handle,
    Memory,
    Notified,
    Over,
    PeerName,
    Transport,
)

log = logging.getLogger("tandemkv")

FETCHED, COMPUTED_HERE, LEFT_OUT = "fetched", "computed_here: ", "draft_left_out: "
NOT_COVERED = "not_covered"
"""Why a prefill worker withholds draft rows: it has a gap there itself."""


class HandoffStats(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the prompts that were to be computed elsewhere, since the start.

    outcomes: requests by how they got their prompt's KV: "fetched", or "computed_here: " and why.
    left_out: draft groups not exchanged with a peer, by reason. By layer group name: asked_bytes,
    of the slots asked for; received_bytes, as the data plane's notices say.
    """

    outcomes: dict[str, int]
    left_out: dict[str, int]
    asked_bytes: dict[str, int]
    received_bytes: dict[str, int]


@dataclass(slots=True)
class Fetch:
    """A request, not yet the engine's, on its way from a prefill worker."""

    request: Request
    peer: str
    sink: Sink | None = None
    session: Receiver | None = None
    landed: list[SpanSet] = field(default_factory=list[SpanSet])
    ready: ses.Ready | None = None
    gone: bool = False


@dataclass(slots=True)
class _Outgoing:
    """A prompt computed here for another worker."""

    source: Source
    peer: str
    sent: list[SpanSet]
    sampled: bool = False
    last: bool = False


class _Peer:
    """A worker that fits: what goes between us, and how its memory is reached."""

    def __init__(self, offer: Offer, plan: PeerPlan, name: PeerName) -> None:
        self.offer, self.plan, self.name = offer, plan, name
        self.out: dict[int, tuple[GroupPair, Route]] = {}
        self.into: dict[int, tuple[GroupPair, Route]] = {}
        for pair in plan.pairs:
            (self.out[pair.index],) = [(pair, r) for r in routes(pair.mine, pair.theirs)]
            (self.into[pair.peer_index],) = [(pair, r) for r in routes(pair.theirs, pair.mine)]


class Exchange:
    """The hand-offs of one engine. send(peer, frame): the control channel, which may lose frames.

    draft_transfer False is the kill switch: draft groups are left out on both sides and counted.
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
        self._transport, self._send, self._secret = transport, send, secret
        groups = offers_of(engine)
        blob = transport.register(
            [
                Memory(
                    address=g.shards[0].address,
                    num_bytes=g.num_pages * g.page_bytes(g.shards[0]),
                    page_bytes=g.page_bytes(g.shards[0]),
                )
                for g in groups
            ]
        )
        drafter = engine.drafter
        self.offer = Offer(
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
        optional = frozenset(int(g) for g in engine.layout.draft_groups)
        self.senders = Senders(engine_id, optional=optional, timing=timing)
        self.receivers = Receivers(engine_id, timing=timing)
        self.peers: dict[str, _Peer] = {}
        self.refused: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        """What happened, by a constant reason: fetched, computed_here, draft_left_out:..., ..."""
        self.bytes_sent: list[int] = [0] * len(groups)
        self.bytes_asked: list[int] = [0] * len(groups)
        self.bytes_received: list[int] = [0] * len(groups)
        """By layer group here, as written by the data plane and said in its notices."""
        self._fetches: dict[str, Fetch] = {}
        self._waiting: list[Fetch] = []
        self._by_session: dict[int, Fetch] = {}
        self._sources: dict[int, _Outgoing] = {}
        self._writes: dict[Handle, tuple[Sender, int]] = {}
        self._names: dict[PeerName, str] = {}

    # -- what the worker calls ---------------------------------------------------------------

    def greet(self, peer: str) -> None:
        """Say hello to a worker by its engine id; its answer makes it a peer."""
        self._say(peer, wire.Hello(offer=self.offer))

    def fetch(self, fetch: Fetch) -> None:
        """Have a prompt computed by a prefill worker; the request starts when its rows are here."""
        self._fetches[fetch.request.id] = fetch
        self._waiting.append(fetch)
        self._start_waiting()

    def abort(self, request_id: str) -> bool:
        """The client went. False: the request is the engine's, or unknown."""
        fetch = self._fetches.pop(request_id, None)
        if fetch is None:
            return False
        fetch.gone = True
        if fetch in self._waiting:
            self._waiting.remove(fetch)
        if fetch.session is not None:
            self._do(
                Step(
                    fetch.peer,
                    fetch.session,
                    self.receivers.handle(fetch.session, ses.Abort("the client went away")),
                )
            )
        return True

    def hear(self, data: bytes) -> None:
        """A frame of the control channel, or a notice of the data plane."""
        envelope = wire.decode(data, self._secret)
        if isinstance(envelope, wire.Undecodable):
            self.counts[f"undecodable: {envelope.reason}"] += 1
            return
        message = envelope.message
        if isinstance(message, wire.Hello | wire.Welcome):
            self._meet(message)
        elif isinstance(message, wire.Refused):
            self.refused[envelope.source] = (
                f"{message.field} is {message.mine} there and {message.theirs} here"
            )
        elif isinstance(message, wire.Ask | wire.Renew | wire.Cancel | wire.Bye):
            self._do_sender(self.senders.receive(envelope))
        else:
            if isinstance(message, wire.Chunk):
                self._count(envelope.source, message)
            self._do(self.receivers.receive(envelope))

    def _count(self, peer: str, chunk: wire.Chunk) -> None:
        pairs = self.peers[peer].into if peer in self.peers else {}
        for part, size in zip(chunk.groups, chunk.num_bytes, strict=False):
            if part.group in pairs:
                self.bytes_received[pairs[part.group][0].index] += size

    def note(self, output: Output) -> bool:
        """News from the engine's step; True if it is of a prompt that is computed for others."""
        for outgoing in self._sources.values():
            if outgoing.source.request.id == output.request_id:
                outgoing.source.note(output)
                return True
        return output.request_id.rpartition("#")[0] in self.peers

    def poll(self, elapsed_s: float) -> None:
        """Progress of the data plane, of sessions in time, of prompts that are computed here."""
        for event in self._transport.poll():
            self._data(event)
        for step in self.senders.tick(elapsed_s):
            self._do_sender(step)
        for step in self.receivers.tick(elapsed_s):
            self._do(step)
        self._ship()
        self._start_waiting()

    @property
    def busy(self) -> bool:
        """Whether anything is under way that a poll may move."""
        return bool(self._fetches or self._by_session or self._sources or self.senders.open)

    def peer_dead(self, peer: str, reason: str) -> None:
        """A worker's process is known to be gone."""
        self.peers.pop(peer, None)
        for step in self.senders.peer_dead(peer, reason):
            self._do_sender(step)
        for step in self.receivers.peer_dead(peer, reason):
            self._do(step)
        self._give_up_waiting(peer, "peer_dead")

    @property
    def stats(self) -> HandoffStats:
        """The counts so far."""
        left_out = {k: n for k, n in self.counts.items() if k.startswith(LEFT_OUT)}
        outcomes = (FETCHED, COMPUTED_HERE)
        names = [group.name for group in self.engine.layout.groups]
        return HandoffStats(
            outcomes={k: n for k, n in self.counts.items() if k.startswith(outcomes)},
            left_out={k.removeprefix(LEFT_OUT): n for k, n in left_out.items()},
            asked_bytes=dict(zip(names, self.bytes_asked, strict=True)),
            received_bytes=dict(zip(names, self.bytes_received, strict=True)),
        )

    def close(self) -> None:
        """End everything; the engine is not used afterwards."""
        self._transport.close()

    def check(self) -> None:
        """Raise InvariantError unless the sessions' laws hold."""
        self.senders.check()
        self.receivers.check()
        self._transport.check()

    # -- peers -------------------------------------------------------------------------------

    def _meet(self, message: wire.Hello | wire.Welcome) -> None:
        """Make a worker a peer, or refuse it by name."""
        theirs = message.offer
        plan = match(self.offer, theirs)
        if isinstance(plan, Refusal):
            self.refused[theirs.engine_id] = str(plan)
            self._say(
                theirs.engine_id,
                wire.Refused(field=plan.field, mine=str(plan.mine), theirs=str(plan.theirs)),
            )
            return
        try:
            name = self._transport.connect(theirs.transport_blob)
        except PeerError as error:
            self.refused[theirs.engine_id] = str(error)
            return
        self.refused.pop(theirs.engine_id, None)
        if theirs.engine_id not in self.peers:
            for left in plan.left_out:
                self.counts[LEFT_OUT + left.reason] += 1
        self.peers[theirs.engine_id] = _Peer(theirs, plan, name)
        self._names[name] = theirs.engine_id
        if isinstance(message, wire.Hello):
            self._say(theirs.engine_id, wire.Welcome(offer=self.offer))

    def _say(self, peer: str, message: Any) -> None:
        self._send(
            peer, wire.encode(message, source=self.engine_id, target=peer, secret=self._secret)
        )

    # -- decode side -------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        for peer in {fetch.peer for fetch in self._waiting} & self.refused.keys():
            self._give_up_waiting(peer, "refused")
        for fetch in list(self._waiting):
            if fetch.peer in self.peers and self._open(fetch):
                self._waiting.remove(fetch)

    def _open(self, fetch: Fetch) -> bool:
        """Hold pages and ask for rows; False: no room now."""
        peer, engine, request = self.peers[fetch.peer], self.engine, fetch.request
        fetch.sink = sink = Sink.open(engine, request.prompt, request.namespace)
        if sink is None:
            return False
        fetch.landed = [SpanSet() for _ in engine.layout.groups]
        tables, asks = sink.pages(), []
        for pair in peer.plan.pairs:
            spans, size = sink.wanted[pair.index], pair.mine.page_size
            if spans:
                first = spans[0][0] // size
                last = -(-spans[-1][1] // size)
                pages = tuple(tables[pair.index][first:last])
                _, route = peer.into[pair.peer_index]
                self.bytes_asked[pair.index] += expected_bytes([route], spans)
                asks.append(wire.GroupAsk(pair.peer_index, tuple(spans), first, pages))
        required = frozenset(pair.peer_index for pair in peer.plan.pairs if pair.group.required)
        step = self.receivers.ask(
            fetch.peer,
            request_id=request.id,
            tokens=request.prompt,
            params=request.params,
            seed=request.seed,
            groups=asks,
            required=required,
            namespace=request.namespace,
            priority=request.priority,
        )
        fetch.session = step.session
        assert step.session is not None
        self._by_session[step.session.epoch] = fetch
        self._do(step)
        return True

    def _do(self, step: Step[Receiver]) -> None:
        fetch = self._by_session.get(step.session.epoch) if step.session else None
        for action in step.actions:
            match action:
                case ses.Send(message=message):
                    self._say(step.peer, message)
                case ses.Fence():
                    peer = self.peers.get(step.peer)
                    if peer is not None:
                        self._transport.fence(peer.name)
                    elif step.session is not None:  # gone; the steps of its others come yet
                        actions = self.receivers.handle(step.session, ses.Fenced())
                        self._do(Step(step.peer, step.session, actions))
                case ses.Cover(groups=groups) if fetch is not None:
                    self._cover(fetch, groups)
                case ses.Ready() if fetch is not None:
                    self._ready(fetch, action)
                case ses.GiveUp(reason=reason) if fetch is not None:
                    if not fetch.gone:
                        log.warning("hand-off of %s given up: %s", fetch.request.id, reason)
                        self._compute_here(fetch, "given_up")
                case ses.Release() if fetch is not None:
                    self._release(fetch)
                case _:
                    pass

    def _cover(self, fetch: Fetch, groups: tuple[wire.GroupSpans, ...]) -> None:
        pairs = self.peers[fetch.peer].into if fetch.peer in self.peers else {}
        for part in groups:
            if part.group in pairs:
                for start, stop in part.spans:
                    fetch.landed[pairs[part.group][0].index].add(start, stop)

    def _ready(self, fetch: Fetch, ready: ses.Ready) -> None:
        """Rows and first token are here; pages are ours alone once nothing can land any more."""
        fetch.ready = ready
        session = fetch.session
        if ready.missing and session is not None:
            actions = self.receivers.handle(session, ses.Abort("rows came too late"))
            self._do(Step(fetch.peer, session, actions))

    def _release(self, fetch: Fetch) -> None:
        """Nobody writes any more: publish what landed, and go on from it."""
        session, sink = fetch.session, fetch.sink
        assert session is not None
        assert sink is not None
        del self._by_session[session.epoch]
        sink.deliver([list(spans) for spans in fetch.landed])
        if fetch.ready is None or fetch.gone:
            return
        first = fetch.ready.first
        self._fetches.pop(fetch.request.id, None)
        self.counts[FETCHED] += 1
        self.engine.submit(
            fetch.request,
            first_tokens=[first.token],
            cached_tokens=first.cached_tokens,
            logprobs=None if first.logprobs is None else [first.logprobs],
        )

    def _give_up_waiting(self, peer: str, reason: str) -> None:
        """What has not been asked of a worker yet, and will not be."""
        for fetch in [f for f in self._waiting if f.peer == peer]:
            self._waiting.remove(fetch)
            self._compute_here(fetch, reason)

    def _compute_here(self, fetch: Fetch, reason: str) -> None:
        """The request goes on without the other worker: what landed is found in the tree."""
        self._fetches.pop(fetch.request.id, None)
        self.counts[COMPUTED_HERE + reason] += 1
        self.engine.submit(fetch.request)

    # -- prefill side ------------------------------------------------------------------------

    def _do_sender(self, step: Step[Sender]) -> None:
        session = step.session
        for action in step.actions:
            match action:
                case ses.Send(message=message):
                    self._say(step.peer, message)
                case ses.Start(ask=ask) if session is not None:
                    self._compute(step.peer, session, ask)
                case ses.Post(index=index, groups=groups) if session is not None:
                    self._post(step.peer, session, index, groups)
                case ses.Recall(index=index) if session is not None:
                    for handle, (owner, number) in self._writes.items():
                        if owner is session and number == index:
                            self._transport.cancel(handle)
                case ses.Release() if session is not None:
                    outgoing = self._sources.pop(id(session), None)
                    if outgoing is not None:
                        outgoing.source.close()
                case _:
                    pass

    def _compute(self, peer: str, session: Sender, ask: wire.Ask) -> None:
        """Take an ask on, or say why not."""
        why = self._unfit(peer, ask)
        source = None
        if not why:
            try:
                source = Source(
                    self.engine,
                    ask.tokens,
                    ask.params,
                    seed=ask.seed,
                    namespace=ask.namespace,
                    request_id=f"{peer}#{ask.epoch}",
                )
            except RequestError as error:
                why = str(error)
        event: Any = ses.Abort(why)
        if source is not None:
            sent = [SpanSet() for _ in self.engine.layout.groups]
            self._sources[id(session)] = _Outgoing(source, peer, sent)
            event = ses.Admit(1)
        self._do_sender(Step(peer, session, self.senders.handle(session, event)))

    def _unfit(self, peer: str, ask: wire.Ask) -> str:
        """Why an ask cannot be served; '' if it can."""
        known = self.peers.get(peer)
        if known is None:
            return "say hello first"
        for group in ask.groups:
            if group.group not in known.out:
                return f"group {group.group} is not shared between us"
            _, route = known.out[group.group]
            if why := lacks(route.dst, group.spans, group.table):
                return why
        try:  # it may have closed the data plane, or a write may have failed, since the last time
            self._transport.connect(known.offer.transport_blob)
        except PeerError as error:
            return str(error)
        return ""

    def _ship(self) -> None:
        """Report what has been computed for others since the last time."""
        for session in list(self.senders.open.values()):
            outgoing = self._sources.get(id(session))
            if outgoing is not None and not outgoing.last:
                self._report(session, outgoing)

    def _report(self, session: Sender, outgoing: _Outgoing) -> None:
        source, peer = outgoing.source, self.peers.get(outgoing.peer)
        ask = session.ask
        if ask is None or peer is None:
            return
        if source.error is not None:
            outgoing.last = True
            self._tell(session, outgoing, ses.Abort(source.error))
            return
        done, covered = bool(source.first_tokens), source.covered()
        groups: list[wire.GroupSpans] = []
        lost: list[wire.GroupSpans] = []
        for part in ask.groups:
            pair, _ = peer.out[part.group]
            grain = 1 if done else max(pair.mine.page_size, pair.theirs.page_size)
            sent, want = outgoing.sent[part.group], SpanSet(part.spans)
            spans = due(want, covered[part.group], sent, grain)
            if spans:
                groups.append(wire.GroupSpans(part.group, tuple(spans)))
                for start, stop in spans:
                    sent.add(start, stop)
            if done:
                gaps = [s for a, b in want for s in sent.missing(a, b)]
                if gaps:
                    lost.append(wire.GroupSpans(part.group, tuple(gaps)))
        if lost and any(self.engine.layout.groups[p.group].required for p in lost):
            outgoing.last = True
            self._tell(session, outgoing, ses.Abort("target rows are not here any more"))
            return
        if done and not outgoing.sampled:
            outgoing.sampled = True
            request = source.request
            logprobs = source.logprobs
            self._tell(
                session,
                outgoing,
                ses.Sampled(
                    token=source.first_tokens[0],
                    num_rows=len(request.prompt),
                    seed=request.seed,
                    cached_tokens=request.cached_tokens,
                    logprobs=logprobs,
                ),
            )
        if lost:
            self._tell(session, outgoing, ses.Withheld(tuple(lost), NOT_COVERED))
        if groups or done:
            outgoing.last = done
            self._tell(session, outgoing, ses.Computed(tuple(groups), last=done))

    def _tell(self, session: Sender, outgoing: _Outgoing, event: Any) -> None:
        actions = self.senders.handle(session, event)
        self._do_sender(Step(outgoing.peer, session, actions))

    def _post(
        self, name: str, session: Sender, index: int, groups: tuple[wire.GroupSpans, ...]
    ) -> None:
        peer, outgoing, ask = self.peers[name], self._sources[id(session)], session.ask
        assert ask is not None
        tables = {part.group: part.table for part in ask.groups}
        here, batches, sizes = outgoing.source.pages(), [], []
        for part in groups:
            pair, route = peer.out[part.group]
            found = regions(route, part.spans, here[part.group], tables[part.group])
            batches.append(Batch(pair.index, pair.peer_index, found))
            sizes.append(sum(size for _, _, size in found))
            self.bytes_sent[part.group] += sizes[-1]
        notice = wire.encode(
            wire.Chunk(epoch=session.epoch, index=index, groups=groups, num_bytes=tuple(sizes)),
            source=self.engine_id,
            target=name,
            secret=self._secret,
        )
        try:
            handle = self._transport.write(peer.name, batches, notice)
        except PeerError as error:
            for event in (ses.WriteFailed(index, str(error)), ses.WriteOver(index)):
                self._tell(session, outgoing, event)
            return
        self._writes[handle] = (session, index)

    # -- the data plane ----------------------------------------------------------------------

    def _data(self, event: Any) -> None:
        match event:
            case Notified(message=message):
                self.hear(message)
            case Done(handle=handle):
                self._written(handle, lambda i: ses.WriteDone(i), over=True)
            case Failed(handle=handle, reason=reason):
                self._written(handle, lambda i: ses.WriteFailed(i, reason), over=False)
            case Over(handle=handle, clean=clean):
                self._written(handle, lambda i: ses.WriteOver(i, clean=clean), over=True)
            case Disconnected(peer=peer, reason=reason):
                name = self._names.get(peer, "")
                for step in self.senders.peer_lost(name, reason):
                    self._do_sender(step)
                for again in self.receivers.peer_lost(name, reason):
                    self._do(again)
            case Fenced(peer=peer):
                name = self._names.get(peer, "")
                self.peers.pop(name, None)
                for again in self.receivers.fenced(name):
                    self._do(again)
                self._give_up_waiting(name, "peer_fenced")
            case _:
                pass

    def _written(self, handle: Handle, make: Callable[[int], Any], *, over: bool) -> None:
        owner = self._writes.pop(handle, None) if over else self._writes.get(handle)
        if owner is None:
            return
        session, index = owner
        actions = self.senders.handle(session, make(index))
        self._do_sender(Step(session.peer, session, actions))
