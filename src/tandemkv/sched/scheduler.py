"""Continuous batching over one cache: plan a step, apply its result, and every way a request ends.

    add -> WAITING -> plan: claim -> chunks -> first token -> (verify, commit, propose)* -> finish
                          ^------------ suspend: pages published, tokens kept ------'

Law: plan and apply (or fail) alternate; between them pages may be given up, but none is given out.
A result reaches a request only through the sequence it was computed for. A request that ends, by
whatever door, holds nothing. Token counts are of emitted tokens; acceptance counts verdicts. This
module runs no model and holds no page itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandemkv.base.errors import InvariantError, RequestError
from tandemkv.base.logprobs import TokenLogprobs
from tandemkv.base.spans import Span
from tandemkv.kv.manager import KVManager
from tandemkv.kv.sequence import Sequence as KVSequence
from tandemkv.sched.batch import Output, Segment, SegmentResult, StepPlan, StepRecord, StepResult
from tandemkv.sched.limits import Limits
from tandemkv.sched.planner import Planner, held
from tandemkv.sched.queues import Queues
from tandemkv.sched.request import FinishReason, Request, RequestEvent
from tandemkv.sched.stats import Load, SchedulerStats
from tandemkv.sched.stop import cut

DEFAULT_PATIENCE = 64


class Scheduler:
    """Requests in, step plans out, results in, outputs out. Not thread-safe.

    First come first served within a priority (lower first); a waiting request that does not fit
    blocks all behind it; after `patience` admissions past it, it goes before every priority. A
    priority decides who starts next and who is suspended first; it suspends nobody by itself.
    """

    def __init__(
        self,
        manager: KVManager,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_model_len: int,
        num_draft_tokens: int = 0,
        exact_proposals: bool = False,
        eos_token_ids: Iterable[int] = (),
        prefill_chunk: int | None = None,
        trace: bool = False,
        max_draft_tokens: int | None = None,
        patience: int = DEFAULT_PATIENCE,
    ) -> None:
        """num_draft_tokens: the engine's K, 0 without a drafter; max_draft_tokens: the largest K a
        request may ask for (default: K). exact_proposals: rows written while proposing are final
        for accepted drafts; they are committed with the verify step either way. Raises ConfigError.
        """
        self.limits = Limits(
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            max_model_len=max_model_len,
            num_draft_tokens=num_draft_tokens,
            max_draft_tokens=num_draft_tokens if max_draft_tokens is None else max_draft_tokens,
            lookahead=manager.layout.lookahead,
            prefill_chunk=max_batch_tokens if prefill_chunk is None else prefill_chunk,
            patience=patience,
        )
        self.limits.validate()
        self.exact_proposals = exact_proposals
        self.trace = trace
        self._manager = manager
        self._layout = manager.layout
        self._draft_groups = manager.layout.draft_groups
        self._lookaheads = [group.lookahead for group in manager.layout.groups]
        self._eos = frozenset(eos_token_ids)
        self._queues = Queues(patience)
        self._stats = SchedulerStats()
        self._planner = Planner(manager, self._queues, self.limits, self._stats)
        self._step = 0
        self._in_flight: StepPlan | None = None
        self._outputs: list[Output] = []
        self.aside: dict[str, KVSequence] = {}
        """Sequences of ended requests with `keep`, by request, until take_aside()."""
        self.lent: set[KVSequence] = set()
        """Sequences that no request holds: rows are written into them, or read, from elsewhere."""

    # -- what clients do ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run as asked."""
        self.check_request(request)
        request.max_output = self.limits.most_output(request)
        self._queues.add(request)

    def check_request(self, request: Request) -> None:
        """Raise RequestError if the request can never run as asked."""
        if request.id in self._queues.requests:
            raise RequestError(f"request id {request.id!r} is in use", status=409)
        self.limits.check_draft_tokens(request.num_draft_tokens)
        self._planner.admission.check_fits(request)

    def add_handed_over(
        self,
        request: Request,
        tokens: list[int],
        *,
        cached_tokens: int = 0,
        logprobs: Sequence[TokenLogprobs] | None = None,
        hold: KVSequence | None = None,
    ) -> None:
        """Queue a request whose prompt and first tokens were computed elsewhere: it resumes.

        tokens: what it has emitted so far, at least one; they are news to its client. What the
        tree holds of it is claimed, the rest computed. hold: a sequence with its rows, published:
        taken over, so that they are still here when it is admitted, unless somebody before it
        needs the room. Raises RequestError as add() does, and then hold is not taken.
        """
        self.add(request)
        request.hold = hold
        request.admitted = True
        request.cached_tokens = min(cached_tokens, len(request.prompt))
        self._stats.prompt_tokens += len(request.prompt)
        self._stats.cached_tokens += request.cached_tokens
        kept, reason = self._cut(request, tokens)
        request.output += kept
        self._stats.generation_tokens += len(kept)
        if reason is None:
            request.handle(RequestEvent.HAND_OVER)
            self._outputs.append(self._output(request, kept, logprobs, None))
        else:
            self._outputs.append(
                self._end(request, RequestEvent.FINISH, reason, "at once", kept, logprobs)
            )

    def headroom_of_running(self) -> list[int]:
        """Pages per group that rows from elsewhere must leave free."""
        return self._planner.admission.headroom_of_running()

    def take_aside(self, request_id: str) -> KVSequence | None:
        """The sequence of a request with `keep` that has ended; whoever takes it finishes it."""
        return self.aside.pop(request_id, None)

    def abort(self, request_id: str) -> Output | None:
        """End a request in any state, also in flight; None if it is unknown or over."""
        request = self._queues.requests.get(request_id)
        if request is None:
            return None
        if request.seq is not None:
            if self._is_uncopied(request):
                self._manager.release(request.seq)
            else:
                self._manager.finish(request.seq)
        return self._end(request, RequestEvent.ABORT, FinishReason.ABORT)

    def suspend(self, request_id: str) -> None:
        """Suspend a running request by hand; a later plan resumes it.

        Raises RequestError if it is unknown, InvariantError if it holds nothing to give up.
        """
        request = self._find(request_id)
        self._planner.suspend(request, "by hand", publish=not self._is_uncopied(request))

    def set_num_draft_tokens(self, request_id: str, k: int | None) -> None:
        """K of a live request from the next plan on: 0 is off, None the engine's."""
        request = self._find(request_id)
        self.limits.check_draft_tokens(k)
        request.num_draft_tokens = k
        request.drafts = request.drafts[: self.limits.drafts_of(request)]

    # -- the step ----------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The next step; empty when nothing can run. Raises InvariantError if one is in flight."""
        if self._in_flight is not None:
            raise InvariantError(f"step {self._in_flight.step} is in flight; apply or fail it")
        plan = self._planner.plan(self._step)
        self._step += 1
        for request in self._planner.failed:
            self._outputs.append(self._output(request, [], None, FinishReason.ERROR))
        self._planner.failed.clear()
        if plan.segments or plan.claimed:
            self._in_flight = plan
            self._count_rows(plan)
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Commit a step. Results of sequences that are gone are dropped.

        Raises InvariantError, with nothing changed, if the result does not belong to the plan.
        """
        self._land(plan, result.step)
        results = self._results_by_segment(plan, result)
        self._in_flight = None
        for seq in plan.claimed:
            if seq.id in self._manager.sequences:
                self._manager.copied(seq)
        for segment, part in zip(plan.segments, results, strict=True):
            if segment.request.seq is not segment.seq or part is None:
                self._stats.late_results += 1
                continue
            if part.error is None:
                self._apply(segment, part)
            else:
                self._give_up(segment.request, part.error)
        return self._take_outputs()

    def fail(self, plan: StepPlan, message: str) -> list[Output]:
        """A step that raised: its requests end with an error, all others go on."""
        self._land(plan, plan.step)
        self._in_flight = None
        gone = [s.request for s in plan.segments if s.request.seq is s.seq]
        gone += [r for r in self.running if r.seq in plan.claimed and r not in gone]
        for request in gone:
            self._give_up(request, message)
        return self._take_outputs()

    # -- what others read --------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether another step is owed: a live request, or news not handed out yet."""
        return bool(self._queues.requests or self._outputs)

    @property
    def running(self) -> Sequence[Request]:
        return self._queues.running

    @property
    def waiting(self) -> Sequence[Request]:
        return self._queues.waiting

    @property
    def load(self) -> Load:
        """How busy it is now. A prompt that waits counts whole: what it will find is not known."""
        queued = sum(stop - start for r in self.running for start, stop in r.todo)
        queued += sum(len(r.prompt) for r in self.waiting if not r.admitted)
        return Load(running=len(self.running), waiting=len(self.waiting), queued_tokens=queued)

    @property
    def stats(self) -> SchedulerStats:
        self._stats.num_running = len(self._queues.running)
        self._stats.num_waiting = len(self._queues.waiting)
        return self._stats

    def check(self) -> None:
        """Every law of the scheduler and of the cache below it. Raises InvariantError."""
        self._queues.check()
        self._stats.check()
        if len(self._queues.running) > self.limits.max_running:
            raise InvariantError(f"{len(self._queues.running)} requests run at once")
        held_by_us = {r.seq.id for r in self._queues.running if r.seq is not None}
        held_by_us |= {seq.id for seq in (*self.aside.values(), *self.lent)}
        held_by_us |= {r.hold.id for r in self._queues.waiting if r.hold is not None}
        known = {i for i, seq in self._manager.sequences.items() if not seq.dummy}
        if held_by_us != known:
            raise InvariantError(
                f"running requests hold sequences {sorted(held_by_us)}, the cache knows"
                f" {sorted(known)}"
            )
        self._manager.check()

    # -- applying a step ---------------------------------------------------------------------

    def _land(self, plan: StepPlan, step: int) -> None:
        """Raise InvariantError unless `plan` is the step in flight (or an empty one)."""
        empty = not plan.segments and not plan.claimed
        if step != plan.step or not (plan is self._in_flight or (empty and not self._in_flight)):
            flying = "none" if self._in_flight is None else str(self._in_flight.step)
            raise InvariantError(
                f"a result of step {step} for step {plan.step}; in flight: {flying}"
            )

    def _results_by_segment(self, plan: StepPlan, result: StepResult) -> list[SegmentResult | None]:
        """The plan's results in its order, None where missing. Raises if one cannot be true."""
        by_seq = {part.seq: part for part in result.segments}
        results: list[SegmentResult | None] = []
        for segment in plan.segments:
            part = by_seq.get(segment.seq.id)
            if segment.request.seq is segment.seq:
                check_result(segment, part)
            results.append(part)
        return results

    def _apply(self, segment: Segment, part: SegmentResult) -> None:
        request, seq = segment.request, segment.seq
        kept, reason = self._cut(request, part.tokens) if part.tokens else ([], None)
        if segment.verify:
            self._record(segment, part, kept)
        self._commit(segment, kept)
        request.output += kept
        self._stats.generation_tokens += len(kept)
        _advance(request, segment)
        going = reason is None and request.decoding
        k = min(self.limits.drafts_of(request), self.limits.left(request) - 1) if going else 0
        request.drafts = part.drafts[: max(k, 0)]
        if reason is not None:
            if request.keep:
                self.aside[request.id] = seq
            else:
                self._manager.finish(seq)
            self._outputs.append(
                self._end(request, RequestEvent.FINISH, reason, "", kept, part.logprobs)
            )
        elif kept:
            self._outputs.append(self._output(request, kept, part.logprobs, None))

    def _cut(self, request: Request, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        """What the stop rules leave of new tokens, and whether the request ends there."""
        eos = () if request.params.ignore_eos else self._eos
        stops = (*request.params.stop_token_ids, *eos)
        return cut(tokens, self.limits.left(request), stops, request.watch)

    def _commit(self, segment: Segment, kept: list[int]) -> None:
        """Make the step's rows final: all of a chunk; the anchor's and the kept drafts'."""
        manager, seq = self._manager, segment.seq
        final = segment.start + len(kept) if segment.verify else segment.stop
        if kept:
            manager.append(seq, kept)
        known = len(seq.tokens)
        written = [
            _clip(spans, min(final + ahead, known))
            for spans, ahead in zip(segment.write, self._lookaheads, strict=True)
        ]
        rows = max(seq.committed, final)
        manager.commit(seq, rows, written)
        if final < segment.stop:
            manager.rewind(seq)
        if not all(segment.write[g] for g in self._draft_groups):
            self._mask_unwritten(segment, final)
        if not segment.verify or rows - seq.published >= self._layout.block_size:
            manager.publish(seq)

    def _mask_unwritten(self, segment: Segment, final: int) -> None:
        """Say aloud what a drafter whose context pass is off did not write."""
        missing = segment.seq.writes(segment.start, final)
        for g in self._draft_groups:
            for start, stop in missing[g]:
                if not segment.write[g]:
                    self._manager.mask(segment.seq, g, start, stop, "speculation_off")

    def _record(self, segment: Segment, part: SegmentResult, kept: list[int]) -> None:
        request = segment.request
        if segment.num_drafts:
            request.acceptance.record(segment.num_drafts, part.num_accepted)
            self._stats.acceptance.record(segment.num_drafts, part.num_accepted)
        if self.trace:
            request.steps.append(
                StepRecord(
                    anchor=segment.start,
                    drafts=tuple(segment.tokens[1:]),
                    num_accepted=part.num_accepted,
                    emitted=tuple(kept),
                    draft_gap=part.draft_gap,
                    target_gap=part.target_gap,
                )
            )

    # -- ends --------------------------------------------------------------------------------

    def _give_up(self, request: Request, message: str) -> None:
        """End a running request with an error; rows of its last step are published nowhere."""
        self._manager.release(held(request))
        request.error = message
        self._outputs.append(self._end(request, RequestEvent.FAIL, FinishReason.ERROR, message))

    def _end(
        self,
        request: Request,
        event: RequestEvent,
        reason: FinishReason,
        why: str = "",
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> Output:
        """Take a request that gave its pages up out of the queues; its last output."""
        self._planner.let_go(request)
        self._queues.end(request, event, why)
        return self._output(request, tokens, logprobs, reason)

    def _output(
        self,
        request: Request,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        reason: FinishReason | None,
    ) -> Output:
        if reason is not None:
            request.finish_reason = reason
            self._stats.finished[reason] += 1
        acceptance = request.acceptance
        return Output(
            request_id=request.id,
            tokens=list(tokens),
            logprobs=None if logprobs is None else list(logprobs[: len(tokens)]),
            finished=reason is not None,
            finish_reason=reason,
            error=request.error,
            num_prompt_tokens=len(request.prompt),
            num_output_tokens=len(request.output),
            cached_tokens=request.cached_tokens,
            num_preemptions=request.num_preemptions,
            num_draft_steps=acceptance.num_steps,
            num_drafts=acceptance.num_drafts,
            num_accepted=acceptance.num_accepted,
            accepted_at=tuple(acceptance.accepted_at),
            draft_use=request.draft_use,
        )

    def _take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _find(self, request_id: str) -> Request:
        request = self._queues.requests.get(request_id)
        if request is None:
            raise RequestError(f"no request {request_id!r} is live", status=404)
        return request

    def _is_uncopied(self, request: Request) -> bool:
        """Whether the request's pages wait for copies of the step in flight."""
        return self._in_flight is not None and request.seq in self._in_flight.claimed

    def _count_rows(self, plan: StepPlan) -> None:
        stats = self._stats
        verified = sum(s.num_rows for s in plan.segments if s.verify)
        stats.num_steps += 1
        stats.num_rows += plan.num_rows
        stats.num_verify_rows += verified
        stats.num_prefill_rows += plan.num_rows - verified


def check_result(segment: Segment, part: SegmentResult | None) -> None:
    """Raise InvariantError unless `part` is a possible outcome of `segment`."""
    if part is None:
        raise InvariantError(f"no result for sequence {segment.seq.id}")
    if part.error is not None:
        return
    num_tokens = part.num_accepted + segment.samples
    if not 0 <= part.num_accepted <= segment.num_drafts or len(part.tokens) != num_tokens:
        raise InvariantError(
            f"request {segment.request.id}: {part.num_accepted} of {segment.num_drafts} drafts"
            f" accepted and {len(part.tokens)} tokens emitted"
        )


def _advance(request: Request, segment: Segment) -> None:
    """Take what the segment ran off the request's list."""
    if segment.verify:
        return
    if request.draft_todo and segment.start == segment.stop:
        request.draft_todo = _after(request.draft_todo, segment.stop)
    elif request.todo:
        request.todo = _after(request.todo, segment.stop)
        if not request.todo:
            request.must_propose = False
    else:
        request.must_propose = False


def _after(spans: list[Span], stop: int) -> list[Span]:
    """What is left of ordered spans once the first has run up to `stop`."""
    first, rest = spans[0], spans[1:]
    return [(stop, first[1]), *rest] if stop < first[1] else rest


def _clip(spans: Sequence[Span], stop: int) -> Sequence[Span]:
    """The part of ordered spans below `stop`."""
    if not spans or spans[-1][1] <= stop:
        return spans
    return [(a, min(b, stop)) for a, b in spans if a < stop]
