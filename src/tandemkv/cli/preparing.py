"""`convert` and `train`: models made ready, drafters made.

Law: nothing is downloaded unless a hub id is named. The work is done elsewhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import typer

from tandemkv.base.errors import ConfigError
from tandemkv.cli.options import MODEL_ARGUMENT, Opt, command
from tandemkv.train import (
    DFlashOptions,
    DSparkOptions,
    Eagle3Options,
    PoolOptions,
    TrainOptions,
    resumed,
    train_dflash,
    train_dspark,
    train_eagle3,
)
from tandemkv.train.options import CPU_POOLS, CPU_TOKENS, GPU_POOLS, GPU_TOKENS


def _pools(pools: Sequence[PoolOptions]) -> str:
    return ", ".join(f"{p.name} {p.rows} x {p.length} ({p.share:g})" for p in pools)


def _with_default(option: Opt, options: type[TrainOptions]) -> Opt:
    """The option, its help showing the default that the method's own record has."""
    value = getattr(options(out=""), option.name)
    if option.default or option.name == "out" or value in (None, ()) or isinstance(value, bool):
        return option
    return option._replace(default=f"{value:g}" if isinstance(value, float) else str(value))


_CONVERT = (Opt("cache_dir", str, "Where converted models are kept.", default="~/.cache/tandemkv"),)
_POOLS_EXAMPLE = '[{"name": "chat", "rows": 8, "length": 384, "share": 0.7}]'
_TRAIN = (
    Opt("out", str, "Run directory: data, checkpoint, curve, weights. Required."),
    Opt(
        "target",
        str,
        "Safetensors directory, hub id (org/name) or GGUF file.",
        default="the embedded SmolLM2-135M-Instruct",
    ),
    Opt("prompts", str, "JSONL files of first turns, a,b.", default="the target prompts itself"),
    Opt("texts", str, "Plain text files for copying tasks, a,b.", default="no copying tasks"),
    Opt("evaluate", str, "JSONL files of held-out prompts, a,b.", default="generated rows only"),
    Opt("evaluate_limit", int, "Held-out prompts per file.", default="all"),
    Opt("data", str, "Directory of generated rows, to share between runs.", default="OUT/data"),
    Opt(
        "pools",
        str,
        "Kinds of generated rows, a JSON list: `rows` rows of `length` tokens at a time, `share` of"
        " the tokens; as well self_prompted, max_answer, max_question, temperatures and"
        f" temperature_shares. Example: '{_POOLS_EXAMPLE}'",
        default=f"{_pools(CPU_POOLS)} on CPU; {_pools(GPU_POOLS)} on a GPU",
    ),
    Opt(
        "data_tokens",
        int,
        "Tokens to generate.",
        default=f"{CPU_TOKENS} on CPU, {GPU_TOKENS} on a GPU",
    ),
    Opt("data_seconds", float, "Seconds to generate for, instead.", default="by tokens"),
    Opt("steps", int, "Budget: optimizer steps. Give one of --steps, --tokens and --seconds."),
    Opt("tokens", int, "Budget: tokens."),
    Opt("seconds", float, "Budget: seconds of training."),
    Opt("pause_after", float, "Stop and save after so many seconds of this call.", default="never"),
    Opt(
        "resume",
        bool,
        "Go on with the run in --out, all of its options included; the budget may be raised.",
        ("--resume",),
    ),
    Opt("batch_tokens", int, "Tokens per step."),
    Opt("lr", float, "Peak learning rate; adamw wants 0.001."),
    Opt("optimizer", str, "adamw or muon."),
    Opt("warmup", float, "Share of the budget in which the learning rate rises."),
    Opt("final_lr", float, "Learning rate at the end, as a share of the peak."),
    Opt("head_rows", int, "Rows of the head in one step's loss; 0: all."),
    Opt("head_random", int, "Of those, drawn anew each step."),
    Opt(
        "context_dropout",
        float,
        "Share of rows (a block drafter's: of draft blocks) that lose a leading part of their"
        " context.",
    ),
    Opt("held_out", int, "Generated rows of each pool kept from training."),
    Opt("checkpoint_s", float, "Seconds between checkpoints."),
    Opt("init", str, "random or target (layers of the target)."),
    Opt("num_draft_tokens", int, "Drafts per step: K."),
    Opt("max_new_tokens", int, "Longest answer in the evaluation."),
    Opt("draft_vocab_rows", int, "Ranked head rows to write with the weights."),
    Opt("seed", int, "Same seed, same run."),
    Opt("device", str, "auto (cuda if there is one), cpu or cuda."),
    Opt("threads", int, "CPU threads; 1 where other programs run.", default="one for each core"),
    Opt("quiet", bool, "No progress.", ("--quiet",), default="off"),
)
_EAGLE3 = (
    Opt("unroll", int, "Training-time-test steps."),
    Opt("unroll_decay", float, "Weight of each further step."),
)
_DFLASH = (
    Opt("num_layers", int, "Layers of the drafter."),
    Opt("window", int, "Tokens that its attention reaches back, the query's own included."),
    Opt("anchors", int, "Draft blocks that are trained per 1024 tokens of a row."),
)
_DSPARK = (
    Opt("markov_rank", int, "Rank of the head that biases a draft by the one before it."),
    Opt("table_lr", float, "Peak learning rate of that head, always by adamw."),
    Opt(
        "confidence",
        bool,
        "Train the head that foresees acceptance.",
        ("--confidence/--no-confidence",),
        default="on",
    ),
)
OPTIONS: dict[type[TrainOptions], tuple[Opt, ...]] = {
    Eagle3Options: (*_TRAIN, *_EAGLE3),
    DFlashOptions: (*_TRAIN, *_DFLASH),
    DSparkOptions: (*_TRAIN, *_DFLASH, *_DSPARK),
}
"""The options of each method's command: those of its record."""
_LISTS = ("prompts", "texts", "evaluate")
EXIT_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    command(app, "convert", MODEL_ARGUMENT, *_CONVERT)(convert)
    train = typer.Typer(rich_markup_mode=None)

    @train.callback()
    def _train() -> None:
        """Train a drafter for a target."""

    for options, does in (
        (Eagle3Options, eagle3),
        (DFlashOptions, dflash),
        (DSparkOptions, dspark),
    ):
        shown = (_with_default(option, options) for option in OPTIONS[options])
        command(train, options.method, *shown)(does)
    app.add_typer(train, name="train")


def convert(given: SimpleNamespace) -> None:
    """Make a model's weights ready and print where they are."""
    from tandemkv.model.checkpoint import resolve

    print(resolve(given.model, cache_dir=given.cache_dir))


def eagle3(given: SimpleNamespace) -> int:
    """Train an EAGLE-3 drafter by self-distillation; resumable."""
    return _train(given, Eagle3Options, train_eagle3)


def dflash(given: SimpleNamespace) -> int:
    """Train a DFlash drafter, all drafts from one pass, by self-distillation; resumable."""
    return _train(given, DFlashOptions, train_dflash)


def dspark(given: SimpleNamespace) -> int:
    """Train a DSpark drafter, DFlash with a Markov head, by self-distillation; resumable."""
    return _train(given, DSparkOptions, train_dspark)


def _train(given: SimpleNamespace, kind: type[TrainOptions], train: Callable[[Any], Any]) -> int:
    values = train_values(given, OPTIONS[kind])
    options = resumed(_converted(values, kind), values)
    options.validate()
    try:
        result = train(options)
    except KeyboardInterrupt as stop:
        if not stop.args:
            raise
        print(f"tandemkv: {stop}", file=sys.stderr)
        return EXIT_INTERRUPTED
    if result.weights is not None:
        print(result.weights)
    return 0


def train_values(given: SimpleNamespace, options: Sequence[Opt] = _TRAIN) -> dict[str, Any]:
    """Those of the training options that were given, lists and JSON taken apart."""
    known = {option.name for option in options}
    values = {k: v for k, v in vars(given).items() if k in known and v is not None}
    if "out" not in values:
        raise ConfigError("--out is missing: the directory of this run")
    for name in _LISTS:
        if name in values:
            values[name] = [part for part in values[name].split(",") if part]
    if "pools" in values:
        try:
            values["pools"] = json.loads(values["pools"])
        except json.JSONDecodeError as error:
            raise ConfigError(f"--pools: not JSON ({error.msg})") from None
    return values


def _converted(values: dict[str, Any], options: Any) -> Any:
    try:
        return msgspec.convert(values, options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"train: {error}") from None
