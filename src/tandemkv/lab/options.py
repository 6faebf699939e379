"""What the lab is asked to run: drafters with their checkpoints and K, paths, prompts, sampling.

Law: what cannot be run as asked is refused by name, before a model is loaded. This module runs
nothing, and imports torch only to look at drafters.
"""

from __future__ import annotations

import hashlib

import msgspec

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError

CONVERSATIONS = ("cold", "warm", "second_turn", "resumed")
"""Paths of a conversation; what runs unless paths are named."""
BRANCHED, EVICTED = BRANCHES = ("branches", "branches_evicted")
"""Paths of prompts that branch off a long shared one."""
PATHS = (*CONVERSATIONS, *BRANCHES)
WITHHELD = "warm_rows_withheld"
HANDED_OVER = ("disaggregated", "disaggregated_hit", "disaggregated_second_turn")
"""Paths of conversations whose prompts a prefill worker computes."""
WITHOUT_DRAFT = "_no_draft"
NO_DRAFT = tuple(path + WITHOUT_DRAFT for path in HANDED_OVER)
"""The same with the drafter's rows not shipped."""
SEEDED = (WITHHELD, *NO_DRAFT)
"""Paths that lose draft rows to show what that costs."""

TRAINED = ("eagle3", "dflash", "dspark")
"""Drafters that ship with weights, for the embedded model."""
WITH_CHECKPOINT = (*TRAINED, "draft_model")
DRAFTERS = (*WITH_CHECKPOINT, "ngram")

DEFAULT_BRANCHES = 6
DEFAULT_SHARED_TOKENS = 2048
WINDOWS_SHARED = 4
"""Windows of the widest windowed draft group that a shared prompt must span."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a run samples; each request's seed comes of `seed`, the run's name and the prompt's."""

    temperature: float = 1.0
    top_p: float = 1.0
    verification: str = "token"
    seed: int = 0

    def of(self, phase: str, job: str) -> Sampling:
        """The same with the seed of one request: new for each phase, equal in each repetition."""
        digest = hashlib.blake2b(f"{self.seed}/{phase}/{job}".encode(), digest_size=8)
        return msgspec.structs.replace(self, seed=int.from_bytes(digest.digest()) >> 1)


class LabOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. engine: its options; drafters: methods; cut_loops: the presets' protocol.

    drafter_paths, num_draft_tokens: by method, where the engine's options leave them open.
    paths: None takes a conversation's, second turns where the prompts have any. plain: also run
    without a drafter (output equality and speed). show_loss: add the row with the draft rows of
    reused blocks withheld. sampling: None is greedy. branches: prompts that branch off a shared
    one of `shared_tokens` tokens. num_prefill: prefill workers; with one, conversations are also
    run handed over, with and without the drafter's rows.
    """

    engine: EngineConfig
    drafters: tuple[str, ...]
    drafter_paths: dict[str, str] = {}
    num_draft_tokens: dict[str, int] = {}
    paths: tuple[str, ...] | None = None
    prompts: str = "bundled"
    limit: int | None = None
    max_tokens: int = 64
    cut_loops: bool = False
    plain: bool = True
    show_loss: bool = False
    sampling: Sampling | None = None
    branches: int = DEFAULT_BRANCHES
    shared_tokens: int = DEFAULT_SHARED_TOKENS
    num_prefill: int = 0

    def engine_of(self, drafter: str, *faults: str) -> EngineConfig:
        """The options of an engine with this drafter ("none": without), tracing."""
        engine = msgspec.structs.replace(
            self.engine, drafter=drafter, trace=True, faults=faults or self.engine.faults
        )
        if drafter == "none":
            return msgspec.structs.replace(engine, drafter_path=None, num_draft_tokens=None)
        if drafter in self.drafter_paths:
            path = self.drafter_paths[drafter]
            engine = msgspec.structs.replace(engine, drafter_path=path)
        if engine.num_draft_tokens is None and drafter in self.num_draft_tokens:
            k = self.num_draft_tokens[drafter]
            engine = msgspec.structs.replace(engine, num_draft_tokens=k)
        return engine


def has_rows(drafter: str) -> bool:
    """Whether a drafter keeps rows in the cache, which can be lost."""
    return drafter != "ngram"


def shipped() -> tuple[str, ...]:
    """The trained drafters whose weights are there."""
    from tandemkv.model.drafters import SHIPPED

    return tuple(name for name in TRAINED if (SHIPPED[name] / "config.json").is_file())


def check_drafters(options: LabOptions) -> None:
    """Look at every drafter's options and checkpoint, which is quick, before the first one runs."""
    from tandemkv.model.drafters import find_drafter

    for drafter in options.drafters:
        config = options.engine_of(drafter)
        find_drafter(
            drafter,
            config.drafter_path,
            num_draft_tokens=config.num_draft_tokens,
            draft_vocab=config.draft_vocab,
            options=config.drafter_options,
            cache_dir=config.cache_dir,
        )


def paths_of(asked: str, drafters: tuple[str, ...]) -> dict[str, str]:
    """--drafter-path by method: one directory for the one that has a checkpoint, or METHOD=DIR,...

    Raises ConfigError where it is not clear whose checkpoint it is.
    """
    own = [name for name in drafters if name in WITH_CHECKPOINT]
    parts = [part.strip().partition("=") for part in asked.split(",")]
    if not all(name in DRAFTERS and path for name, _, path in parts):
        if len(own) == 1:
            return {own[0]: asked}
        whose = f"{' and '.join(own)} have one each" if own else "no drafter asked for has one"
        raise ConfigError(
            f"--drafter-path is one checkpoint, and {whose}; several are METHOD=DIR,METHOD=DIR"
        )
    for name, _, _ in parts:
        if name not in own:
            raise ConfigError(f"--drafter-path: {name} has none, or is not among --drafter")
    return {name: path for name, _, path in parts}
