"""Where a number came from: command, commit, versions, hardware; and the JSON files that say so.

Law: a results file names the code, the machine and the command that made it, and is written whole
or not at all. This module measures nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tandemkv
from tandemkv.base.errors import ConfigError

SCHEMA = 1
_PACKAGES = ("torch", "transformers", "numpy", "safetensors")


def provenance(**extra: Any) -> dict[str, Any]:
    """The present process as a JSON object; `extra` is added to it."""
    return {
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        **extra,
    }


def commit() -> str | None:
    """The source tree's commit, with "+" when files differ from it; None outside of a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return head and head + ("+" if changed else "")


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of what it computes with, as installed."""
    out = {"python": platform.python_version(), "tandemkv": tandemkv.__version__}
    for name in _PACKAGES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def hardware() -> dict[str, Any]:
    """CPU model, usable cores, memory; GPUs when torch is loaded and sees any."""
    out: dict[str, Any] = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "system": f"{platform.system()} {platform.release()}",
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        out["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
    return out


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, None)


def check_writable(path: str | Path) -> None:
    """Refuse, before anything is measured, a results file that cannot be written: ConfigError."""
    path = Path(path)
    parent = path.parent
    if path.is_dir():
        problem = "it is a directory"
    elif not parent.is_dir():
        problem = f"there is no directory {parent}"
    elif not os.access(parent, os.W_OK | os.X_OK):
        problem = f"the directory {parent} cannot be written"
    else:
        return
    raise ConfigError(f"--json {path}: {problem}")


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Write a results file, whole or not at all. Raises ConfigError naming the path."""
    path = Path(path)
    scratch = path.with_name(path.name + ".part")
    try:
        scratch.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror or error}") from None


def write_figures(path: str | Path, figures: dict[str, Any], **extra: Any) -> None:
    """A benchmark's results: {"schema", "provenance", "figures": {name: number, ...}}."""
    content = {"schema": SCHEMA, "provenance": provenance(**extra), "figures": figures}
    write_json(path, content)
