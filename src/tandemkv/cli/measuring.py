"""`acceptance` and `explain`: what a deployment accepts, and where its KV came from.

Law: options are checked before a model is loaded. This module measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError
from tandemkv.cli.disaggregate import num_prefill, share_cores
from tandemkv.cli.loading import load, warned, watched
from tandemkv.cli.options import (
    ENGINE,
    MODEL,
    SAMPLING,
    SAMPLING_HEADING,
    Opt,
    command,
    engine_config,
    names,
)

if TYPE_CHECKING:
    from tandemkv.engine.engine import Engine

_ACCEPTANCE = (
    Opt(
        "paths",
        str,
        "Some of cold, warm, second_turn, resumed, branches, branches_evicted, comma-separated."
        " branches: prompts that share a long system prompt, one after the other;"
        " branches_evicted: the same, all draft pages evicted before the first branch.",
        default="cold, warm, resumed, and second_turn where the prompts have one",
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
    Opt(
        "preset",
        str,
        "mt_bench or gsm8k: the protocol that quoted numbers follow, K included:"
        " 4, for dflash and dspark 7.",
    ),
    Opt("json", str, "Write the rows to this file."),
    Opt(
        "plain",
        bool,
        "Also run without a drafter.",
        ("--plain/--no-plain",),
        default="on; off for a preset and where sampled",
    ),
    Opt(
        "show_loss",
        bool,
        "Add warm runs without the drafter's rows.",
        ("--show-loss",),
        default="off",
    ),
    Opt(
        "disaggregate",
        str,
        "Also run the conversations handed over between workers, with the drafter's rows and"
        " without: 1p1d, or Np1d for N prefill workers.",
        default="off",
    ),
    Opt("branches", int, "Branches of each shared prompt.", default="6"),
    Opt("shared_tokens", int, "Length of the prompt that branches share.", default="2048"),
    *(
        option._replace(default="0") if option.name == "seed" else option
        for option in SAMPLING
        if option.name in ("temperature", "top_p", "seed")
    ),
    Opt(
        "verification",
        str,
        "token or block: how sampled drafts are verified.",
        default="token",
        heading=SAMPLING_HEADING,
    ),
)
_DRAFTERS = {
    "help": "eagle3, dflash, dspark, draft_model, ngram, several of them (a,b), or all: those that"
    " ship with weights, and ngram.",
    "default": "eagle3",
}
_PATHS_OF_DRAFTERS = {
    "help": "Checkpoint of the drafter; METHOD=DIR,METHOD=DIR where several have one.",
}
_REPLACED = {
    "drafter": _DRAFTERS,
    "drafter_path": _PATHS_OF_DRAFTERS,
    "num_draft_tokens": {"help": "K, drafts per step, for all drafters."},
}
_EXPLAIN = (
    Opt("prompt", str, "Run this prompt and show where its KV came from."),
    Opt("then", str, "A second prompt, run after the first."),
    Opt("max_tokens", int, "Longest output.", default="16"),
)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    engine = [option._replace(**_REPLACED.get(option.name, {})) for option in ENGINE]
    command(
        app,
        "acceptance",
        *(*_ACCEPTANCE, MODEL, *engine),
        examples=(
            "tandemkv acceptance --drafter eagle3,dflash,dspark --limit 12 --show-loss",
            "tandemkv acceptance --preset gsm8k --drafter all --num-draft-tokens 7 --json k7.json",
            "tandemkv acceptance --drafter dspark --paths branches,branches_evicted",
            "tandemkv acceptance --drafter eagle3 --disaggregate 1p1d",
            "tandemkv acceptance --temperature 1 --top-p 0.95 --verification block --show-loss",
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
    """Measure acceptance cold, warm, on second turns, when resumed, where a shared prompt forks."""
    from tandemkv.lab.command import acceptance as run
    from tandemkv.lab.options import check_drafters
    from tandemkv.lab.provenance import check_writable

    if given.json is not None:
        check_writable(given.json)
    options = lab_options(given)
    load, checked = warned(options.engine), []

    def make_engine(config: EngineConfig) -> Engine:
        if not checked:
            check_drafters(options)
            checked.append(True)
        return load(config)

    return run(options, given.json, verbose=bool(given.verbose), make_engine=make_engine)


def lab_options(given: SimpleNamespace) -> Any:
    """The experiment that was asked for; raises ConfigError before anything is loaded."""
    from tandemkv.lab.options import PATHS, LabOptions, paths_of

    for name in _COUNTS:
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    sampling = _sampling(given)
    fields: dict[str, Any] = {} if sampling is None else {"sampling": sampling, "plain": False}
    if given.preset is not None:
        fields = {**_preset(given, sampled=sampling is not None), **fields}
    for name in ("prompts", "limit", "max_tokens", "plain", "show_loss"):
        if getattr(given, name) is not None:
            fields[name] = getattr(given, name)
    if given.paths is not None:
        fields["paths"] = names(given.paths, "--paths", PATHS)
    fields |= _branches(given, fields.get("paths") or ())
    drafters = _drafters(given)
    fixed: dict[str, Any] = {}
    if given.batch is not None:
        if given.max_running not in (None, given.batch):
            raise ConfigError("--batch and --max-running say the same twice; give one")
        fixed["max_running"] = given.batch
    if given.drafter_path is not None:
        fields["drafter_paths"] = paths_of(given.drafter_path, drafters)
    fields["num_prefill"] = workers = num_prefill(given.disaggregate)
    given = SimpleNamespace(**{**vars(given), "drafter": None, "drafter_path": None})
    config = share_cores(engine_config(given, **fixed), workers)
    return LabOptions(engine=config, drafters=drafters, **fields)


_COUNTS = ("limit", "max_tokens", "batch", "branches", "shared_tokens", "num_draft_tokens")


def _preset(given: SimpleNamespace, *, sampled: bool) -> dict[str, Any]:
    """The protocol asked for by name; one that is sampled has a path to compare with."""
    from tandemkv.lab.presets import PRESETS

    (name,) = names(given.preset, "--preset", tuple(PRESETS))[:1]
    preset = PRESETS[name]
    return {
        "prompts": preset.prompts,
        "limit": preset.limit,
        "max_tokens": preset.max_tokens,
        "num_draft_tokens": preset.num_draft_tokens,
        "paths": (*preset.paths, "warm") if sampled else preset.paths,
        "plain": preset.plain,
        "cut_loops": preset.cut_loops,
    }


def _sampling(given: SimpleNamespace) -> Any:
    """How to sample; None is greedy, where the options of sampling are refused."""
    from tandemkv.base.sampling import SamplingParams
    from tandemkv.lab.options import Sampling

    asked = {
        name: getattr(given, name)
        for name in ("temperature", "top_p", "verification", "seed")
        if getattr(given, name) is not None
    }
    SamplingParams(**asked)
    if asked.get("temperature"):
        return Sampling(**asked)
    for name in [name for name in asked if name != "temperature"]:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} says nothing where decoding is greedy; give --temperature")
    return None


def _branches(given: SimpleNamespace, paths: Sequence[str]) -> dict[str, Any]:
    """What was said of branches; refused where none are run."""
    from tandemkv.lab.options import BRANCHES

    asked = {
        name: getattr(given, name)
        for name in ("branches", "shared_tokens")
        if getattr(given, name) is not None
    }
    for name in asked if not {*BRANCHES} & {*paths} else ():
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} says nothing without one of --paths {', '.join(BRANCHES)}")
    return asked


def _drafters(given: SimpleNamespace) -> tuple[str, ...]:
    """The drafters to measure: as named, as the checkpoint says, or all that ship."""
    from tandemkv.cli.options import speculative
    from tandemkv.lab.options import DRAFTERS, shipped

    if given.speculative_config is not None:
        twice = {name: getattr(given, name) for name in _SAID_TWICE}
        said = {name: value for name, value in twice.items() if value is not None}
        asked = speculative(given.speculative_config, said)["drafter"]
    else:
        asked = given.drafter or "auto"
    if asked == "all":
        for name in ("drafter_path", "model"):
            if getattr(given, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"--drafter all is what ships, without {flag}; name the drafters")
        return (*shipped(), "ngram")
    if asked == "auto":
        return ("eagle3",) if given.drafter_path is None else (_method(given),)
    return names(asked, "--drafter", DRAFTERS)


_SAID_TWICE = ("drafter", "drafter_path", "num_draft_tokens", "draft_vocab")


def _method(given: SimpleNamespace) -> str:
    """The method of the one checkpoint that was given."""
    from tandemkv.model.drafters import method_of

    return method_of(given.drafter_path, given.cache_dir)


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
