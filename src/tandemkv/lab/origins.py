"""Where a prompt's KV came from, run for real: each interval of each layer group, as lines.

Law: the intervals are the cache's own record, read while the request still holds its pages. This
module explains nothing that did not happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tandemkv.base.sampling import SamplingParams
from tandemkv.lab.prompts import PromptTokens

if TYPE_CHECKING:
    from tandemkv.engine.engine import Engine


def explain_prompts(engine: Engine, texts: Sequence[str], max_tokens: int) -> Iterator[str]:
    """Run each text as a user's message, one after the other, and describe its KV."""
    encode = PromptTokens(engine.tokenizer, engine.target.spec.eos_token_ids).opening
    for text in texts:
        prompt = encode([{"role": "user", "content": text}])
        yield ""
        yield from _explain(engine, prompt, max_tokens)


def _explain(engine: Engine, prompt: list[int], max_tokens: int) -> Iterator[str]:
    request = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    lines: list[str] = []
    while engine.has_work:
        engine.step()
        if request.seq is not None and request.output:
            lines = _intervals(engine, request.seq)
    if request.error is not None:
        yield f"error: {request.error}"
        return
    accepted = request.acceptance
    yield (
        f"prompt of {len(prompt)} tokens, {request.cached_tokens} cached;"
        f" {len(request.output)} tokens out, AL {accepted.mean_length:.2f}"
        f" over {accepted.num_steps} steps"
    )
    yield from lines


def _intervals(engine: Engine, seq: object) -> list[str]:
    lines: list[str] = []
    for group, intervals in zip(engine.layout.groups, engine.kv.explain(seq), strict=True):
        for i, interval in enumerate(intervals):
            name = f"{group.domain}/{group.name}" if i == 0 else ""
            why = f"  ({interval.reason})" if interval.reason else ""
            lines.append(
                f"  {name:<24} [{interval.start}, {interval.stop}) {interval.provenance}{why}"
            )
    return lines
