"""Experiments on tiny engines, for tests of the lab: a prompts file, letters as tokens, an engine.

draft_model is the target itself: it accepts every draft, as long as its rows are right.
"""

from __future__ import annotations

import json
from pathlib import Path

from engines import tiny_engine

from tandemkv.base.config import EngineConfig
from tandemkv.engine.engine import Engine
from tandemkv.lab import disaggregated
from tandemkv.lab.acceptance import Experiment
from tandemkv.lab.options import LabOptions

TEXTS = ("What is a page?", "Tell me of blocks, and of slots.", "Copy: abcabcabcabcabcabc")


class Letters:
    """Characters as token ids below the tiny vocabulary."""

    chat_template = None

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(c) % 61 for c in text]


def make_engine(config: EngineConfig) -> Engine:
    names = {"draft_model": "self"}
    engine = tiny_engine(
        names.get(config.drafter, config.drafter),
        k=config.num_draft_tokens or 3,
        faults=config.faults,
        kv_cache_tokens=config.kv_cache_tokens or 2048,
        max_running=3,
    )
    engine.tokenizer = Letters()
    return engine


def write_prompts(path: Path, texts: tuple[str, ...] = TEXTS) -> str:
    path.write_text("".join(json.dumps({"turns": [t, "and then?"]}) + "\n" for t in texts))
    return str(path)


def experiment(prompts: str, *drafters: str, **options: object) -> Experiment:
    """An experiment that has not run; options are LabOptions', the engine's faults, and workers."""
    workers = options.pop("workers", disaggregated.workers)
    asked = LabOptions(
        engine=EngineConfig(faults=options.pop("faults", ())),  # type: ignore[arg-type]
        drafters=drafters,
        prompts=prompts,
        **({"max_tokens": 24} | options),  # type: ignore[arg-type]
    )
    return Experiment(asked, make_engine=make_engine, workers=workers)  # type: ignore[arg-type]
