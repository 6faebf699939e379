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

from tandemkv.base.config import DRAFTERS, FAULTS, EngineConfig, from_mapping
from tandemkv.base.errors import ConfigError

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Short names that --dtype takes as well."""


class Opt(NamedTuple):
    """One option. flags: its spellings if not --name; positional: an argument instead."""

    name: str
    kind: Any
    help: str
    flags: tuple[str, ...] = ()
    positional: bool = False


MODEL = Opt("model", str, "Safetensors directory, hub id or GGUF file; default: the embedded one.")
MODEL_ARGUMENT = MODEL._replace(positional=True)
ENGINE = (
    Opt("drafter", str, f"One of {', '.join(DRAFTERS)}; auto takes the shipped drafter."),
    Opt("drafter_path", str, "Checkpoint of an eagle3 or draft_model drafter."),
    Opt("num_draft_tokens", int, "K, drafts per step."),
    Opt("draft_vocab", int, "Rows of the target's head that the drafter drafts over."),
    Opt("speculative_config", str, "JSON as vLLM takes it: method, model, num_speculative_tokens."),
    Opt("dtype", str, "auto, float32 (fp32) or bfloat16 (bf16)."),
    Opt("device", str, "auto, cpu or cuda."),
    Opt("threads", int, "CPU threads."),
    Opt("block_size", int, "Tokens per block of the prefix tree."),
    Opt("target_page_size", int, "Slots per page of the target's groups."),
    Opt("draft_page_size", int, "Slots per page of the drafter's groups."),
    Opt("kv_cache_tokens", int, "Capacity of the cache in tokens."),
    Opt("max_model_len", int, "Longest sequence, prompt and output."),
    Opt("max_batch_tokens", int, "Rows of one step."),
    Opt("max_running", int, "Requests that run at once."),
    Opt("claim_policy", str, "exact, fast or auto: what a hole in the draft rows is worth."),
    Opt(
        "prefix_caching",
        bool,
        "Reuse cached prefixes.",
        ("--prefix-caching/--no-prefix-caching",),
    ),
    Opt("cache_dir", str, "Where converted models are kept."),
    Opt("debug", bool, "Check every law after every step, poison free pages.", ("--debug",)),
    Opt("fault", str, f"Seed a fault: {', '.join(FAULTS)}."),
)
SAMPLING = (
    Opt("max_tokens", int, "Longest output."),
    Opt("temperature", float, "0 (the default) is greedy."),
    Opt("top_p", float, "Nucleus."),
    Opt("top_k", int, "0: no limit."),
    Opt("min_p", float, "Least share of the best token's probability."),
    Opt("seed", int, "Same seed, same text."),
)
GENERAL = (
    Opt("config", str, "YAML file with any of these options.", ("--config",)),
    Opt("verbose", bool, "Print the traceback of an error.", ("--verbose",)),
)


def command(
    app: typer.Typer, name: str, *options: Opt
) -> Callable[[Callable[[SimpleNamespace], Any]], Callable[[SimpleNamespace], Any]]:
    """Register f(given) as a command with these options; `given` has an attribute for each."""

    def register(f: Callable[[SimpleNamespace], Any]) -> Callable[[SimpleNamespace], Any]:
        def run(**values: Any) -> Any:
            return f(SimpleNamespace(**values))

        run.__doc__ = f.__doc__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [_parameter(option) for option in (*options, *GENERAL)]
        )
        app.command(name)(run)
        return f

    return register


def _parameter(option: Opt) -> inspect.Parameter:
    if option.positional:
        default = typer.Argument(None, help=option.help, show_default=False)
    else:
        flags = option.flags or ("--" + option.name.replace("_", "-"),)
        eager: dict[str, Any] = {}
        if option.name == "config":
            eager = {"is_eager": True, "callback": _read_config}
        default = typer.Option(None, *flags, help=option.help, show_default=False, **eager)
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=option.kind | None,
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
    return value


def suggestion(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


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
