"""Options of the command line: declared once, given on the line or in a YAML file.

Law: a value on the command line wins over the file, the file over the default; an unknown key or
option is refused by name. What was left open stays None, so that the engine can choose and say
why. This module imports no model code.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import typer
from typer.core import TyperCommand

from tandemkv.base.config import DRAFTERS, FAULTS, EngineConfig, from_mapping
from tandemkv.base.errors import ConfigError

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Short names that --dtype takes as well."""


class Opt(NamedTuple):
    """One option. flags: its spellings if not --name; positional: an argument instead.

    default: what holds when it is left open, as `--help` shows it. heading: its section there.
    """

    name: str
    kind: Any
    help: str
    flags: tuple[str, ...] = ()
    positional: bool = False
    default: str = ""
    heading: str = ""


SAMPLING_HEADING = "Sampling options"
ENGINE_HEADING = "Engine options"
TESTING_HEADING = "Testing options"
HEADINGS = ("", SAMPLING_HEADING, ENGINE_HEADING, TESTING_HEADING)
"""Sections of a command's help in order; "" is the command's own."""

MODEL = Opt(
    "model",
    str,
    "Safetensors directory, hub id (org/name) or GGUF file.",
    default="the embedded SmolLM2-135M-Instruct",
    heading=ENGINE_HEADING,
)
MODEL_ARGUMENT = MODEL._replace(positional=True)
_ENGINE = (
    Opt(
        "drafter",
        str,
        f"One of {', '.join(DRAFTERS)}.",
        default="auto: what --drafter-path holds, eagle3 for the embedded model, else none",
    ),
    Opt(
        "drafter_path",
        str,
        "Checkpoint of an eagle3, dflash, dspark or draft_model drafter.",
        default="the shipped one, but of a draft_model",
    ),
    Opt(
        "num_draft_tokens",
        int,
        "K, drafts per step; 0 turns speculation off.",
        default="the drafter's: 4, for dflash and dspark what they were trained for, 7",
    ),
    Opt(
        "draft_vocab",
        int,
        "Rows of the target's head that a trained drafter drafts over, the most frequent first.",
        default="16384 on CPU, all on a GPU",
    ),
    Opt("speculative_config", str, "JSON as vLLM takes it: method, model, num_speculative_tokens."),
    Opt(
        "dtype",
        str,
        "auto, float32 (fp32) or bfloat16 (bf16).",
        default="auto: float32 on CPU, bfloat16 on a GPU",
    ),
    Opt("device", str, "auto, cpu or cuda.", default="auto: cuda if there is one, else cpu"),
    Opt(
        "threads",
        int,
        "CPU threads; 1 where other processes keep the cores busy.",
        default="one for each available core",
    ),
    Opt("block_size", int, "Tokens per block of the prefix tree.", default="16"),
    Opt(
        "target_page_size",
        int,
        "Slots per page of the target's groups.",
        default="the block size, or 1/8 of a window that is short",
    ),
    Opt(
        "draft_page_size",
        int,
        "Slots per page of the drafter's groups.",
        default="the block size, or 1/8 of a window that is short",
    ),
    Opt(
        "kv_cache_tokens",
        int,
        "Capacity of the cache in tokens.",
        default="what 2 GiB hold on CPU, 80% of the free memory on a GPU",
    ),
    Opt(
        "max_model_len",
        int,
        "Longest sequence, prompt and output.",
        default="what the model and the cache hold, at most 8192",
    ),
    Opt("max_batch_tokens", int, "Rows of one step.", default="512 on CPU, 4096 on a GPU"),
    Opt("max_running", int, "Requests that run at once.", default="32 on CPU, 128 on a GPU"),
    Opt(
        "claim_policy",
        str,
        "exact, fast or auto: what a hole in the draft rows is worth. exact recomputes it, fast"
        " leaves it, auto weighs the two.",
        default="exact",
    ),
    Opt(
        "prefix_caching",
        bool,
        "Reuse cached prefixes.",
        ("--prefix-caching/--no-prefix-caching",),
        default="on",
    ),
    Opt("cache_dir", str, "Where converted models are kept.", default="~/.cache/tandemkv"),
)
_TESTING = (
    Opt(
        "debug",
        bool,
        "Check every law after every step, poison free pages.",
        ("--debug",),
        default="off",
    ),
    Opt("fault", str, f"Seed a fault: {', '.join(FAULTS)}.", default="none"),
)
ENGINE = (
    *(option._replace(heading=ENGINE_HEADING) for option in _ENGINE),
    *(option._replace(heading=TESTING_HEADING) for option in _TESTING),
)
SAMPLING = tuple(
    option._replace(heading=SAMPLING_HEADING)
    for option in (
        Opt("max_tokens", int, "Longest output.", default="256"),
        Opt("temperature", float, "0 is greedy.", default="0"),
        Opt("top_p", float, "Nucleus: the least share of probability kept.", default="1"),
        Opt("top_k", int, "The most likely tokens kept; 0: no limit.", default="0"),
        Opt("min_p", float, "Least share of the best token's probability.", default="0"),
        Opt("seed", int, "Same seed, same text.", default="drawn anew"),
    )
)
GENERAL = (
    Opt("config", str, "YAML file with any of these options.", ("--config",)),
    Opt(
        "verbose",
        bool,
        "Say what is loaded, print the traceback of an error.",
        ("--verbose",),
        default="off",
    ),
)


class Command(TyperCommand):
    """A command whose help has a section for each heading, and then examples as written."""

    examples: tuple[str, ...] = ()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        params = self.get_params(ctx)
        records = [(param, param.get_help_record(ctx)) for param in params]
        arguments = [r for p, r in records if r and p.param_type_name == "argument"]
        _section(formatter, "Arguments", arguments)
        options = [(p, r) for p, r in records if r and p.param_type_name == "option"]
        for heading in HEADINGS:
            of = [r for p, r in options if (getattr(p, "rich_help_panel", None) or "") == heading]
            _section(formatter, heading or "Options", of)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _section(formatter: Any, title: str, records: list[Any]) -> None:
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def command(
    app: typer.Typer, name: str, *options: Opt, examples: Sequence[str] = ()
) -> Callable[[Callable[[SimpleNamespace], Any]], Callable[[SimpleNamespace], Any]]:
    """Register f(given) as a command with these options; `given` has an attribute for each."""
    kinds = {option.name: option for option in (*options, *GENERAL)}

    def register(f: Callable[[SimpleNamespace], Any]) -> Callable[[SimpleNamespace], Any]:
        def run(**values: Any) -> Any:
            given = {name: converted(kinds[name], value) for name, value in values.items()}
            try:
                return f(SimpleNamespace(**given))
            except KeyboardInterrupt:  # the option parser would turn it into a silent exit
                raise typer.Abort() from None

        run.__doc__ = f.__doc__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [_parameter(option) for option in kinds.values()]
        )
        shown = type("Command", (Command,), {"examples": tuple(examples)})
        app.command(name, cls=shown)(run)
        return f

    return register


_NUMBERS = {int: "an integer", float: "a number"}


def converted(option: Opt, value: Any) -> Any:
    """A value as its option's kind. Raises ConfigError in our words."""
    if value is None or option.kind not in _NUMBERS:
        return value
    try:
        return option.kind(value)
    except ValueError:
        name = option.name.upper() if option.positional else _flag(option)
        raise ConfigError(f"{name} must be {_NUMBERS[option.kind]}, got {value!r:.60}") from None


def _flag(option: Opt) -> str:
    return option.flags[0] if option.flags else "--" + option.name.replace("_", "-")


def _parameter(option: Opt) -> inspect.Parameter:
    shown = f"{option.help}  [default: {option.default}]" if option.default else option.help
    kind = str if option.kind in _NUMBERS else option.kind  # numbers are converted here
    if option.positional:
        default = typer.Argument(None, help=shown, show_default=False)
    else:
        extra: dict[str, Any] = {"rich_help_panel": option.heading or None}
        if option.kind in _NUMBERS:
            extra["metavar"] = f"<{option.kind.__name__}>"
        if option.name == "config":
            extra |= {"is_eager": True, "callback": _read_config}
        default = typer.Option(None, _flag(option), help=shown, show_default=False, **extra)
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind | None
    )


def _read_config(ctx: typer.Context, value: str | None) -> str | None:
    """Make a YAML file's values the defaults of the options that are not on the line."""
    if value is None:
        return None
    known = [str(p.name) for p in ctx.command.params if p.name not in ("config", "help")]
    ctx.default_map = {**(ctx.default_map or {}), **read_config(value, known)}
    return value


def read_config(path: str, known: Sequence[str]) -> dict[str, Any]:
    """A YAML file's options by name; "-" and "_" are the same. Raises ConfigError by key."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid UTF-8"
        raise ConfigError(f"--config {path}: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected options as `name: value` lines")
    out: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"--config {path}: unknown key {key!r}{suggestion(name, known)}")
        out[name] = _plain(value)
    return out


def _plain(value: Any) -> Any:
    """A YAML value as the command line would spell it."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return value if value is None or isinstance(value, bool) else str(value)


NEAR = 0.75
"""Likeness from which on a known name is suggested: one letter off, or two swapped."""


def near(name: str, known: Sequence[str]) -> str | None:
    """The known name that was probably meant."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=NEAR)), None)


def suggestion(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known name is near."""
    found = near(name, known)
    return f"; did you mean {found!r}?" if found else ""


def names(value: str, option: str, known: Sequence[str]) -> tuple[str, ...]:
    """A comma-separated list of known names. Raises ConfigError naming the option."""
    found = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    for name in found:
        if name not in known:
            raise ConfigError(
                f"{option}: {name!r} is not one of {', '.join(known)}{suggestion(name, known)}"
            )
    if not found:
        raise ConfigError(f"{option}: no name given; known: {', '.join(known)}")
    return found


def engine_config(given: SimpleNamespace, **fixed: Any) -> EngineConfig:
    """The engine's configuration from the options given; raises ConfigError for all problems."""
    fields = {field.name for field in msgspec.structs.fields(EngineConfig)}
    values = {k: v for k, v in vars(given).items() if k in fields and v is not None}
    values |= speculative(getattr(given, "speculative_config", None), values)
    if "dtype" in values:
        values["dtype"] = DTYPES.get(values["dtype"], values["dtype"])
    if getattr(given, "fault", None):
        values["faults"] = names(given.fault, "--fault", tuple(FAULTS))
    config = from_mapping({**values, **fixed})
    config.validate()
    return config


def speculative(text: str | None, values: dict[str, Any]) -> dict[str, Any]:
    """Engine options from the JSON of --speculative-config; `values`: those given by name."""
    if text is None:
        return {}
    where = "--speculative-config"
    try:
        asked = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error.msg} at character {error.pos})") from None
    if not isinstance(asked, dict):
        raise ConfigError(f"{where}: expected an object with method, model, ...")
    out = {
        ours: asked.pop(theirs)
        for theirs, ours in _SPECULATIVE.items()
        if asked.get(theirs) is not None
    }
    if "drafter" not in out:
        raise ConfigError(f"{where}: method is missing; one of {', '.join(DRAFTERS[1:-1])}")
    if out["drafter"] not in DRAFTERS:
        raise ConfigError(
            f"{where}: method {out['drafter']!r} is not one of {', '.join(DRAFTERS[1:-1])}"
        )
    for name in out.keys() & values.keys():
        raise ConfigError(f"{where} and --{name.replace('_', '-')} say the same twice; give one")
    return {**out, "drafter_options": asked} if asked else out


_SPECULATIVE = {
    "method": "drafter",
    "model": "drafter_path",
    "num_speculative_tokens": "num_draft_tokens",
    "draft_vocab": "draft_vocab",
}
