"""What drafting K tokens costs, drafter beside drafter, and beside the target's verify pass.

    python benchmarks/draft_step.py [--k 7] [--batch 1 8] [--context 400] [--json FILE]

One draft step of each shipped drafter on the embedded target, in turn, with the same context and K:
it writes the rows of three accepted tokens and proposes K. The times are medians; what counts are
the ratios to EAGLE-3's step and to one verify pass of K + 1 rows, taken in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandemkv.base.sampling import SamplingParams
from tandemkv.lab.provenance import write_figures
from tandemkv.lab.script import count, lines, parser, run

if TYPE_CHECKING:
    import torch

    from tandemkv.model.drafter import Drafter
    from tandemkv.model.target import Target

METHODS = ("eagle3", "dflash", "dspark")
ACCEPTED = 3
PAGE = 16


def step_of(drafter: Drafter, target: Target, batch: int, context: int, k: int) -> Callable:
    """One draft step of `batch` sequences that have `context` rows each."""
    import torch

    from tandemkv.model.attention import KVPool
    from tandemkv.model.drafter import DraftInputs, DraftSegment

    device, dtype = target.spec.device, target.spec.dtype
    per_sequence = -(-(context + k + 2) // PAGE)
    groups = drafter.layer_groups(PAGE, dtype)
    pools = [KVPool(group, batch * per_sequence, device) for group in groups]
    for pool in pools:
        pool.data.normal_()
    drafter.bind(pools)
    first = context - ACCEPTED
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.spec.vocab_size, (context + 1,), generator=generator)
    shape = (batch * ACCEPTED, len(drafter.spec.taps), target.spec.hidden_size)
    features = torch.randn(shape, generator=generator).to(device, getattr(torch, dtype))
    segments = [
        DraftSegment(
            row_start=i * ACCEPTED,
            row_stop=(i + 1) * ACCEPTED,
            position=first,
            pages=[range(i * per_sequence, (i + 1) * per_sequence)] * len(groups),
            readable=[[(g.first_needed(context), first + g.lookahead)] for g in groups],
            writes=[[(first + g.lookahead, context + g.lookahead)] for g in groups],
            tokens=tokens.tolist(),
            num_rows=context,
            num_drafts=k,
            params=SamplingParams(temperature=0.0),
        )
        for i in range(batch)
    ]
    inputs = DraftInputs(
        token_ids=tokens[first:context].repeat(batch).to(device),
        next_ids=tokens[first + 1 :].repeat(batch).to(device),
        positions=torch.arange(first, context).repeat(batch).to(device),
        features=features,
        segments=segments,
    )
    return lambda: drafter.run(inputs)


def verify_of(target: Target, batch: int, context: int, k: int) -> Callable:
    """The target's pass over K + 1 rows of each sequence, logits included."""
    import torch

    from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool

    device, rows = target.spec.device, k + 1
    per_sequence = -(-(context + rows) // PAGE)
    pools = [KVPool(g, batch * per_sequence, device) for g in target.layer_groups(PAGE)]
    for pool in pools:
        pool.data.normal_()
    segments = [
        AttentionSegment(
            row_start=i * rows,
            row_stop=(i + 1) * rows,
            slot=context,
            pages=range(i * per_sequence, (i + 1) * per_sequence),
            readable=[(0, context)],
            writes=[(context, context + rows)],
        )
        for i in range(batch)
    ]
    ids = torch.arange(batch * rows, device=device) % 1000
    positions = torch.arange(context, context + rows).repeat(batch).to(device)

    def verify() -> None:
        planned = [GroupRows(pool, segments) for pool in pools]
        out = target.forward(ids, positions, planned)
        target.logits(out.hidden).argmax(-1).tolist()

    return verify


def medians(
    steps: dict[str, Callable], repeat: int, device: torch.device | str
) -> dict[str, float]:
    """Milliseconds by name; all run in turn, in an order that turns."""
    import torch

    cuda = "cuda" in str(device)
    names = list(steps)
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(repeat + 3):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.inference_mode():
                steps[name]()
            if cuda:
                torch.cuda.synchronize()
            if i >= 3:
                found[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in found.items()}


def main(args: argparse.Namespace) -> None:
    import torch

    from tandemkv.model.checkpoint import load_target
    from tandemkv.model.drafters import find_drafter

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"loading the target on {device}, {dtype} ...", file=sys.stderr)
    target = load_target(args.model, dtype=dtype, device=device)
    drafters = {}
    for method in METHODS:
        bind = find_drafter(method, None, num_draft_tokens=args.k)
        drafters[method] = bind(target, getattr(torch, dtype), target.spec.device)
    found: dict[str, float] = {}
    for batch in args.batch:
        steps = {
            name: step_of(drafter, target, batch, args.context, args.k)
            for name, drafter in drafters.items()
        }
        steps["verify"] = verify_of(target, batch, args.context, args.k)
        times = medians(steps, args.repeat, device)
        for name, ms in times.items():
            found[f"batch_{batch}_{name}_ms"] = ms
        for name in METHODS:
            found[f"batch_{batch}_{name}_over_verify"] = times[name] / times["verify"]
        for name in METHODS[1:]:
            found[f"batch_{batch}_{name}_over_eagle3"] = times[name] / times["eagle3"]
    print(*lines(found), sep="\n")
    if args.json:
        write_figures(args.json, found, threads=torch.get_num_threads())


def options() -> argparse.ArgumentParser:
    found = parser(__doc__)
    add = found.add_argument
    add("--model", help="directory, hub id or GGUF file (default: the embedded one)")
    add("--k", type=count, default=7, help="drafts of a step (default: %(default)s)")
    add("--batch", type=count, nargs="+", default=[1, 8], help="sequences (default: 1 8)")
    add("--context", type=count, default=400, help="rows of each sequence (default: %(default)s)")
    add("--repeat", type=count, default=30, help="rounds (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, else bfloat16")
    add("--threads", type=count, help="CPU threads (default: one for each core)")
    return found


if __name__ == "__main__":
    sys.exit(run(main, options()))
