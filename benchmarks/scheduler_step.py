"""What scheduling a step costs beside the model step it serves: plan and apply, without a model.

Law: the scheduler, the cache and their bookkeeping are the real ones; the model step is replaced by
a function that makes tokens up at a fixed acceptance. Times are medians over steps of a batch that
only decodes, in CPU time, so that a busy machine does not count (wall time beside it). The model
step to compare with is measured in the same run: the embedded default without a drafter, one row
for each request, the least that a step can cost; its CPU time on one thread, shared out over the
cores. This script tunes nothing.

    python benchmarks/scheduler_step.py --json FILE
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time

from tandemkv.base.sampling import SamplingParams
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.kv.manager import KVManager
from tandemkv.lab.provenance import write_figures
from tandemkv.lab.script import count, lines, parser, run
from tandemkv.sched.batch import Segment, SegmentResult, StepPlan, StepResult
from tandemkv.sched.request import Request
from tandemkv.sched.scheduler import Scheduler

LIMIT_SHARE = 0.1


def layout() -> Layout:
    """The embedded default with its drafter: 30 layers, and one layer a token ahead."""
    target = LayerGroup(
        name="target",
        domain=Domain.TARGET,
        layers=tuple(range(30)),
        num_kv_heads=3,
        head_dim=64,
    )
    draft = LayerGroup(
        name="draft",
        domain=Domain.DRAFT,
        layers=(0,),
        num_kv_heads=9,
        head_dim=64,
        lookahead=1,
        pointwise=True,
    )
    return Layout(block_size=16, groups=(target, draft))


class FakeStep:
    """Answers plans: each draft is accepted with the given chance."""

    def __init__(self, acceptance: float, seed: int = 0) -> None:
        self._acceptance = acceptance
        self._random = random.Random(seed)

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, [self._part(segment) for segment in plan.segments])

    def _part(self, segment: Segment) -> SegmentResult:
        draw, accepted = self._random, 0
        while accepted < segment.num_drafts and draw.random() < self._acceptance:
            accepted += 1
        tokens = segment.tokens[1 : 1 + accepted]
        if segment.samples:
            tokens = [*tokens, draw.randrange(3, 49152)]
        drafts = [draw.randrange(3, 49152) for _ in range(segment.num_propose)]
        return SegmentResult(segment.seq.id, tokens, accepted, drafts)


def measure(num_running: int, prompt: int, steps: int, k: int) -> dict[str, float]:
    """Medians and tails over `steps` steps of a batch of `num_running` decoding requests."""
    tokens = num_running * (prompt + (steps + 20) * (k + 1) + 64)
    kv = KVManager(layout(), [tokens // 16 + 1] * 2)
    scheduler = Scheduler(
        kv,
        max_batch_tokens=8192,
        max_running=num_running,
        max_model_len=1 << 20,
        num_draft_tokens=k,
        prefill_chunk=2048,
    )
    draw = random.Random(1)
    for i in range(num_running):
        params = SamplingParams(temperature=0.0, max_tokens=(steps + 20) * (k + 1))
        ids = [draw.randrange(3, 49152) for _ in range(prompt)]
        scheduler.add(Request(id=str(i), prompt=ids, params=params))
    model = FakeStep(0.6)
    while any(not r.decoding for r in scheduler.running) or scheduler.waiting:
        plan = scheduler.plan()
        scheduler.apply(plan, model.run(plan))
    clock, wall = time.thread_time, time.perf_counter
    plans: list[float] = []
    applies: list[float] = []
    walls: list[float] = []
    for _ in range(steps):
        begin, start = wall(), clock()
        plan = scheduler.plan()
        plans.append(clock() - start)
        spent = wall() - begin
        result = model.run(plan)
        begin, start = wall(), clock()
        scheduler.apply(plan, result)
        applies.append(clock() - start)
        walls.append(spent + wall() - begin)
        if len(plan.segments) != num_running:
            raise SystemExit(f"only {len(plan.segments)} of {num_running} requests were in a step")
    total = sorted(p + a for p, a in zip(plans, applies, strict=True))
    return {
        "plan_ms": 1e3 * statistics.median(plans),
        "apply_ms": 1e3 * statistics.median(applies),
        "step_ms": 1e3 * statistics.median(total),
        "step_p99_ms": 1e3 * total[int(0.99 * (len(total) - 1))],
        "step_wall_ms": 1e3 * statistics.median(walls),
    }


def model_step_ms(num_running: int, steps: int = 5) -> float:
    """Median over decode steps of `num_running` requests on the embedded default."""
    from tandemkv.base.config import EngineConfig
    from tandemkv.engine.engine import Engine

    engine = Engine.from_config(
        EngineConfig(drafter="none", max_running=num_running, max_batch_tokens=2048, threads=1)
    )
    params = SamplingParams(temperature=0.0, max_tokens=steps + 4, ignore_eos=True)
    draw = random.Random(1)
    for _ in range(num_running):
        engine.add([draw.randrange(1000, 9000) for _ in range(8)], params)
    spent: list[float] = []
    run_step = engine.runner.run

    def timed(plan: StepPlan) -> StepResult:
        start = time.thread_time()
        result = run_step(plan)
        if len(plan.segments) == num_running and all(s.verify for s in plan.segments):
            spent.append(time.thread_time() - start)
        return result

    engine.runner.run = timed
    while engine.has_work and len(spent) < steps:
        engine.step()
    return 1e3 * statistics.median(spent) / len(os.sched_getaffinity(0))


def main(args: argparse.Namespace) -> None:
    figures = measure(args.running, args.prompt, args.steps, args.num_draft_tokens)
    model = args.model_step_ms or model_step_ms(args.running)
    figures |= {
        "running": args.running,
        "model_step_ms": model,
        "share_of_model_step": figures["step_ms"] / model,
    }
    print(*lines(figures, {"share_of_model_step": LIMIT_SHARE}), sep="\n")
    if args.json:
        write_figures(args.json, {**figures, "limit_share": LIMIT_SHARE})


def options() -> argparse.ArgumentParser:
    found = parser(__doc__)
    found.add_argument(
        "--running",
        type=count,
        default=64,
        help="decoding requests in a step (default: %(default)s)",
    )
    found.add_argument(
        "--prompt", type=count, default=512, help="prompt tokens of each (default: %(default)s)"
    )
    found.add_argument(
        "--steps", type=count, default=200, help="steps; medians are told (default: %(default)s)"
    )
    found.add_argument(
        "--num-draft-tokens",
        type=count,
        default=4,
        help="K, drafts of each request (default: %(default)s)",
    )
    found.add_argument(
        "--model-step-ms",
        type=float,
        help="milliseconds of the model step to compare with (default: measured)",
    )
    return found


if __name__ == "__main__":
    sys.exit(run(main, options()))
