"""Running prompts through an engine by hand: batched, in turn or suspended, and tracing it.

Law: each job runs in the namespace that it names, its own unless said, so that a prompt finds
nothing but what the same conversation left; a run ends with no request of its own in the engine,
also when interrupted. What a run does to the cache beyond that (reset before it or not) is the
caller's. This module compares nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tandemkv.base.errors import RequestError, TandemError
from tandemkv.base.sampling import SamplingParams
from tandemkv.kv.coverage import HOLES, LOOKAHEAD
from tandemkv.kv.keys import Namespace
from tandemkv.lab.measures import Trace, common_prefix
from tandemkv.lab.options import Sampling

if TYPE_CHECKING:
    from tandemkv.engine.engine import Engine
    from tandemkv.sched.request import Request


class Job(msgspec.Struct, frozen=True):
    """A prompt to run; id: the conversation's. namespace: where it finds and leaves rows, its id
    unless given. sampling: None is greedy; its seed is the request's. claim_policy: the engine's
    unless given."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    namespace: str | None = None
    sampling: Sampling | None = None
    claim_policy: str | None = None

    @property
    def params(self) -> SamplingParams:
        """What the engine is asked."""
        how: dict[str, Any] = {"temperature": 0.0}
        if self.sampling is not None:
            how = msgspec.structs.asdict(self.sampling)
        return SamplingParams(max_tokens=self.max_tokens, claim_policy=self.claim_policy, **how)


class Rows(msgspec.Struct, frozen=True):
    """Draft KV rows as held at one moment. slots: ascending; values: [len(slots), ...] float32."""

    tokens: tuple[int, ...]
    group: str
    slots: tuple[int, ...]
    values: Any


class Transfer(msgspec.Struct, frozen=True):
    """Bytes of hand-offs: asked for, received, and received of draft groups; and requests that were
    computed here instead."""

    asked: int = 0
    received: int = 0
    draft: int = 0
    computed_here: int = 0

    def __sub__(self, before: Transfer) -> Transfer:
        return Transfer(
            self.asked - before.asked,
            self.received - before.received,
            self.draft - before.draft,
            self.computed_here - before.computed_here,
        )


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the jobs. seconds: wall time; rows: by (job id, moment).

    recomputed_target_tokens: prompt rows that the target ran beyond those that no hit covered.
    """

    traces: tuple[Trace, ...]
    seconds: float
    num_suspensions: int = 0
    recomputed_target_tokens: int = 0
    transfer: Transfer = Transfer()
    rows: Mapping[tuple[str, int], tuple[Rows, ...]] = {}

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens over wall time, prompts included in the time."""
        tokens = sum(len(trace.output) for trace in self.traces)
        return tokens / self.seconds if self.seconds else 0.0


def suspension_points(job_id: str, max_tokens: int, count: int = 3) -> tuple[int, ...]:
    """Output lengths at which to suspend a request: spread out, and different between requests."""
    shift = sum(job_id.encode()) % 7
    wanted = ((i + 1) * max_tokens // (count + 1) - 3 + shift for i in range(count))
    return tuple(sorted({point for point in wanted if 1 <= point < max_tokens}))


def run(
    engine: Engine,
    jobs: Sequence[Job],
    *,
    suspend: bool = False,
    keep_rows: bool = False,
    on_step: Callable[[int, int, int], None] = lambda tokens, ended, spared: None,
) -> Run:
    """Run jobs to their end, batched.

    on_step hears of each step how many tokens it emitted, how many jobs ended in it, and how many
    tokens short of their limit those ended.
    """
    started, recomputed, moved = time.perf_counter(), _recomputed(engine), _transfer(engine)
    requests = [_add(engine, job) for job in jobs]
    pending = {
        request.id: list(suspension_points(job.id, job.max_tokens))
        for job, request in zip(jobs, requests, strict=True)
        if suspend
    }
    of = {request.id: (job, request) for job, request in zip(jobs, requests, strict=True)}
    suspensions = 0
    rows: dict[tuple[str, int], tuple[Rows, ...]] = {}
    try:
        while engine.has_work:
            outputs = engine.step()
            ended = [of[output.request_id] for output in outputs if output.finished]
            spared = sum(job.max_tokens - len(request.output) for job, request in ended)
            on_step(sum(len(output.tokens) for output in outputs), len(ended), spared)
            if keep_rows:
                for job, request in zip(jobs, requests, strict=True):
                    _keep(engine, job, request, rows)
            for request in requests:
                suspensions += _suspend_if_due(engine, request, pending.get(request.id))
    except BaseException:
        for request in requests:
            engine.abort(request.id)
        raise
    return Run(
        traces=tuple(_trace(j, r) for j, r in zip(jobs, requests, strict=True)),
        seconds=time.perf_counter() - started,
        num_suspensions=suspensions,
        recomputed_target_tokens=_recomputed(engine) - recomputed,
        transfer=_transfer(engine) - moved,
        rows=rows,
    )


def run_in_turn(engine: Engine, jobs: Sequence[Job], **how: Any) -> Run:
    """Run jobs one after the other, each when the one before has ended; how: as for `run`."""
    runs = [run(engine, [job], **how) for job in jobs]
    return Run(
        traces=tuple(trace for each in runs for trace in each.traces),
        seconds=sum(each.seconds for each in runs),
        num_suspensions=sum(each.num_suspensions for each in runs),
        recomputed_target_tokens=sum(each.recomputed_target_tokens for each in runs),
        rows={key: kept for each in runs for key, kept in each.rows.items()},
    )


def _recomputed(engine: Engine) -> int:
    """Prompt rows that the target has run so far beyond those that no hit covered."""
    cache, steps = engine.kv.stats, engine.scheduler.stats
    return steps.num_prefill_rows - (cache.prefix_queries_tokens - cache.prefix_hit_tokens)


def _transfer(engine: Engine) -> Transfer:
    """What hand-offs have moved so far; nothing on an engine that computes its own prompts."""
    stats = engine.handoffs
    if stats is None:
        return Transfer()
    drafts = {engine.layout.groups[g].name for g in engine.layout.draft_groups}
    return Transfer(
        asked=sum(stats.asked_bytes.values()),
        received=sum(stats.received_bytes.values()),
        draft=sum(size for name, size in stats.received_bytes.items() if name in drafts),
        computed_here=sum(stats.computed_here.values()),
    )


def _add(engine: Engine, job: Job) -> Request:
    space = Namespace(salt=f"lab/{job.id if job.namespace is None else job.namespace}")
    try:
        return engine.add(list(job.prompt), job.params, namespace=space)
    except RequestError as error:
        raise RequestError(f"prompt {job.id}: {error}", param=error.param) from None


def _trace(job: Job, request: Request) -> Trace:
    if request.error is not None:
        raise TandemError(f"prompt {job.id} ended with an error: {request.error}")
    return Trace(
        id=job.id,
        prompt=job.prompt,
        output=tuple(request.output),
        finish_reason=str(request.finish_reason),
        steps=tuple(request.steps),
        cached_tokens=request.cached_tokens,
        draft_hit_tokens=request.draft_use.hits,
        draft_gap_tokens=sum(request.draft_use.gaps.values()),
        recomputed_lookahead_tokens=request.draft_use.recomputed.get(LOOKAHEAD, 0),
        recomputed_hole_tokens=request.draft_use.recomputed.get(HOLES, 0),
    )


def _suspend_if_due(engine: Engine, request: Request, points: list[int] | None) -> int:
    """Suspend a decoding request that has passed its next point. Returns suspensions made."""
    if not points or request.seq is None or not request.decoding:
        return 0
    if len(request.output) < points[0]:
        return 0
    while points and len(request.output) >= points[0]:
        points.pop(0)
    engine.suspend(request.id)
    return 1


def _keep(
    engine: Engine, job: Job, request: Request, rows: dict[tuple[str, int], tuple[Rows, ...]]
) -> None:
    """Copy a request's draft rows twice in its life: after its prompt, and past three quarters."""
    if request.seq is None or not request.decoding or not request.output:
        return
    moment = int(len(request.output) >= job.max_tokens * 3 // 4)
    if (job.id, moment) in rows:
        return
    rows[job.id, moment] = tuple(
        _read(engine, request, group) for group in engine.layout.draft_groups
    )


def _read(engine: Engine, request: Request, group: Any) -> Rows:
    seq = request.seq
    assert seq is not None
    covered = seq.coverage[group].within(0, seq.committed)
    slots = [slot for start, stop in covered for slot in range(start, stop)]
    values = engine.read_rows(request, group, slots).float().cpu() if slots else None
    return Rows(
        tokens=tuple(request.tokens),
        group=engine.layout.groups[group].name,
        slots=tuple(slots),
        values=values,
    )


def row_error(path: Run, cold: Run) -> float | None:
    """Largest distance of a draft row from the cold run's, over that row's norm; None without rows.

    Slots are compared where both runs held them and all tokens up to the slot are equal.
    """
    worst: float | None = None
    for key in path.rows.keys() & cold.rows.keys():
        for mine, other in zip(path.rows[key], cold.rows[key], strict=True):
            error = _distance(mine, other)
            worst = error if worst is None else worst if error is None else max(worst, error)
    return worst


def _distance(mine: Rows, other: Rows) -> float | None:
    common = common_prefix(mine.tokens, other.tokens)
    theirs = {slot: i for i, slot in enumerate(other.slots)}
    pairs = [(i, theirs[s]) for i, s in enumerate(mine.slots) if s < common and s in theirs]
    if not pairs:
        return None
    a = mine.values[[i for i, _ in pairs]].flatten(1)
    b = other.values[[j for _, j in pairs]].flatten(1)
    return float(((a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-12)).max())
