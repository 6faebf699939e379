"""What a training run was asked to do: one frozen record, checked as a whole before any work.

Law: every problem is reported at once and names its option; the record that a run directory holds
is the record it goes on with. This module touches no tensor.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from tandemkv.base.errors import ConfigError


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of training row: `rows` rows of `length` tokens are generated at a time.

    share: part of the generation budget. self_prompted: share of rows whose first user turn the
    target invents; the rest begin with a prompt tagged for this pool. max_answer: tokens of an
    answer. temperatures and their shares: how answers are sampled, drawn per row.
    """

    name: str
    rows: int
    length: int
    share: float = 1.0
    self_prompted: float = 0.4
    max_answer: int = 320
    max_question: int = 160
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    temperature_shares: tuple[float, ...] = (0.5, 0.25, 0.25)


GPU_POOLS = (
    PoolOptions(name="chat", rows=3072, length=768, share=0.62),
    PoolOptions(name="long", rows=1024, length=2048, share=0.38, self_prompted=0.25),
)
CPU_POOLS = (
    PoolOptions(name="chat", rows=8, length=384, share=0.7, max_answer=128),
    PoolOptions(name="long", rows=4, length=768, share=0.3, self_prompted=0.25, max_answer=128),
)


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `train_eagle3`.

    target: a safetensors directory, hub id or GGUF file; None: the embedded default.
    out: the run directory (data, checkpoint, curve, weights). prompts: JSONL files of first turns
    ({"messages": [...]} or {"turns": [...]} or {"prompt": ...}; optional "pool", "answer_prefix",
    "max_answer"); without any, the target prompts itself. texts: plain text files for copying
    tasks. evaluate: JSONL files of held-out prompts, one acceptance set each, named by file.
    data: directory of generated rows, shared between runs; None: inside `out`.

    Budgets: generation by data_tokens or data_seconds; training by exactly one of steps, tokens,
    seconds. pause_after: stop and save once this call has trained so many seconds. resume: go on in
    a directory that already holds a run.

    batch_tokens: tokens of one optimizer step. head_rows: rows of the tied head in the loss of one
    step, of which head_random are drawn anew each step from the less frequent ones; 0: the whole
    vocabulary. unroll: training-time-test steps S. context_dropout: share of rows that lose a
    random leading part of their context. init: random or target (the layer above the last tap).
    optimizer: muon (matrices; norms by AdamW at the same rate) or adamw, which wants lr 1e-3.
    """

    out: str
    target: str | None = None
    prompts: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    evaluate: tuple[str, ...] = ()
    evaluate_limit: int | None = None
    data: str | None = None
    pools: tuple[PoolOptions, ...] | None = None
    data_tokens: int | None = None
    data_seconds: float | None = None
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    pause_after: float | None = None
    resume: bool = False
    batch_tokens: int = 32768
    lr: float = 4e-3
    optimizer: str = "muon"
    warmup: float = 0.04
    final_lr: float = 0.02
    unroll: int = 5
    unroll_decay: float = 0.8
    head_rows: int = 16384
    head_random: int = 4096
    context_dropout: float = 0.25
    held_out: int = 64
    checkpoint_s: float = 120.0
    init: str = "random"
    num_draft_tokens: int = 4
    max_new_tokens: int = 256
    draft_vocab_rows: int = 32768
    seed: int = 0
    device: str = "auto"
    quiet: bool = False

    def problems(self) -> list[str]:
        """Everything wrong with the values alone, one sentence each, naming the option."""
        out: list[str] = []
        if sum(x is not None for x in (self.steps, self.tokens, self.seconds)) != 1:
            out.append("give exactly one of steps, tokens and seconds")
        if self.data_tokens is not None and self.data_seconds is not None:
            out.append("give one of data_tokens and data_seconds, not both")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                out.append(f"{name} must be above 0, got {value}")
        for name in _SHARES:
            if not 0 <= getattr(self, name) <= 1:
                out.append(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                shown = getattr(self, name)
                out.append(f"{name} must be one of {', '.join(allowed)}, got {shown!r}")
        if self.head_rows < 0 or not 0 <= self.head_random <= max(self.head_rows, 0):
            out.append("head_random must lie between 0 and head_rows")
        for pool in self.pools or ():
            if pool.rows < 1 or pool.length < 64:
                out.append(f"pool {pool.name!r} needs at least 1 row of at least 64 tokens")
            if len(pool.temperatures) != len(pool.temperature_shares):
                out.append(f"pool {pool.name!r} needs one share per temperature")
        for name in (*self.prompts, *self.texts, *self.evaluate):
            if not Path(name).is_file():
                out.append(f"{name}: no such file")
        return out

    def validate(self) -> None:
        """Raise one ConfigError that names every problem."""
        if problems := self.problems():
            raise ConfigError("train: " + "; ".join(problems))

    @property
    def data_dir(self) -> Path:
        """Where generated rows lie."""
        return Path(self.data) if self.data else Path(self.out) / "data"


_POSITIVE = (
    "data_tokens", "data_seconds", "steps", "tokens", "seconds", "pause_after", "batch_tokens",
    "lr", "unroll", "unroll_decay", "checkpoint_s", "num_draft_tokens", "max_new_tokens",
    "draft_vocab_rows", "evaluate_limit",
)  # fmt: skip
_SHARES = ("warmup", "final_lr", "context_dropout")
_CHOICES = {"optimizer": ("adamw", "muon"), "init": ("random", "target")}
_MAY_CHANGE = frozenset(
    {"resume", "pause_after", "quiet", "device", "evaluate", "evaluate_limit", "checkpoint_s",
     "data_seconds", "data_tokens", "num_draft_tokens", "max_new_tokens", "seconds"}
)  # fmt: skip
"""Options that a resumed run may be given anew: they do not change what was trained so far."""


def claim_directory(options: TrainOptions) -> None:
    """Make the run directory, or check that the one that exists holds this very run.

    Raises ConfigError when a run is there and resume was not asked for, or its options differ.
    """
    out = Path(options.out)
    record = out / "options.json"
    if record.exists():
        if not options.resume:
            raise ConfigError(f"{out} already holds a run; go on with --resume or choose another")
        _check_same(options, json.loads(record.read_text()), out)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(record, msgspec.json.format(msgspec.json.encode(options), indent=2))


def _check_same(options: TrainOptions, before: dict[str, object], out: Path) -> None:
    now = msgspec.to_builtins(options)
    changed = [
        name
        for name, value in now.items()
        if name not in _MAY_CHANGE and json.dumps(before.get(name)) != json.dumps(value)
    ]
    if changed:
        raise ConfigError(f"{out} holds a run with another value of {', '.join(changed)}")


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file in one step: a reader sees the old one or the new one."""
    raw = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(raw)
    os.replace(temporary, path)
