"""What the next step runs: rows under the batch's budget, then pages, then segments.

    budget      decoding requests, 1 + k rows each, least recently served first; then chunks of
                prompts in rank order, never fewer than one row in all; then admissions
    pages       in rank order; where they run out: let go of what is kept for those who wait, drop
                the drafts of this step, shrink the chunk, then suspend the last in rank, and only
                those behind the one in need

Law: a request that finds the batch full keeps pages, drafts and positions. No request is suspended
for one behind it, so the first in rank always moves. A step that suspended admits nobody. A
chunk stays inside one span of its claim. This module does not look at results.
"""

from __future__ import annotations

from tandemkv.base.errors import InvariantError, RequestError
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.manager import Claim, KVManager
from tandemkv.kv.sequence import Sequence
from tandemkv.sched.admission import Admission
from tandemkv.sched.batch import Segment, StepPlan
from tandemkv.sched.limits import Limits
from tandemkv.sched.queues import Queues
from tandemkv.sched.request import Request, RequestEvent, RequestState
from tandemkv.sched.stats import SchedulerStats


class Planner:
    """Makes step plans; owns every suspension and every admission."""

    def __init__(
        self, manager: KVManager, queues: Queues, limits: Limits, stats: SchedulerStats
    ) -> None:
        self.admission = Admission(manager, queues, limits)
        self.failed: list[Request] = []
        self._manager = manager
        self._queues = queues
        self._limits = limits
        self._stats = stats
        self._draft_groups = manager.layout.draft_groups

    def plan(self, step: int) -> StepPlan:
        """The next step. Requests that ended while planning are left in `failed`."""
        plan = StepPlan(step)
        suspended = self._stats.preemptions
        rows = self._share_rows()
        for request in tuple(self._queues.running):
            while request.seq is not None and request.id in rows:
                if self._put(plan, request, rows[request.id]) or not self._make_room(request):
                    break
        if self._stats.preemptions == suspended:
            self._admit(plan, self._limits.max_batch_tokens - sum(rows.values()))
        return plan

    def suspend(self, request: Request, why: str, *, publish: bool = True) -> None:
        """Give a running request's pages up and queue it again; it resumes from its anchor.

        publish False: its pages hold copies that were not made yet.
        """
        seq = held(request)
        self._queues.stop(request, why)
        if publish:
            self._manager.suspend(seq)
        else:
            self._manager.release(seq)
        self._stats.preemptions += 1

    # -- budget ------------------------------------------------------------------------------

    def _share_rows(self) -> dict[str, int]:
        """Rows of each running request that is in this step; others miss it and lose nothing."""
        running = self._queues.running
        room = self._limits.max_batch_tokens
        decoding = [r for r in running if r.decoding]
        room -= len(decoding) < len(running)  # a row for prompts, so that they move as well
        rows = {r.id: 1 + self._num_drafts(r) for r in decoding}
        if sum(rows.values()) > room:
            rows = self._least_recent(decoding, rows, room)
        room = self._limits.max_batch_tokens - sum(rows.values())
        if len(decoding) < len(running):
            for request in running:
                if room > 0 and not request.decoding:
                    rows[request.id] = self._chunk_rows(request, room)
                    room -= rows[request.id]
        self._stats.num_missed += len(running) - len(rows)
        return rows

    def _least_recent(
        self, decoding: list[Request], rows: dict[str, int], room: int
    ) -> dict[str, int]:
        chosen: dict[str, int] = {}
        for request in sorted(decoding, key=lambda r: (r.last_step, r.rank)):
            if rows[request.id] > room:
                break
            chosen[request.id] = rows[request.id]
            room -= rows[request.id]
        return chosen

    def _chunk_rows(self, request: Request, room: int) -> int:
        """Rows of the request's next chunk; a pass that only proposes counts as one."""
        spans = request.draft_todo or request.todo
        left = spans[0][1] - spans[0][0] if spans else 1
        return min(left, room, self._limits.prefill_chunk)

    def _num_drafts(self, request: Request) -> int:
        """Drafts to verify: no more than K now, or than may still be emitted."""
        drafts = request.drafts
        if not drafts:
            return 0
        limits = self._limits
        return max(0, min(len(drafts), limits.drafts_of(request), limits.left(request) - 1))

    def _num_propose(self, request: Request, *, emits: bool) -> int:
        """Drafts to ask for, if the step emits at least one token or none at all."""
        limit = self._limits.left(request) - (2 if emits else 1)
        return max(0, min(self._limits.drafts_of(request), limit))

    # -- pages and segments ------------------------------------------------------------------

    def _put(self, plan: StepPlan, request: Request, rows: int) -> bool:
        """Append the request's segment; False if there are no pages for it."""
        if request.decoding:
            segment = self._verify(request)
        elif request.draft_todo:
            segment = self._rebuild(request, rows)
        else:
            segment = self._chunk(request, rows)
        if segment is None:
            return False
        request.last_step = plan.step
        plan.segments.append(segment)
        return True

    def _make_room(self, request: Request) -> bool:
        """Suspend the last in rank; False when that is the request itself, which ends if alone.

        One whose rows are being read from elsewhere is never suspended; it ends instead.
        """
        running = self._queues.running
        victim = next((r for r in reversed(running) if r is request or not r.keep), request)
        if victim is not request:
            self.suspend(victim, f"pages for {request.id}")
            return True
        if self._held_elsewhere() and request.keep:
            return False  # they will be given back
        if (len(running) == 1 or request.keep) and not self._held_elsewhere():
            self._fail(request, self._full(request))
        else:
            self.suspend(request, "no pages for itself")
        return False

    def let_go(self, request: Request) -> None:
        """Keep nothing for a request any more: what came for it stays in the tree, evictable."""
        hold, request.hold = request.hold, None
        if hold is not None:
            self._manager.release(hold)

    def _let_go_behind(self, request: Request) -> bool:
        """Let go of what is kept for the last in rank who waits behind this one; False: nobody."""
        for other in reversed(self._queues.waiting):
            if other.rank <= request.rank:
                return False
            if other.hold is not None:
                self.let_go(other)
                return True
        return False

    def _held_elsewhere(self) -> bool:
        """Whether sequences that no request holds have pages: hand-offs, and those end."""
        held = sum(r.seq is not None for r in self._queues.running)
        held += sum(r.hold is not None for r in self._queues.waiting)
        return sum(not seq.dummy for seq in self._manager.sequences.values()) > held

    def _verify(self, request: Request) -> Segment | None:
        seq = held(request)
        start = len(seq.tokens) - 1
        num_drafts = self._num_drafts(request)
        num_propose = self._num_propose(request, emits=True)
        wanted = num_drafts + num_propose
        for num_drafts, num_propose in _fewer(num_drafts, num_propose):  # noqa: B020
            stop = start + 1 + num_drafts
            if self._reserve(request, stop, num_propose):
                self._stats.drafts_skipped += wanted - num_drafts - num_propose
                return Segment(
                    request=request,
                    seq=seq,
                    start=start,
                    stop=stop,
                    tokens=[seq.tokens[start], *request.drafts[:num_drafts]],
                    num_drafts=num_drafts,
                    samples=True,
                    num_propose=num_propose,
                    write=self._launch(request, seq, start, stop),
                    verify=True,
                )
        return None

    def _chunk(self, request: Request, rows: int) -> Segment | None:
        """The next rows of a prompt or of what a resumed request lost, or a pass to propose."""
        seq = held(request)
        n = len(seq.tokens) - bool(request.output)
        start, end = request.todo[0] if request.todo else (n, n)
        stop = min(end, start + rows)
        while True:
            samples = stop == n and not request.output
            wanted = self._num_propose(request, emits=samples) if stop == n else 0
            for _, num_propose in _fewer(0, wanted):
                if self._reserve(request, stop, num_propose):
                    self._stats.drafts_skipped += wanted - num_propose
                    return Segment(
                        request=request,
                        seq=seq,
                        start=start,
                        stop=stop,
                        tokens=seq.tokens[start:stop],
                        samples=samples,
                        num_propose=num_propose,
                        write=self._launch(request, seq, start, stop),
                    )
            if stop - start <= 1:
                return None
            stop = start + (stop - start) // 2

    def _rebuild(self, request: Request, rows: int) -> Segment:
        """Rows below the target's pass that the drafter computes alone, from tokens."""
        start, end = request.draft_todo[0]
        stop = min(end, start + rows)
        write = tuple(
            tuple((a + g.lookahead, b + g.lookahead) for a, b in spans.within(start, stop))
            for spans, g in zip(request.rebuild, self._manager.layout.groups, strict=True)
        )
        return Segment(
            request=request, seq=held(request), start=stop, stop=stop, tokens=[], write=write
        )

    def _reserve(self, request: Request, stop: int, num_propose: int) -> bool:
        """Room for rows and proposals, before anything is kept for those who wait behind."""
        seq, rows = held(request), stop + self._limits.reach(num_propose)
        while not self._manager.reserve(seq, rows):
            if not self._let_go_behind(request):
                return False
        return True

    def _launch(
        self, request: Request, seq: Sequence, start: int, stop: int
    ) -> tuple[tuple[Span, ...], ...]:
        """Rows [start, stop) are under way; the slots the pass writes, per group."""
        if stop > start:
            self._manager.launch(seq, stop)
        write = seq.writes(start, stop)
        if self._limits.context_pass(request):
            return write
        return tuple(() if g in self._draft_groups else w for g, w in enumerate(write))

    # -- admission ---------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, room: int) -> None:
        queues = self._queues
        while queues.waiting and len(queues.running) < self._limits.max_running and room > 0:
            request = queues.waiting[0]
            try:
                claim = self.admission.claim(request)
            except RequestError as error:
                self._fail(request, str(error))
                continue
            if claim is None and self._let_go_behind(request):
                continue
            if claim is None:
                if not queues.running and request.hold is not None:
                    self.let_go(request)
                    continue
                if queues.running or self._held_elsewhere():
                    return
                self._fail(request, self._full(request))
                continue
            self._open(plan, request, claim)
            rows = 1 if request.decoding else self._chunk_rows(request, room)
            self._put(plan, request, rows)  # without pages for it yet, it misses this step
            room -= rows

    def _open(self, plan: StepPlan, request: Request, claim: Claim) -> None:
        """Bind a claim to its request: what it holds, what it must compute, what was hit."""
        resumes = request.state is RequestState.SUSPENDED
        self.let_go(request)
        self._queues.start(request, claim.seq)
        plan.claimed.append(claim.seq)
        plan.copies.extend(claim.copies)
        request.todo = [span for span in claim.plan.compute if span[0] < span[1]]
        request.draft_todo, request.rebuild = self._to_rebuild(claim)
        request.must_propose = (
            bool(request.output)
            and not request.todo
            and self._num_propose(request, emits=False) > 0
        )
        if not request.admitted:
            request.admitted = True
            request.cached_tokens = min(claim.plan.end, len(request.prompt))
            self._stats.prompt_tokens += len(request.prompt)
            self._stats.cached_tokens += request.cached_tokens
        if resumes:
            self._stats.resumed[self._warmth(request, claim)] += 1

    def _to_rebuild(self, claim: Claim) -> tuple[list[Span], tuple[SpanSet, ...]]:
        """Positions that a drafter rebuilt from tokens runs alone, and those of each group."""
        parts = tuple(SpanSet(spans) for spans in claim.plan.draft_compute)
        union = SpanSet(span for spans in parts for span in spans)
        return list(union), parts

    def _warmth(self, request: Request, claim: Claim) -> str:
        lost = sum(stop - start for start, stop in (*request.todo, *request.draft_todo))
        if lost <= self._limits.lookahead and not claim.plan.masked:
            return "warm"
        return "partial" if claim.plan.end else "cold"

    def _fail(self, request: Request, why: str) -> None:
        if request.seq is not None:
            self._manager.release(request.seq)
        self.let_go(request)
        self._queues.end(request, RequestEvent.FAIL, why)
        request.error = why
        self.failed.append(request)

    def _full(self, request: Request) -> str:
        pools = ", ".join(
            f"{group.name!r} has {usage.total} pages of {group.page_size} slots"
            for group, usage in zip(self._manager.layout.groups, self._manager.usage(), strict=True)
        )
        return f"{request.num_tokens} tokens do not fit the KV pools, alone in them: {pools}"


def _fewer(num_drafts: int, num_propose: int) -> list[tuple[int, int]]:
    """What to try when pages run out: all, then no proposal, then no drafts either."""
    tries = [(num_drafts, num_propose)]
    if num_propose:
        tries.append((num_drafts, 0))
    if num_drafts:
        tries.append((0, 0))
    return tries


def held(request: Request) -> Sequence:
    """The request's sequence. Raises InvariantError if it holds none."""
    if request.seq is None:
        raise InvariantError(
            f"request {request.id} holds no sequence; story: {', '.join(request.story)}"
        )
    return request.seq
