"""`acceptance` and `explain`: what a deployment accepts, and where its KV came from.

Law: options are checked before a model is loaded. This module measures nothing itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import typer

from tandemkv.base.errors import ConfigError
from tandemkv.cli.loading import load, warned, watched
from tandemkv.cli.options import ENGINE, MODEL, Opt, command, engine_config, names

_PATHS = "cold,warm,second_turn,resumed"
_ACCEPTANCE = (
    Opt(
        "paths",
        str,
        f"Some of {_PATHS}, comma-separated.",
        default="all, second_turn where the prompts have one",
    ),
    Opt(
        "prompts",
        str,
        "bundled, mt_bench, gsm8k, or a JSONL file of turns, messages or prompt.",
        default="bundled, or the preset's",
    ),
    Opt("limit", int, "Take the first N conversations.", default="all"),
    Opt("max_tokens", int, "Longest output.", default="64, or the preset's"),
    Opt("batch", int, "Requests that run at once; the same as --max-running."),
    Opt("preset", str, "mt_bench or gsm8k: the protocol that quoted numbers follow."),
    Opt("json", str, "Write the rows to this file."),
    Opt("plain", bool, "Also run without a drafter.", ("--plain/--no-plain",), default="on"),
    Opt(
        "show_loss",
        bool,
        "Add warm runs without the drafter's rows.",
        ("--show-loss",),
        default="off",
    ),
)
_DRAFTERS = {
    "help": "eagle3, draft_model, ngram, several of them (a,b), or all: eagle3 and ngram.",
    "default": "eagle3",
}
_EXPLAIN = (
    Opt("prompt", str, "Run this prompt and show where its KV came from."),
    Opt("then", str, "A second prompt, run after the first."),
    Opt("max_tokens", int, "Longest output.", default="16"),
)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    engine = [o._replace(**_DRAFTERS) if o.name == "drafter" else o for o in ENGINE]
    command(
        app,
        "acceptance",
        *(*_ACCEPTANCE, MODEL, *engine),
        examples=(
            "tandemkv acceptance --limit 12 --show-loss",
            "tandemkv acceptance --preset gsm8k --json gsm8k.json",
        ),
    )(acceptance)
    command(
        app,
        "explain",
        *(*_EXPLAIN, MODEL, *ENGINE),
        examples=(
            "tandemkv explain",
            'tandemkv explain --prompt "What is a cache?" --then "What is a cache for?"',
        ),
    )(explain)


def acceptance(given: SimpleNamespace) -> int:
    """Measure acceptance cold, warm, on second turns, when resumed."""
    from tandemkv.lab.command import acceptance as run
    from tandemkv.lab.provenance import check_writable

    if given.json is not None:
        check_writable(given.json)
    options = lab_options(given)
    make_engine = warned(options.engine)
    return run(options, given.json, verbose=bool(given.verbose), make_engine=make_engine)


def lab_options(given: SimpleNamespace) -> Any:
    """The experiment that was asked for; raises ConfigError before anything is loaded."""
    from tandemkv.lab.acceptance import PATHS, LabOptions
    from tandemkv.lab.presets import PRESETS

    fields: dict[str, Any] = {}
    drafters = _drafters(given)
    fixed: dict[str, Any] = {}
    if given.preset is not None:
        (name,) = names(given.preset, "--preset", tuple(PRESETS))[:1]
        preset = PRESETS[name]
        fields = {
            "prompts": preset.prompts,
            "limit": preset.limit,
            "max_tokens": preset.max_tokens,
            "paths": preset.paths,
            "plain": preset.plain,
            "cut_loops": preset.cut_loops,
        }
        if given.num_draft_tokens is None and given.speculative_config is None:
            fixed["num_draft_tokens"] = preset.num_draft_tokens
    for name in ("prompts", "limit", "max_tokens", "plain", "show_loss"):
        if getattr(given, name) is not None:
            fields[name] = getattr(given, name)
    if given.paths is not None:
        fields["paths"] = names(given.paths, "--paths", PATHS)
    for name in ("limit", "max_tokens", "batch"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if given.batch is not None:
        if given.max_running not in (None, given.batch):
            raise ConfigError("--batch and --max-running say the same twice; give one")
        fixed["max_running"] = given.batch
    given = SimpleNamespace(**{**vars(given), "drafter": None})
    return LabOptions(engine=engine_config(given, **fixed), drafters=drafters, **fields)


def _drafters(given: SimpleNamespace) -> tuple[str, ...]:
    """The drafters to measure: as named, or all that need no checkpoint of their own."""
    from tandemkv.cli.options import speculative
    from tandemkv.lab.acceptance import DRAFTERS

    if given.speculative_config is not None:
        asked = speculative(given.speculative_config, {})["drafter"]
    else:
        asked = given.drafter or "auto"
    if asked == "all":
        return ("eagle3", "ngram") if given.drafter_path is None else ("eagle3",)
    if asked == "auto":
        return ("eagle3",)
    return names(asked, "--drafter", DRAFTERS)


def explain(given: SimpleNamespace) -> None:
    """Show the resolved options, and where a prompt's KV came from."""
    if given.max_tokens is not None and given.max_tokens < 1:
        raise ConfigError(f"--max-tokens must be at least 1, got {given.max_tokens}")
    prompts = [text for text in (given.prompt, given.then) if text is not None]
    if not all(text.strip() for text in prompts):
        raise ConfigError("--prompt and --then must be texts that are not empty")
    engine = load(engine_config(given), shown=watched(given.verbose))
    from tandemkv.lab.origins import explain_prompts

    for line in engine.resolved.lines():
        print(line)
    for line in explain_prompts(engine, prompts, given.max_tokens or 16):
        print(line)
