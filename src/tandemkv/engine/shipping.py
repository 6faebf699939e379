"""The prefill side of hand-offs: prompts that are computed here for other workers.

    Ask -> Source -> chunks as they become final -> first token -> Release -> close
    park -> Source -> first token, to the client -> (held, under a lease) -> Ask -> chunks -> ...

Law: sessions decide, this module does: it turns their actions into prompts, writes and frames, and
reports what came of them. Rows are read from pages that are held until the session says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from tandemkv.base.errors import PeerError, RequestError
from tandemkv.base.sampling import SamplingParams
from tandemkv.base.spans import SpanSet
from tandemkv.base.transfer_params import KVTransferParams
from tandemkv.engine.engine import Engine
from tandemkv.engine.handoff import Source
from tandemkv.engine.peers import Peers
from tandemkv.kv.keys import Namespace
from tandemkv.sched.batch import Output
from tandemkv.sched.request import Request
from tandemkv.transfer import session as ses
from tandemkv.transfer import wire
from tandemkv.transfer.desk import Senders, Step
from tandemkv.transfer.plan import due, lacks, regions
from tandemkv.transfer.sender import Sender
from tandemkv.transfer.transport import Batch, Handle, Transport

NOT_COVERED = "not_covered"
"""Why a prefill worker withholds draft rows: it has a gap there itself."""


class _Named(NamedTuple):
    """What a prompt is computed under."""

    id: str
    namespace: Namespace
    priority: int


@dataclass(slots=True)
class _Outgoing:
    """A prompt computed here for another worker; peer: "" while it is parked."""

    source: Source
    peer: str
    sent: list[SpanSet]
    sampled: bool = False
    last: bool = False


class Shipping:
    """Prompts of others. bytes_sent: by layer group."""

    def __init__(
        self, engine: Engine, peers: Peers, transport: Transport, timing: ses.Timing | None
    ) -> None:
        self.engine, self.peers, self._transport = engine, peers, transport
        optional = frozenset(int(g) for g in engine.layout.draft_groups)
        self.senders = Senders(peers.offer.engine_id, optional=optional, timing=timing)
        self.bytes_sent = [0] * len(engine.layout.groups)
        self._sources: dict[int, _Outgoing] = {}
        self._writes: dict[Handle, tuple[Sender, int]] = {}

    @property
    def busy(self) -> bool:
        """Whether a prompt is computed, or its rows are read; and what is parked has a lease."""
        return bool(self._sources or self.senders.open)

    @property
    def asked(self) -> set[str]:
        """Workers that something is computed for."""
        return {session.peer for session in self.senders.open.values()}

    def park(self, request: Request) -> None:
        """Compute a prompt ahead; its client hears the first token, its rows wait for an Ask that
        names it. Raises RequestError if it can never run, or if its id is in use."""
        if request.id in self.senders.parked:
            raise RequestError(f"request id {request.id!r} is in use", status=409)
        source = self._source(request.prompt, request.params, request.seed, request)
        session = self.senders.park(request.id)
        self._sources[id(session)] = _Outgoing(source, "", self._nothing())

    def abort(self, request_id: str) -> bool:
        """The client of a parked prompt went before its first token. False: unknown."""
        session = self.senders.parked.get(request_id)
        if session is None:
            return False
        self.do(Step("", session, self.senders.handle(session, ses.Abort("the client went away"))))
        return True

    def note(self, output: Output) -> Output | None:
        """News from the engine's step; None if it is of a prompt that is computed for others."""
        for outgoing in self._sources.values():
            if outgoing.source.request.id == output.request_id:
                outgoing.source.note(output)
                return None if outgoing.peer else self._of_parked(output)
        return None if output.request_id.rpartition("#")[0] in self.peers.known else output

    def _of_parked(self, output: Output) -> Output:
        """What the client of a parked prompt hears: where its rows are, if they are."""
        if output.finished and output.error is None:
            there = KVTransferParams(
                do_remote_prefill=True,
                remote_engine_id=self.peers.offer.engine_id,
                remote_request_id=output.request_id,
            )
            return msgspec.structs.replace(output, transfer=there)
        if output.finished:
            self.abort(output.request_id)
        return output

    def _source(
        self, tokens: Sequence[int], params: SamplingParams, seed: int, like: Request | _Named
    ) -> Source:
        return Source(
            self.engine,
            tokens,
            params,
            seed=seed,
            namespace=like.namespace,
            priority=like.priority,
            request_id=like.id,
        )

    def _nothing(self) -> list[SpanSet]:
        return [SpanSet() for _ in self.engine.layout.groups]

    def do(self, step: Step[Sender]) -> None:
        """Carry out what a session wants."""
        session = step.session
        for action in step.actions:
            match action:
                case ses.Send(message=message):
                    self.peers.say(step.peer, message)
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
        held = self._sources.get(id(session))
        if held is not None:
            held.peer = peer
            if list(ask.tokens) != held.source.request.prompt:
                why = why or "the prompt is another than the one that is held"
        elif not why:
            named = _Named(f"{peer}#{ask.epoch}", ask.namespace, ask.priority)
            try:
                source = self._source(ask.tokens, ask.params, ask.seed, named)
            except RequestError as error:
                why = str(error)
            else:
                self._sources[id(session)] = _Outgoing(source, peer, self._nothing())
        event: Any = ses.Abort(why) if why else ses.Admit(1)
        self.do(Step(peer, session, self.senders.handle(session, event)))

    def _unfit(self, peer: str, ask: wire.Ask) -> str:
        """Why an ask cannot be served; '' if it can."""
        known = self.peers.known.get(peer)
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

    def ship(self) -> None:
        """Report what has been computed for others since the last time."""
        for session in list(self.senders.open.values()):
            outgoing = self._sources.get(id(session))
            if outgoing is not None and not outgoing.last:
                self._report(session, outgoing)

    def _report(self, session: Sender, outgoing: _Outgoing) -> None:
        source, peer = outgoing.source, self.peers.known.get(outgoing.peer)
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
        self.do(Step(outgoing.peer, session, actions))

    def _post(
        self, name: str, session: Sender, index: int, groups: tuple[wire.GroupSpans, ...]
    ) -> None:
        peer, outgoing, ask = self.peers.known[name], self._sources[id(session)], session.ask
        assert ask is not None
        tables = {part.group: part.table for part in ask.groups}
        here, batches, sizes = outgoing.source.pages(), [], []
        for part in groups:
            pair, route = peer.out[part.group]
            found = regions(route, part.spans, here[part.group], tables[part.group])
            batches.append(Batch(pair.index, pair.peer_index, found))
            sizes.append(sum(size for _, _, size in found))
            self.bytes_sent[part.group] += sizes[-1]
        notice = self.peers.frame(
            wire.Chunk(epoch=session.epoch, index=index, groups=groups, num_bytes=tuple(sizes)),
            name,
        )
        self.engine.sync()  # the rows are final to the cache, the device may still be writing them
        try:
            handle = self._transport.write(peer.name, batches, notice)
        except PeerError as error:
            for event in (ses.WriteFailed(index, str(error)), ses.WriteOver(index)):
                self._tell(session, outgoing, event)
            return
        self._writes[handle] = (session, index)

    def written(self, handle: Handle, make: Callable[[int], Any], *, over: bool) -> None:
        """News of a write of ours; over: nothing of it is in flight any more."""
        owner = self._writes.pop(handle, None) if over else self._writes.get(handle)
        if owner is None:
            return
        session, index = owner
        actions = self.senders.handle(session, make(index))
        self.do(Step(session.peer, session, actions))
