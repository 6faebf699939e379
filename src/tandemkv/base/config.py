"""What was asked of an engine, and what will run: every value with its reason.

Law: nothing reads the environment for configuration; a value that the operator left open is
resolved once, with a reason that `explain` prints; all problems are reported at once, before
memory is touched. This module knows no model: the engine resolves what depends on one.
"""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from tandemkv.base.errors import ConfigError

FAULTS = {
    "withhold_draft_rows": "draft rows of reused blocks are dropped at the claim and not refilled",
}
"""Seeded faults by name: they act in the tree or the pools, so that checks are known to fail."""

MAX_DRAFT_TOKENS = 64
"""The largest K: a verify step of more rows than that never pays."""

DRAFTERS = ("auto", "eagle3", "dflash", "dspark", "draft_model", "ngram", "none")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine's options as asked for; None means: choose, and say why.

    model: a safetensors directory, hub id or GGUF file; None: the embedded default. drafter: auto
    takes the shipped drafter when it was trained for the model. drafter_path: checkpoint of
    the drafter, where it has one. draft_vocab: rows of the target's head that the drafter drafts
    over (the most frequent ones). kv_cache_tokens: capacity of the device pools in tokens.
    max_batch_tokens: rows of one step. trace: keep a record of each verify step.
    """

    model: str | None = None
    drafter: str = "auto"
    drafter_path: str | None = None
    num_draft_tokens: int | None = None
    draft_vocab: int | None = None
    drafter_options: dict[str, Any] = {}
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    block_size: int = 16
    target_page_size: int | None = None
    draft_page_size: int | None = None
    kv_cache_tokens: int | None = None
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    max_running: int | None = None
    claim_policy: str = "exact"
    prefix_caching: bool = True
    trace: bool = False
    debug: bool = False
    faults: tuple[str, ...] = ()
    cache_dir: str | None = None

    def problems(self) -> list[str]:
        """Everything wrong with the values alone, one sentence each, naming the option."""
        try:
            msgspec.convert(msgspec.structs.asdict(self), EngineConfig)
        except msgspec.ValidationError as error:
            return [_named(error)]
        out: list[str] = []
        for name in _POSITIVE:
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                out.append(f"{name} must be at least 1, got {value}")
        k = self.num_draft_tokens
        if k is not None and not 0 <= k <= MAX_DRAFT_TOKENS:
            out.append(f"num_draft_tokens must be in [0, {MAX_DRAFT_TOKENS}], got {k}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                out.append(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        for name in ("block_size", "target_page_size", "draft_page_size"):
            value = getattr(self, name)
            if value is not None and value >= 1 and value & (value - 1):
                out.append(f"{name} must be a power of two, got {value}")
        for fault in self.faults:
            if fault not in FAULTS:
                out.append(f"fault {fault!r} is not one of {', '.join(FAULTS)}")
        return out

    def validate(self) -> None:
        """Raise one ConfigError that names every problem."""
        if problems := self.problems():
            raise ConfigError("; ".join(problems))


_POSITIVE = (
    "draft_vocab",
    "threads",
    "block_size",
    "target_page_size",
    "draft_page_size",
    "kv_cache_tokens",
    "max_model_len",
    "max_batch_tokens",
    "max_running",
)
_CHOICES = {
    "drafter": DRAFTERS,
    "dtype": ("auto", "float32", "bfloat16"),
    "claim_policy": ("exact", "fast", "auto"),
}


class Choice(msgspec.Struct, frozen=True):
    """One resolved value and why it is so."""

    value: Any
    reason: str


class Resolved(msgspec.Struct, frozen=True):
    """What will run, by option name; in the order in which it was decided."""

    choices: dict[str, Choice]

    def __getitem__(self, name: str) -> Any:
        return self.choices[name].value

    def lines(self) -> list[str]:
        """`name = value  (reason)`, one line each."""
        return [f"{name} = {c.value}  ({c.reason})" for name, c in self.choices.items()]


class Resolver:
    """Collects choices; `asked` wins over `chosen`."""

    def __init__(self) -> None:
        self._choices: dict[str, Choice] = {}

    def choose(self, name: str, asked: Any, chosen: Any, reason: str) -> Any:
        """Record asked if it is not None, else chosen with its reason; returns the value."""
        choice = Choice(asked, "as asked") if asked is not None else Choice(chosen, reason)
        self._choices[name] = choice
        return choice.value

    def done(self) -> Resolved:
        return Resolved(dict(self._choices))


def from_mapping(values: dict[str, Any]) -> EngineConfig:
    """An EngineConfig from a mapping; unknown keys and wrong types are refused by name."""
    known = [field.name for field in msgspec.structs.fields(EngineConfig)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown option {key!r}{hint}")
    try:
        return msgspec.convert(values, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_named(error)) from None


def _named(error: msgspec.ValidationError) -> str:
    """A wrong type as one sentence that begins with the option's name."""
    reason, _, where = str(error).partition(" - at `$.")
    return f"{where.rstrip('`')}: {reason[:1].lower()}{reason[1:]}" if where else reason
