"""What every drafter checkpoint is made of: a config.json, named tensors, 8-bit rows, a ranking.

Law: nothing is unpickled; a damaged file, a missing, unknown or misshapen tensor, one of another
type than it is read as, one that holds NaN or infinity is refused by its name; both files are
replaced atomically. The layouts of the methods are their own modules' business
(`eagle3_checkpoint`, `dflash_checkpoint`): this one knows no layer.

Quantised tensors: NAME.q8 int8 [rows, columns] and NAME.scale [rows]; value = q8 * scale.
draft_vocab [n]: target ids, most frequent first, of which a drafter without a head of its own may
draft over the first k, through those rows of the target's head (k is the operator's choice).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tandemkv.base.errors import ConfigError

QUANTISED = ".q8"
SCALE = ".scale"
RANKING = "draft_vocab"
_INTEGERS = {"d2t": torch.int64, RANKING: torch.int32}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_TYPES = {
    QUANTISED: (torch.int8,),
    RANKING: _INTS,
    "d2t": _INTS,
    "draft_id_to_target_id": _INTS,
    "t2d": (torch.bool, *_INTS),
}
"""Types by the last part of a tensor's name; all others hold floats."""


def write(
    path: Path,
    weights: Mapping[str, Tensor],
    record: Mapping[str, Any],
    *,
    quantise: bool,
    dtype: torch.dtype,
) -> Path:
    """config.json from record, model.safetensors from weights; matrices in 8 bits if asked."""
    from safetensors.torch import save as serialised

    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        stored.update(_stored(name, tensor.detach().cpu(), quantise, dtype))
    check_values(stored, f"{path}, to be written in {_type_name(dtype)}")
    record = {**record, "quantisation": "int8" if quantise else None}
    text, data = json.dumps(record, indent=2) + "\n", serialised(stored, {"format": "pt"})
    path.mkdir(parents=True, exist_ok=True)
    _replace(path / "model.safetensors", data)
    _replace(path / "config.json", text.encode())
    return path


def check_shapes(
    weights: Mapping[str, Tensor],
    required: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    origin: str,
) -> None:
    """Raise ConfigError unless the tensors are those the config calls for; the ranking aside."""
    known = {**required, **optional}
    missing = [name for name in required if name not in weights]
    if missing:
        raise ConfigError(f"{origin}: tensor {missing[0]!r} is missing ({len(missing)} in all)")
    for name, tensor in weights.items():
        if name == RANKING:
            continue
        if name not in known:
            raise ConfigError(f"{origin}: unknown tensor {name!r} {list(tensor.shape)}")
        if tuple(tensor.shape) != known[name]:
            raise ConfigError(
                f"{origin}: tensor {name!r} has shape {list(tensor.shape)}, the config calls for"
                f" {list(known[name])}"
            )


def check_values(tensors: Mapping[str, Tensor], origin: str) -> None:
    """Raise ConfigError for a tensor of a type that is not read, or that holds NaN or infinity."""
    for name, tensor in tensors.items():
        last = QUANTISED if name.endswith(QUANTISED) else name.rsplit(".", 1)[-1]
        types = _TYPES.get(last, _FLOATS)
        if tensor.dtype not in types:
            raise ConfigError(
                f"{origin}: tensor {name!r} is {_type_name(tensor.dtype)}, not one of"
                f" {', '.join(_type_name(each) for each in types)}"
            )
        if tensor.layout != torch.strided or tensor.is_meta:
            raise ConfigError(f"{origin}: tensor {name!r} is sparse or empty of values")
        _check_finite(name, tensor, origin)


def _check_finite(name: str, tensor: Tensor, origin: str) -> None:
    if not tensor.is_floating_point():
        return
    values = tensor.float() if tensor.dtype == torch.float64 else tensor
    if not bool(torch.isfinite(values).all()):
        raise ConfigError(
            f"{origin}: tensor {name!r} holds NaN or infinity; its training or its export failed"
        )


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory. Raises ConfigError where there is none to read."""
    if not path.is_dir():
        raise ConfigError(f"drafter {path}: no such directory")
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path}: has no config.json")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint directory, as the files name them."""
    safe = sorted(path.glob("*.safetensors"))
    bins = sorted(path.glob("pytorch_model*.bin"))
    if not safe and not bins:
        raise ConfigError(f"{path}: has neither *.safetensors nor pytorch_model.bin")
    tensors: dict[str, Tensor] = {}
    for file in safe or bins:
        tensors |= _read_file(file)
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    """One file's tensors. A damaged pickle may raise anything at all; none of it is executed."""
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, "cpu", weights_only=True)
    except Exception as error:
        if type(error).__name__ == "UnpicklingError":
            raise ConfigError(f"{file}: refused, holds more than tensors") from None
        raise ConfigError(f"{file}: cannot be read ({_first_line(error)})") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(t, Tensor) for name, t in tensors.items()
    ):
        raise ConfigError(f"{file}: refused, holds more than tensors")
    return tensors


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _stored(name: str, tensor: Tensor, quantise: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    if name in _INTEGERS:
        return {name: tensor.to(_INTEGERS[name]).contiguous()}
    if not quantise or tensor.dim() < 2:
        return {name: tensor.to(dtype).contiguous().clone()}
    values, scale = quantised(tensor)
    return {name + QUANTISED: values, name + SCALE: scale}


def quantised(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values [rows, columns] and float32 scale [rows]; the error is at most scale / 2."""
    tensor = tensor.float()
    scale = tensor.abs().amax(1).clamp_min(1e-12) / 127
    return torch.round(tensor / scale[:, None]).to(torch.int8).contiguous(), scale


def dequantised(tensors: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """The tensors with every pair of .q8 and .scale put together as float32; values checked."""
    check_values(tensors, origin)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(QUANTISED)
        if name.endswith(SCALE) and name.removesuffix(SCALE) + QUANTISED in tensors:
            continue
        if stem == name:
            out[name] = tensor
            continue
        if stem + SCALE not in tensors:
            raise ConfigError(f"{origin}: tensor {name!r} has no {stem + SCALE!r}")
        if stem in tensors:
            raise ConfigError(f"{origin}: tensor {stem!r} is there twice, in 8 bits and plain")
        scale = tensors[stem + SCALE].float()
        if tensor.dim() != 2 or tuple(scale.shape) != tuple(tensor.shape[:1]):
            raise ConfigError(
                f"{origin}: tensor {name!r} {list(tensor.shape)} does not go with"
                f" {stem + SCALE!r} {list(scale.shape)}"
            )
        out[stem] = tensor.float() * scale[:, None]
        _check_finite(stem, out[stem], origin)
    return out


def _replace(file: Path, data: bytes) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, file)


def fingerprint(config: msgspec.Struct, weights: Mapping[str, Tensor]) -> str:
    """Hash of everything a draft row is a function of: config and every tensor's bytes."""
    fields = sorted(msgspec.to_builtins(config).items())
    digest = hashlib.sha256(repr(fields).encode())
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_ranking(weights: Mapping[str, Tensor], full: int, origin: str) -> None:
    """Raise ConfigError unless the ranking, if there is one, lists ids below `full`, each once."""
    if RANKING not in weights:
        return
    for other in ("d2t", "lm_head.weight"):
        if other in weights:
            raise ConfigError(f"{origin}: tensors {RANKING!r} and {other!r} exclude each other")
    ids = weights[RANKING].long()
    if ids.dim() != 1 or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= full:
        raise ConfigError(f"{origin}: {RANKING!r} must list target ids in 0..{full - 1}")
    if ids.unique().numel() != ids.numel():
        raise ConfigError(f"{origin}: {RANKING!r} lists a target id twice")
