"""The decode side of hand-offs: requests whose prompts other workers compute.

    fetch -> Sink, Ask -> rows land -> Ready, Release -> the request resumes

Law: sessions decide, this module does: it turns their actions into held pages and published rows.
A request that is fetched goes on whatever happens: with the rows that landed, or computed here,
with the reason counted. A worker that was silent for too long is asked nothing until it speaks.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from tandemkv.base.spans import SpanSet
from tandemkv.engine.engine import Engine
from tandemkv.engine.handoff import Sink
from tandemkv.engine.peers import Peers
from tandemkv.sched.request import Request
from tandemkv.transfer import session as ses
from tandemkv.transfer import wire
from tandemkv.transfer.desk import Receivers, Step
from tandemkv.transfer.plan import expected_bytes
from tandemkv.transfer.receiver import Receiver
from tandemkv.transfer.transport import Transport

log = logging.getLogger("tandemkv")

ANSWER_S = 10.0
"""So long a request waits for a worker that was never heard before: it may be in a long step."""


@dataclass(slots=True)
class Fetch:
    """A request, not yet the engine's, on its way from a prefill worker. parked: the name of a
    prompt that it holds for this request; "" if it is to compute it. address: where it is greeted
    until it is known; waited_s: for that.
    """

    request: Request
    peer: str
    parked: str = ""
    address: str = ""
    waited_s: float = 0.0
    sink: Sink | None = None
    session: Receiver | None = None
    landed: list[SpanSet] = field(default_factory=list[SpanSet])
    ready: ses.Ready | None = None
    gone: bool = False


class Fetching:
    """Requests on their way here. fetched: requests that came; computed_here: those that did not,
    by reason; aborted: whose client went before; bytes_asked, bytes_received: by layer group;
    silent: workers that nothing is asked of until they speak."""

    def __init__(
        self, engine: Engine, peers: Peers, transport: Transport, timing: ses.Timing | None
    ) -> None:
        self.engine, self.peers, self._transport = engine, peers, transport
        self.receivers = Receivers(peers.offer.engine_id, timing=timing)
        self.fetched = 0
        self.aborted = 0
        self.computed_here: Counter[str] = Counter()
        self.bytes_asked = [0] * len(engine.layout.groups)
        self.bytes_received = [0] * len(engine.layout.groups)
        self.silent: set[str] = set()
        self._fetches: dict[str, Fetch] = {}
        self._waiting: list[Fetch] = []
        self._by_session: dict[int, Fetch] = {}

    @property
    def busy(self) -> bool:
        """Whether a request is on its way, or pages may still be written to."""
        return bool(self._fetches or self._by_session)

    @property
    def unknown(self) -> list[Fetch]:
        """Those whose worker has not answered yet."""
        return [fetch for fetch in self._waiting if fetch.peer not in self.peers.known]

    @property
    def num_under_way(self) -> int:
        """Requests that are not the engine's yet."""
        return len(self._fetches)

    @property
    def asked(self) -> set[str]:
        """Workers that something is waited for from."""
        return {f.peer for f in (*self._waiting, *self._by_session.values())}

    def fetch(self, fetch: Fetch) -> None:
        """Have a prompt computed by a prefill worker; the request starts when its rows are here."""
        self._fetches[fetch.request.id] = fetch
        self._waiting.append(fetch)
        self.start_waiting()

    def spoke(self, peer: str) -> None:
        """A worker was heard."""
        self.silent.discard(peer)

    def abort(self, request_id: str) -> bool:
        """The client went. False: the request is the engine's, or unknown."""
        fetch = self._fetches.pop(request_id, None)
        if fetch is None:
            return False
        fetch.gone = True
        self.aborted += 1
        if fetch in self._waiting:
            self._waiting.remove(fetch)
        if fetch.session is not None:
            self.do(
                Step(
                    fetch.peer,
                    fetch.session,
                    self.receivers.handle(fetch.session, ses.Abort("the client went away")),
                )
            )
        return True

    def count(self, peer: str, chunk: wire.Chunk) -> None:
        """Bytes that the data plane says it wrote here."""
        pairs = self.peers.known[peer].into if peer in self.peers.known else {}
        for part, size in zip(chunk.groups, chunk.num_bytes, strict=False):
            if part.group in pairs:
                self.bytes_received[pairs[part.group][0].index] += size

    def start_waiting(self, elapsed_s: float = 0.0) -> None:
        """Ask for what there was no room for, or nobody to ask."""
        waited_for = {fetch.peer for fetch in self._waiting}
        for peer in waited_for & self.peers.refused.keys():
            self.give_up_waiting(peer, "refused")
        for peer in waited_for & self.silent:
            self.give_up_waiting(peer, "peer_silent")
        for fetch in self.unknown:
            fetch.waited_s += elapsed_s
            if fetch.waited_s >= ANSWER_S:
                self._waiting.remove(fetch)
                self._compute_here(fetch, "no_answer")
        for fetch in list(self._waiting):
            if fetch.peer in self.peers.known and self._open(fetch):
                self._waiting.remove(fetch)

    def _open(self, fetch: Fetch) -> bool:
        """Hold pages and ask for rows; False: no room now."""
        peer, engine, request = self.peers.known[fetch.peer], self.engine, fetch.request
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
            parked=fetch.parked,
        )
        fetch.session = step.session
        assert step.session is not None
        self._by_session[step.session.epoch] = fetch
        engine.sync()  # copies into these pages come before what others write there
        self.do(step)
        return True

    def do(self, step: Step[Receiver]) -> None:
        """Carry out what a session wants."""
        fetch = self._by_session.get(step.session.epoch) if step.session else None
        for action in step.actions:
            match action:
                case ses.Send(message=message):
                    self.peers.say(step.peer, message)
                case ses.Fence():
                    peer = self.peers.known.get(step.peer)
                    if peer is not None:
                        self._transport.fence(peer.name)
                    elif step.session is not None:  # gone; the steps of its others come yet
                        actions = self.receivers.handle(step.session, ses.Fenced())
                        self.do(Step(step.peer, step.session, actions))
                case ses.Cover(groups=groups) if fetch is not None:
                    self._cover(fetch, groups)
                case ses.Ready() if fetch is not None:
                    self._ready(fetch, action)
                case ses.GiveUp(reason=reason) if fetch is not None:
                    if step.session is not None and step.session.unheard:
                        self.silent.add(step.peer)
                    if not fetch.gone:
                        log.warning("hand-off of %s given up: %s", fetch.request.id, reason)
                        self._compute_here(fetch, "given_up")
                case ses.Release() if fetch is not None:
                    self._release(fetch)
                case _:
                    pass

    def _cover(self, fetch: Fetch, groups: tuple[wire.GroupSpans, ...]) -> None:
        pairs = self.peers.known[fetch.peer].into if fetch.peer in self.peers.known else {}
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
            self.do(Step(fetch.peer, session, actions))

    def _release(self, fetch: Fetch) -> None:
        """Nobody writes any more: publish what landed, and go on from it."""
        session, sink = fetch.session, fetch.sink
        assert session is not None
        assert sink is not None
        del self._by_session[session.epoch]
        landed = [list(spans) for spans in fetch.landed]
        if fetch.ready is None or fetch.gone:
            sink.deliver(landed)
            return
        hold, first = sink.keep(landed), fetch.ready.first
        self._fetches.pop(fetch.request.id, None)
        self.fetched += 1
        self.engine.submit(
            fetch.request,
            first_tokens=[first.token],
            cached_tokens=first.cached_tokens,
            logprobs=None if first.logprobs is None else [first.logprobs],
            hold=hold,
        )
        self.engine.settle()

    def give_up_waiting(self, peer: str, reason: str) -> None:
        """What has not been asked of a worker yet, and will not be."""
        for fetch in [f for f in self._waiting if f.peer == peer]:
            self._waiting.remove(fetch)
            self._compute_here(fetch, reason)

    def _compute_here(self, fetch: Fetch, reason: str) -> None:
        """The request goes on without the other worker: what landed is found in the tree."""
        self._fetches.pop(fetch.request.id, None)
        self.compute_here(fetch.request, reason)

    def compute_here(self, request: Request, reason: str) -> None:
        """Queue a request on our own engine, and count why."""
        self.computed_here[reason] += 1
        self.engine.submit(request)
