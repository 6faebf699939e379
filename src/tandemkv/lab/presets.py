"""Measurement protocols by name, so that a quoted acceptance length can be repeated.

Law: a preset fixes what decides the number: prompts, length, each drafter's K, greedy decoding,
loops cut. What only changes speed (threads, batch) stays free. What is given beside a preset wins,
and the report shows it: a K that makes drafters comparable, sampling.
"""

from __future__ import annotations

import msgspec

DRAFT_TOKENS = {"eagle3": 4, "dflash": 7, "dspark": 7, "draft_model": 4, "ngram": 4}


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """num_draft_tokens: K by drafter. cut_loops: outputs end at the first 12-gram seen twice
    before."""

    prompts: str
    limit: int
    max_tokens: int = 256
    num_draft_tokens: dict[str, int] = msgspec.field(default_factory=lambda: {**DRAFT_TOKENS})
    cut_loops: bool = True
    paths: tuple[str, ...] = ("cold",)
    plain: bool = False


PRESETS = {
    "mt_bench": Preset(prompts="mt_bench", limit=80),
    "gsm8k": Preset(prompts="gsm8k", limit=200),
}
"""mt_bench: first turns of all 80 questions. gsm8k: the first 200 questions of the test part."""
