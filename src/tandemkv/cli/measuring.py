"""`acceptance` and `explain`: what a deployment accepts, and where its KV came from.

Law: options are checked before a model is loaded. This module measures nothing itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import typer

from tandemkv.base.errors import ConfigError
from tandemkv.cli.options import ENGINE, MODEL, Opt, command, engine_config, names

_ACCEPTANCE = (
    Opt("paths", str, "Comma-separated; default: cold,warm,second_turn,resumed."),
    Opt("prompts", str, "bundled, mt_bench, gsm8k, or a JSONL file of turns, messages or prompt."),
    Opt("limit", int, "Take the first N conversations."),
    Opt("max_tokens", int, "Longest output; default 64."),
    Opt("batch", int, "Requests that run at once."),
    Opt("preset", str, "mt_bench or gsm8k: the protocol that quoted numbers follow."),
    Opt("json", str, "Write the rows to this file."),
    Opt("plain", bool, "Also run without a drafter.", ("--plain/--no-plain",)),
    Opt("show_loss", bool, "Add warm runs without the drafter's rows.", ("--show-loss",)),
)
_DRAFTERS = "eagle3 (the default), draft_model, ngram, several of them (a,b), or all."
_EXPLAIN = (
    Opt("prompt", str, "Run this prompt and show where its KV came from."),
    Opt("then", str, "A second prompt, run after the first."),
    Opt("max_tokens", int, "Longest output; default 16."),
)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    engine = [o._replace(help=_DRAFTERS) if o.name == "drafter" else o for o in ENGINE]
    command(app, "acceptance", *_ACCEPTANCE, MODEL, *engine)(acceptance)
    command(app, "explain", *_EXPLAIN, MODEL, *ENGINE)(explain)


def acceptance(given: SimpleNamespace) -> int:
    """Measure acceptance cold, warm, on second turns and after suspension."""
    from tandemkv.lab.command import acceptance as run

    return run(lab_options(given), given.json)


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
    """Show the resolved configuration with its reasons, and where a prompt's KV came from."""
    config = engine_config(given)
    from tandemkv.engine.engine import Engine
    from tandemkv.lab.origins import explain_prompts

    engine = Engine.from_config(config)
    for line in engine.resolved.lines():
        print(line)
    prompts = [text for text in (given.prompt, given.then) if text is not None]
    for line in explain_prompts(engine, prompts, given.max_tokens or 16):
        print(line)
