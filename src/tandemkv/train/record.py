"""The options that a run directory holds, and what a later call may lay over them.

Law: a run goes on with its own record, and only its budget may grow; a directory that holds a run
is never trained over, nor by another method. This module trains nothing.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tandemkv.base.errors import ConfigError
from tandemkv.train.options import Eagle3Options, TrainOptions, write_atomically

Options = TypeVar("Options", bound=TrainOptions)
_BUDGETS = ("steps", "tokens", "seconds")
_OF_THE_CALL = ("resume", "pause_after", "quiet")
"""Options of one call: a resumed run does not take them from the record."""
_MAY_CHANGE = frozenset(
    {*_OF_THE_CALL, *_BUDGETS, "out", "device", "threads", "evaluate", "evaluate_limit",
     "checkpoint_s", "data_seconds", "data_tokens", "num_draft_tokens", "max_new_tokens"}
)  # fmt: skip
"""Options that a resumed run may be given anew: they do not change what was trained so far."""
_ALTERNATIVES = (_BUDGETS, ("data_tokens", "data_seconds"))
"""Of each of these one is set: giving one anew drops the others of the record."""
FIRST_METHOD = Eagle3Options.method
"""The method of a record that names none."""


def resumed(options: Options, given: Iterable[str] | None = None) -> Options:
    """The options a call runs with: with `resume` the run's own, the given ones laid over.

    given: names of the options that were given, None: all of them. Without `resume`, or in a
    directory that holds no run yet, the options as they are. Raises ConfigError when the directory
    holds a run and `resume` was not asked for, when that run is another method's, or when a given
    option contradicts the run's.
    """
    before = _recorded(options)
    if before is None:
        if options.resume and not any(_budget(options)):
            raise ConfigError(f"{options.out} holds no run to go on with")
        return options
    if not options.resume:
        again = resume_command(options)
        raise ConfigError(f"{options.out} already holds a run: go on with `{again}`")
    named = set(options.__struct_fields__ if given is None else given)
    if changed := _contradictions(options, before, named):
        raise ConfigError(f"{options.out} holds a run with {'; '.join(changed)}")
    return _laid_over(options, before, named)


def _laid_over(options: Options, before: Options, named: set[str]) -> Options:
    for names in _ALTERNATIVES:
        if named & set(names):
            named |= set(names)
    values = {name: getattr(options, name) for name in {*named, *_OF_THE_CALL, "out"}}
    return msgspec.structs.replace(before, **values)


def _contradictions(options: TrainOptions, before: TrainOptions, named: set[str]) -> list[str]:
    """What was given against the record: option, its value there, the value given."""
    found = [
        f"{name} {_shown(getattr(before, name))}, not {_shown(getattr(options, name))}"
        for name in options.__struct_fields__
        if name in named - (_MAY_CHANGE - options.fixed)
        and getattr(options, name) != getattr(before, name)
    ]
    had, now = _budget(before), _budget(options)
    if named & set(_BUDGETS) and any(now) and any(had):
        if now[0] != had[0]:
            found.append(f"{had[0]} {had[1]:g} as its budget, not {now[0]} {now[1]:g}")
        elif now[1] < had[1]:
            found.append(f"{had[0]} {had[1]:.12g}, not {now[1]:.12g} (a budget may only be raised)")
    return found


def _budget(options: TrainOptions) -> tuple[str, float]:
    """The first budget that is set and its value; ("", 0) without one."""
    set_ = ((name, getattr(options, name)) for name in _BUDGETS)
    return next(((name, float(value)) for name, value in set_ if value is not None), ("", 0.0))


def _shown(value: Any) -> str:
    if value is None:
        return "left open"
    if isinstance(value, tuple | str):
        return msgspec.json.encode(value).decode()
    return str(value)


def _recorded(options: Options) -> Options | None:
    """The options of the run that a directory holds, None where it holds none."""
    out = Path(options.out)
    record = out / "options.json"
    try:
        raw = record.read_bytes()
        method = json.loads(raw).get("method", FIRST_METHOD)
        if method == options.method:
            return msgspec.json.decode(raw, type=type(options))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise ConfigError(f"{out} is not a directory") from None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{record} cannot be read as the options of a run: {error}") from None
    again = _command(method, options.out)
    raise ConfigError(f"{out} holds a run of {method}: go on with `{again}`")


def resume_command(options: TrainOptions) -> str:
    """The command line that goes on with a run; every option comes from its directory."""
    return _command(options.method, options.out)


def _command(method: str, out: str) -> str:
    return f"tandemkv train {method} --out {shlex.quote(out)} --resume"


def holds_run(options: TrainOptions) -> bool:
    """Whether there is something to go on with."""
    return (Path(options.out) / "options.json").exists()


def claim_directory(options: TrainOptions) -> None:
    """Make the run directory and put the options there, for `resumed` to find."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    values = {"method": options.method} | msgspec.to_builtins(options)
    record = msgspec.json.format(msgspec.json.encode(values), indent=2)
    write_atomically(out / "options.json", record)
