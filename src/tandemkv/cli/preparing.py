"""`convert` and `train`: models made ready, drafters made.

Law: nothing is downloaded unless a hub id is named. The work is done elsewhere.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import typer

from tandemkv.base.errors import ConfigError
from tandemkv.cli.options import MODEL_ARGUMENT, Opt, command

_CONVERT = (Opt("cache_dir", str, "Where converted models are kept."),)
_TRAIN = (
    Opt("out", str, "Run directory: data, checkpoint, curve, weights. Required."),
    Opt("target", str, "Safetensors directory, hub id or GGUF file; default: the embedded one."),
    Opt("prompts", str, "JSONL files of first turns, a,b; without any the target prompts itself."),
    Opt("texts", str, "Plain text files for copying tasks, a,b."),
    Opt("evaluate", str, "JSONL files of held-out prompts, a,b."),
    Opt("evaluate_limit", int, "Held-out prompts per file."),
    Opt("data", str, "Directory of generated rows, to share between runs."),
    Opt("pools", str, "JSON list of pools: name, rows, length, share, ..."),
    Opt("data_tokens", int, "Tokens to generate."),
    Opt("data_seconds", float, "Seconds to generate for."),
    Opt("steps", int, "Budget: optimizer steps."),
    Opt("tokens", int, "Budget: tokens."),
    Opt("seconds", float, "Budget: seconds of training."),
    Opt("pause_after", float, "Stop and save after so many seconds of this call."),
    Opt("resume", bool, "Go on in a directory that holds a run.", ("--resume",)),
    Opt("batch_tokens", int, "Tokens per step."),
    Opt("lr", float, "Peak learning rate."),
    Opt("optimizer", str, "adamw or muon."),
    Opt("warmup", float, "Share of the budget."),
    Opt("final_lr", float, "Share of the peak at the end."),
    Opt("unroll", int, "Training-time-test steps."),
    Opt("unroll_decay", float, "Weight of each further step."),
    Opt("head_rows", int, "Rows of the head in one step's loss; 0: all."),
    Opt("head_random", int, "Of those, drawn anew each step."),
    Opt("context_dropout", float, "Share of rows that lose a leading part of their context."),
    Opt("held_out", int, "Generated rows kept from training."),
    Opt("checkpoint_s", float, "Seconds between checkpoints."),
    Opt("init", str, "random or target."),
    Opt("num_draft_tokens", int, "K of the evaluation."),
    Opt("max_new_tokens", int, "Longest answer in the evaluation."),
    Opt("draft_vocab_rows", int, "Ranked head rows to write with the weights."),
    Opt("seed", int, "Same seed, same run."),
    Opt("device", str, "auto, cpu or cuda."),
    Opt("quiet", bool, "No progress.", ("--quiet",)),
)
_LISTS = ("prompts", "texts", "evaluate")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    command(app, "convert", MODEL_ARGUMENT, *_CONVERT)(convert)
    train = typer.Typer(rich_markup_mode=None)

    @train.callback()
    def _train() -> None:
        """Train a drafter for a target."""

    command(train, "eagle3", *_TRAIN)(eagle3)
    app.add_typer(train, name="train")


def convert(given: SimpleNamespace) -> None:
    """Make a model's weights ready and print where they are."""
    from tandemkv.model.checkpoint import resolve

    print(resolve(given.model, cache_dir=given.cache_dir))


def eagle3(given: SimpleNamespace) -> int:
    """Train an EAGLE-3 drafter by self-distillation; resumable."""
    values = train_values(given)
    from tandemkv.train import TrainOptions, train_eagle3

    result = train_eagle3(_converted(values, TrainOptions))
    if result.weights is not None:
        print(result.weights)
    return 0


def train_values(given: SimpleNamespace) -> dict[str, Any]:
    """The training options that were given, lists and JSON taken apart."""
    known = {option.name for option in _TRAIN}
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
    import msgspec

    try:
        return msgspec.convert(values, options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"train: {error}") from None
