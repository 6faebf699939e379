"""Who waits and who runs, in order.

Law: every live request is in exactly one of `waiting` (WAITING, SUSPENDED) and `running`
(RUNNING); both are sorted by rank: priority, then arrival. A suspended request keeps its arrival,
so it waits before newer ones. Each admission past an earlier request is counted; one that was
overtaken `patience` times becomes urgent and goes before every priority: nothing starves.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from tandemkv.base.errors import InvariantError
from tandemkv.kv.sequence import Sequence
from tandemkv.sched.request import Request, RequestEvent, RequestState

by_rank = attrgetter("rank")


class Queues:
    """The live requests of a scheduler."""

    def __init__(self, patience: int) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._patience = patience
        self._num_arrived = 0

    def add(self, request: Request) -> None:
        """Queue a new request and give it its arrival."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.requests[request.id] = request
        insort(self.waiting, request, key=by_rank)

    def start(self, request: Request, seq: Sequence) -> None:
        """A waiting request got its pages."""
        resumes = request.state is RequestState.SUSPENDED
        request.handle(RequestEvent.RESUME if resumes else RequestEvent.ADMIT)
        self.waiting.remove(request)
        request.seq = seq
        insort(self.running, request, key=by_rank)
        self._count_overtaken(request)

    def stop(self, request: Request, why: str) -> None:
        """A running request gave its pages up and waits again, in its old place."""
        request.handle(RequestEvent.SUSPEND, why)
        self.running.remove(request)
        _forget_work(request)
        request.num_preemptions += 1
        insort(self.waiting, request, key=by_rank)

    def end(self, request: Request, event: RequestEvent, why: str = "") -> None:
        """A request is over; its pages were given up before."""
        queue = self.running if request.state is RequestState.RUNNING else self.waiting
        request.handle(event, why)
        queue.remove(request)
        _forget_work(request)
        del self.requests[request.id]

    def check(self) -> None:
        """Raise InvariantError unless the module's law holds."""
        for queue, states in (
            (self.waiting, (RequestState.WAITING, RequestState.SUSPENDED)),
            (self.running, (RequestState.RUNNING,)),
        ):
            ranks = [r.rank for r in queue]
            if ranks != sorted(ranks):
                raise InvariantError(f"queue out of order: {[r.id for r in queue]}")
            for request in queue:
                if request.state not in states:
                    raise InvariantError(f"request {request.id} is queued while {request.state}")
        queued = [r.id for r in self.waiting] + [r.id for r in self.running]
        if len(set(queued)) != len(queued) or set(queued) != set(self.requests):
            raise InvariantError(f"queued {queued}, live {list(self.requests)}")
        held = [r.seq.id for r in self.running if r.seq is not None]
        if len(set(held)) != len(self.running):
            raise InvariantError("running requests do not hold one sequence each")
        for request in self.requests.values():
            check_request(request)

    def _count_overtaken(self, request: Request) -> None:
        if not self.waiting or self.waiting[-1].rank[:2] == request.rank[:2]:
            return
        for other in self.waiting:
            if other.arrival < request.arrival:
                other.num_overtaken += 1
                other.urgent = other.urgent or other.num_overtaken >= self._patience
        self.waiting.sort(key=by_rank)


def _forget_work(request: Request) -> None:
    request.seq = None
    request.drafts = []
    request.todo = []
    request.draft_todo = []
    request.rebuild = ()
    request.must_propose = False


def check_request(request: Request) -> None:
    """Raise InvariantError unless what a request holds fits its state."""
    seq = request.seq

    def broken(law: str) -> InvariantError:
        return InvariantError(f"request {request.id}: {law}; story: {', '.join(request.story)}")

    if (seq is not None) != (request.state is RequestState.RUNNING):
        raise broken(f"{request.state} with{'out' if seq is None else ''} a sequence")
    if request.hold is not None and request.state is not RequestState.SUSPENDED:
        raise broken(f"keeps pages that came for it while it is {request.state}")
    if request.drafts and not request.decoding:
        raise broken("holds drafts while it does not decode")
    for spans in (request.todo, request.draft_todo):
        flat = [x for span in spans for x in span]
        if any(stop <= start for start, stop in spans) or flat != sorted(flat):
            raise broken(f"spans to compute are empty or out of order: {spans}")
    if seq is None:
        return
    if len(seq.tokens) != request.num_tokens:
        raise broken(f"{request.num_tokens} tokens, its sequence has {len(seq.tokens)}")
    if request.decoding and seq.committed != request.num_tokens - 1:
        raise broken(f"decodes with {seq.committed} rows of {request.num_tokens - 1}")
