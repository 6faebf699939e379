"""What the command line says of an engine: while it loads, what it became, what will slow it down.

Law: remarks go to stderr. What is loaded is said before torch is imported, which takes seconds
itself; a warning is printed after an engine was loaded, so that an error stays one line. This
module decides nothing about an engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tandemkv.base.config import EngineConfig, Resolved

if TYPE_CHECKING:
    from tandemkv.engine.engine import Engine

EMBEDDED = "the embedded SmolLM2-135M-Instruct"


def load(config: EngineConfig, *, shown: bool) -> Engine:
    """An engine, announced if `shown`; a busy machine is warned of in any case, if it loads."""
    if shown:
        print(f"loading {asked(config)} ...", file=sys.stderr, flush=True)
    return warned(config)(config)


def watched(verbose: bool | None) -> bool:
    """Whether to say what is loaded: where a person reads stderr, or asked for it."""
    return bool(verbose) or sys.stderr.isatty()


def warned(config: EngineConfig) -> Callable[[EngineConfig], Engine]:
    """What makes engines; the first is followed by a warning if the machine is busy now."""
    lines = [line] if (line := _busy_now(config)) else []

    def make(config: EngineConfig) -> Engine:
        from tandemkv.engine.engine import Engine

        engine = Engine.from_config(config)
        while lines:
            print(f"tandemkv: warning: {lines.pop()}", file=sys.stderr, flush=True)
        return engine

    return make


def asked(config: EngineConfig) -> str:
    """Model and drafter as asked for: what is known before anything is loaded."""
    model = EMBEDDED if config.model is None else config.model
    drafter = config.drafter
    if drafter == "auto" and config.drafter_path:
        return f"{model}, drafter from {config.drafter_path}"
    if drafter == "auto":
        drafter = "eagle3" if config.model is None else "none"
    if drafter == "none":
        return f"{model}, no drafter"
    where = f" from {config.drafter_path}" if config.drafter_path else ""
    return f"{model}, drafter {drafter}{where}"


def description(resolved: Resolved) -> str:
    """The engine that was loaded, in one line."""
    device, threads = resolved["device"], resolved["threads"]
    drafter = resolved["drafter"]
    parts = [
        "no drafter"
        if drafter == "none"
        else f"drafter {drafter}, K {resolved['num_draft_tokens']}",
        f"{resolved['dtype']} on {device}",
        f"{threads} thread{'s' if threads != 1 else ''}",
        f"cache of {resolved['kv_cache_tokens']:,} tokens",
    ]
    return ", ".join(parts)


def _busy_now(config: EngineConfig) -> str | None:
    if config.threads is not None or config.device.startswith("cuda"):
        return None
    try:
        text = Path("/proc/loadavg").read_text()
    except OSError:
        return None
    return busy(text, len(os.sched_getaffinity(0)))


def busy(loadavg: str, cores: int) -> str | None:
    """The warning that /proc/loadavg calls for, if any: as many runnable tasks as cores.

    Its fourth field is runnable/all; the reading process is one of the runnable.
    """
    try:
        others = int(loadavg.split()[3].partition("/")[0]) - 1
    except (IndexError, ValueError):
        return None
    if cores < 2 or others < cores:
        return None
    return (
        f"{others} other tasks run on {cores} cores, and {cores} threads would wait for each"
        " other; --threads 1 is faster then"
    )
