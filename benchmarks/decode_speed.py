"""Decoding speed at batch 1: with the drafter, without it, and beside transformers' generate.

    python benchmarks/decode_speed.py [--limit 20] [--max-tokens 128] [--json FILE]

GSM8K prompts, greedy, the same threads and weights in one process. All variants answer a prompt
before the next one begins, in an order that turns from prompt to prompt, so that what slows the
machine down slows all of them; ratios are medians over prompts of the ratio on one prompt. The time
is decoding time: from a text's first token to its last, prompt computation left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import TandemError
from tandemkv.base.sampling import SamplingParams
from tandemkv.lab import prompts
from tandemkv.lab.provenance import write_figures
from tandemkv.lab.script import count, lines, parser, run

if TYPE_CHECKING:
    import torch

    from tandemkv.engine.engine import Engine

DTYPES = ("float32", "bfloat16")


class Timing(NamedTuple):
    """One answer. tokens: those after the first; steps, accepted: verify steps with drafts."""

    tokens: int
    seconds: float
    output: tuple[int, ...]
    steps: int = 0
    accepted: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


Variant = Callable[[list[int]], Timing]


def of_engine(engine: Engine, max_tokens: int) -> Variant:
    """Decoding by one of our engines."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def answer(prompt: list[int]) -> Timing:
        request = engine.add(prompt, params)
        first: float | None = None
        first_count = 0
        while engine.has_work:
            engine.step()
            if first is None and request.output:
                first, first_count = time.perf_counter(), len(request.output)
        seconds = time.perf_counter() - (first or 0.0)
        if request.error:
            raise TandemError(request.error)
        done = request.acceptance
        output = tuple(request.output)
        return Timing(len(output) - first_count, seconds, output, done.num_steps, done.num_accepted)

    return answer


def of_transformers(model: str | None, dtype: str, max_tokens: int, eos: Sequence[int]) -> Variant:
    """Decoding by transformers' generate, attention as it chooses."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList, logging

    from tandemkv.model.checkpoint import resolve

    logging.disable_progress_bar()
    reference = AutoModelForCausalLM.from_pretrained(
        resolve(model), dtype=getattr(torch, dtype), local_files_only=True
    ).eval()

    class Clock(StoppingCriteria):
        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    @torch.inference_mode()
    def answer(prompt: list[int]) -> Timing:
        clock = Clock()
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(eos),
            pad_token_id=eos[0],
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        output = tuple(out[0, len(prompt) :].tolist())
        return Timing(len(output) - 1, clock.times[-1] - clock.times[0], output)

    return answer


def measure(
    variants: dict[str, Variant], asked: list[list[int]], repeat: int
) -> dict[str, list[Timing]]:
    """Every variant on every prompt, in turn; answers of fewer than two tokens are left out."""
    names = list(variants)
    for answer in variants.values():
        answer(asked[0])
    found: dict[str, list[Timing]] = {name: [] for name in names}
    for i, prompt in enumerate(asked * repeat):
        shift = i % len(names)
        row = {name: variants[name](prompt) for name in names[shift:] + names[:shift]}
        if all(timing.tokens > 0 for timing in row.values()):
            for name, timing in row.items():
                found[name].append(timing)
        print(
            f"  {i + 1}/{len(asked) * repeat}: "
            + ", ".join(f"{name} {row[name].speed:.1f}" for name in names),
            file=sys.stderr,
        )
    return found


def figures(dtype: str, found: dict[str, list[Timing]]) -> dict[str, float]:
    """Median speeds and ratios of one precision."""

    def ratio(a: str, b: str) -> float:
        pairs = zip(found[a], found[b], strict=True)
        return statistics.median(x.speed / y.speed for x, y in pairs)

    out = {
        f"{dtype}_{name}_tokens_per_s": statistics.median(t.speed for t in timings)
        for name, timings in found.items()
    }
    drafted = found["drafter"]
    steps = sum(t.steps for t in drafted)
    out[f"{dtype}_al"] = 1 + sum(t.accepted for t in drafted) / max(1, steps)
    out[f"{dtype}_drafter_over_plain"] = ratio("drafter", "plain")
    if "transformers" in found:
        out[f"{dtype}_plain_over_transformers"] = ratio("plain", "transformers")
    for other in ("drafter", "transformers"):
        if other in found:
            same = [a.output == b.output for a, b in zip(found["plain"], found[other], strict=True)]
            out[f"{dtype}_outputs_equal_{other}"] = sum(same) / len(same)
    return out


def engines(args: argparse.Namespace, dtype: str) -> tuple[dict[str, Variant], Engine]:
    """The variants of one precision."""
    from tandemkv.engine.engine import Engine

    common: dict[str, Any] = {
        "model": args.model,
        "dtype": dtype,
        "device": "cpu",
        "threads": args.threads,
        "prefix_caching": False,
        "kv_cache_tokens": 8192,
        "max_running": 1,
    }
    drafted = Engine.from_config(
        EngineConfig(
            **common,
            drafter=args.drafter,
            drafter_path=args.drafter_path,
            num_draft_tokens=args.num_draft_tokens,
            draft_vocab=args.draft_vocab,
        )
    )
    plain = Engine.from_config(EngineConfig(**common, drafter="none"))
    eos = drafted.target.spec.eos_token_ids
    variants = {
        "drafter": of_engine(drafted, args.max_tokens),
        "plain": of_engine(plain, args.max_tokens),
    }
    if not args.no_transformers:
        variants["transformers"] = of_transformers(args.model, dtype, args.max_tokens, eos)
    return variants, drafted


def main(args: argparse.Namespace) -> None:
    import torch

    asked = prompts.load("gsm8k", args.limit)
    found: dict[str, float] = {}
    for dtype in args.dtype or DTYPES:
        print(f"{dtype}: loading ...", file=sys.stderr)
        variants, engine = engines(args, dtype)
        encode = prompts.PromptTokens(engine.tokenizer, engine.target.spec.eos_token_ids)
        print(f"{dtype}: tokens/s by prompt", file=sys.stderr)
        timings = measure(variants, [encode.first(c) for c in asked], args.repeat)
        found |= figures(dtype, timings)
        del variants, engine
    print(*lines(found), sep="\n")
    if args.json:
        write_figures(args.json, found, threads=torch.get_num_threads())


def options() -> argparse.ArgumentParser:
    found = parser(__doc__)
    add = found.add_argument
    add("--model", help="directory, hub id or GGUF file (default: the embedded one)")
    add("--drafter", default="eagle3", help="eagle3, draft_model or ngram (default: %(default)s)")
    add("--drafter-path", help="the drafter's checkpoint (default: the shipped one)")
    add("--num-draft-tokens", type=count, help="K (default: the drafter's)")
    add("--draft-vocab", type=count, help="head rows drafted over (default: 16384)")
    add("--dtype", choices=DTYPES, action="append", help="one (default: both)")
    add("--limit", type=count, default=20, help="GSM8K prompts (default: %(default)s)")
    add("--max-tokens", type=count, default=128, help="longest answer (default: %(default)s)")
    add("--repeat", type=count, default=1, help="rounds over all prompts (default: %(default)s)")
    add("--threads", type=count, help="CPU threads (default: one for each core)")
    add("--no-transformers", action="store_true", help="leave transformers' generate out")
    return found


if __name__ == "__main__":
    sys.exit(run(main, options()))
