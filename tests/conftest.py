"""One thread per worker, and models that many tests share. Nothing heavy is imported before use."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported by anyone
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what is in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(kind, **changes) -> directory of a tiny random-weight model, saved once."""
    import tiny

    root = tmp_path_factory.mktemp("tiny")
    saved: dict[str, Path] = {}

    def directory(kind: str = "llama", **changes: Any) -> Path:
        name = "-".join([kind, *(f"{k}={changes[k]}" for k in sorted(changes))])
        if name not in saved:
            saved[name] = tiny.save_model(kind, root / f"{kind}-{len(saved)}", **changes)
        return saved[name]

    return directory


@pytest.fixture(scope="session")
def tiny_target(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """tiny_target(kind, **changes) -> a float32 Target on CPU, loaded once."""
    from tandemkv.model.checkpoint import load_target

    cache = tmp_path_factory.mktemp("cache")
    loaded: dict[Path, Any] = {}

    def target(kind: str = "llama", **changes: Any) -> Any:
        path = tiny_model(kind, **changes)
        if path not in loaded:
            loaded[path] = load_target(str(path), device="cpu", cache_dir=cache)
        return loaded[path]

    return target


@pytest.fixture(scope="session")
def default_target() -> Any:
    """The embedded default model, real weights, float32 on CPU; converted on first use."""
    from tandemkv.model.checkpoint import load_target

    return load_target(None, device="cpu")
