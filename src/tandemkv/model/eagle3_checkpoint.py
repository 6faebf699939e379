"""EAGLE-3 checkpoints: every published layout in, one set of names out; and our own writer.

Law: a checkpoint is read whole or refused by name: a missing, unknown or misshapen tensor, a
reduced vocabulary without its map, an offset out of range. Nothing is unpickled. This module does
not run the drafter and knows no target.

    layout        files                              layer prefix   captures
    SafeAILab     config.json, pytorch_model.bin     midlayer.      eagle_config, else the default
    SpecForge     config.json, *.safetensors         midlayer.      eagle_config
    vLLM          config.json, *.safetensors         layers.0.      top level, "input-of"
    speculators   config.json, *.safetensors         layers.0.      top level, "input-of"
    ours          config.json, model.safetensors     midlayer.      eagle_config; int8 rows optional

Quantised tensors: NAME.q8 int8 [rows, columns] and NAME.scale [rows]; value = q8 * scale.
draft_vocab [n]: target ids, most frequent first, of which a drafter without a head of its own may
draft over the first k, through those rows of the target's head (k is the operator's choice).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tandemkv.base.errors import ConfigError
from tandemkv.model.eagle3_config import Eagle3Config, parse_config, to_dict

MID = "midlayer."
QUANTISED = ".q8"
SCALE = ".scale"
RANKING = "draft_vocab"
DROPPED = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that some layouts carry and no drafter reads."""


def read(directory: str | os.PathLike[str]) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """Config and tensors of a checkpoint directory, under the names of `expected_shapes`.

    d2t comes as int64 offsets whichever map the files hold; t2d is checked against it and dropped.
    Raises ConfigError, naming the file, tensor or option at fault.
    """
    path = Path(directory)
    config = parse_config(_read_config(path), str(path))
    weights = normalise(_read_tensors(path), str(path))
    check_tensors(config, weights, str(path))
    return config, weights


def save(
    directory: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    config: Eagle3Config,
    *,
    quantise: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write our own layout: config.json and model.safetensors, each replaced atomically.

    weights: as `expected_shapes` names them. quantise: matrices as int8 with one scale per row,
    else everything in dtype. extra: entries for config.json under "training" (a record, not read).
    """
    from safetensors.torch import save as serialised

    path = Path(directory)
    weights = normalise(weights, str(path))
    check_tensors(config, weights, str(path))
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        stored.update(_stored(name, tensor.detach().cpu(), quantise, dtype))
    record = to_dict(config) | {"quantisation": "int8" if quantise else None}
    record["has_own_embed_tokens"] = "embed_tokens.weight" in weights
    if extra:
        record["training"] = dict(extra)
    text, data = json.dumps(record, indent=2) + "\n", serialised(stored, {"format": "pt"})
    path.mkdir(parents=True, exist_ok=True)
    _replace(path / "model.safetensors", data)
    _replace(path / "config.json", text.encode())
    return path


def expected_shapes(config: Eagle3Config, num_taps: int) -> dict[str, tuple[int, ...]]:
    """Tensors that this config must come with, and their shapes."""
    d, head, inter = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    captured = num_taps * config.captured_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, captured),
        f"{MID}input_layernorm.weight": (d,),
        f"{MID}hidden_norm.weight": (d,),
        f"{MID}post_attention_layernorm.weight": (d,),
        f"{MID}self_attn.q_proj.weight": (q, 2 * d),
        f"{MID}self_attn.k_proj.weight": (kv, 2 * d),
        f"{MID}self_attn.v_proj.weight": (kv, 2 * d),
        f"{MID}self_attn.o_proj.weight": (d, q),
        f"{MID}mlp.gate_proj.weight": (inter, d),
        f"{MID}mlp.up_proj.weight": (inter, d),
        f"{MID}mlp.down_proj.weight": (d, inter),
        "norm.weight": (d,),
    }
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.captured_size,) for i in range(num_taps)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (captured,)
    return shapes


def optional_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Tensors that a checkpoint may bring; what it does not bring is the target's, or absent."""
    return {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
        "d2t": (config.draft_vocab_size,),
        f"{MID}self_attn.q_norm.weight": (config.head_dim,),
        f"{MID}self_attn.k_norm.weight": (config.head_dim,),
    }


def check_tensors(config: Eagle3Config, weights: Mapping[str, Tensor], origin: str) -> None:
    """Raise ConfigError unless the tensors are exactly what the config calls for."""
    required = expected_shapes(config, num_taps(config, weights, origin))
    known = required | optional_shapes(config)
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
    names = [f"{MID}self_attn.{x}_norm.weight" in weights for x in "qk"]
    if names[0] != names[1]:
        raise ConfigError(f"{origin}: has one of q_norm and k_norm without the other")
    _check_vocabulary(config, weights, origin)


def num_taps(config: Eagle3Config, weights: Mapping[str, Tensor], origin: str) -> int:
    """How many captures fc reads; refused where it disagrees with the layers that are named."""
    if "fc.weight" not in weights:
        raise ConfigError(f"{origin}: tensor 'fc.weight' is missing")
    width, one = weights["fc.weight"].shape[1], config.captured_size
    if width % one:
        raise ConfigError(
            f"{origin}: fc.weight reads {width} values, not a multiple of hidden size {one}"
        )
    if config.taps is not None and len(config.taps) != width // one:
        raise ConfigError(
            f"{origin}: {len(config.taps)} captured layers {list(config.taps)} are named, fc.weight"
            f" reads {width // one}"
        )
    return width // one


def draft_ids(d2t: Tensor) -> Tensor:
    """Target ids of the draft vocabulary [V_draft]: j + d2t[j] (d2t holds offsets)."""
    return torch.arange(d2t.shape[0]) + d2t.long().cpu()


def offsets(used: Tensor | Sequence[int]) -> Tensor:
    """d2t of a sorted list of used target ids; the inverse of `draft_ids`."""
    ids = torch.as_tensor(used, dtype=torch.long)
    return ids - torch.arange(ids.shape[0])


def fingerprint(config: Eagle3Config, weights: Mapping[str, Tensor]) -> str:
    """Hash of everything a draft row is a function of: config and every tensor's bytes."""
    fields = sorted(msgspec.to_builtins(config).items())
    digest = hashlib.sha256(repr(fields).encode())
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def normalise(tensors: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Any layout's tensors under our names, dequantised, the vocabulary map as d2t."""
    out: dict[str, Tensor] = {}
    for raw, tensor in _dequantised(tensors, origin).items():
        name = _rename(raw)
        if name.endswith(DROPPED):
            continue
        if name in ("fc_norm", "fc_norm.weight") and tensor.dim() == 2:
            out |= {f"fc_norm.{i}.weight": row for i, row in enumerate(tensor)}
        elif name in out:
            raise ConfigError(f"{origin}: tensor {name!r} appears twice")
        else:
            out[name] = tensor
    _fold_t2d(out, origin)
    return out


def _rename(name: str) -> str:
    name = name.removeprefix("model.")
    name = re.sub(r"^layers\.0\.", MID, name)
    name = re.sub(r"^fc_norms\.", "fc_norm.", name)
    return {"draft_id_to_target_id": "d2t"}.get(name, name)


def _fold_t2d(tensors: dict[str, Tensor], origin: str) -> None:
    """Replace t2d by the d2t it implies, or check the one against the other."""
    t2d = tensors.pop("t2d", None)
    if t2d is None:
        return
    used = torch.nonzero(t2d.bool()).flatten()
    if "d2t" not in tensors:
        tensors["d2t"] = offsets(used)
        return
    ids = draft_ids(tensors["d2t"])
    if not torch.equal(ids.sort().values, used):
        raise ConfigError(
            f"{origin}: d2t maps {ids.numel()} draft ids, t2d marks {used.numel()} target ids, and"
            " they are not the same ids"
        )


def _check_vocabulary(config: Eagle3Config, weights: Mapping[str, Tensor], origin: str) -> None:
    small, full = config.draft_vocab_size, config.vocab_size
    _check_ranking(weights, full, origin)
    if "d2t" not in weights:
        if small != full:
            raise ConfigError(
                f"{origin}: draft vocabulary {small} of target vocabulary {full} without a map"
                " (d2t or t2d)"
            )
        return
    ids = draft_ids(weights["d2t"])
    outside = ids[(ids < 0) | (ids >= full)]
    if outside.numel():
        raise ConfigError(
            f"{origin}: d2t leads to target id {int(outside[0])}, outside the vocabulary of {full}"
        )
    if ids.unique().numel() != small:
        raise ConfigError(f"{origin}: d2t leads two draft ids to the same target id")


def _check_ranking(weights: Mapping[str, Tensor], full: int, origin: str) -> None:
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


def _read_config(path: Path) -> dict[str, Any]:
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


def _read_tensors(path: Path) -> dict[str, Tensor]:
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
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ConfigError(f"{file}: refused, holds more than tensors")
    return tensors


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _stored(name: str, tensor: Tensor, quantise: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    if name == "d2t":
        return {name: tensor.long().contiguous()}
    if name == RANKING:
        return {name: tensor.int().contiguous()}
    if not quantise or tensor.dim() < 2:
        return {name: tensor.to(dtype).contiguous().clone()}
    values, scale = quantised(tensor)
    return {name + QUANTISED: values, name + SCALE: scale}


def quantised(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values [rows, columns] and float32 scale [rows]; the error is at most scale / 2."""
    tensor = tensor.float()
    scale = tensor.abs().amax(1).clamp_min(1e-12) / 127
    return torch.round(tensor / scale[:, None]).to(torch.int8).contiguous(), scale


def _dequantised(tensors: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
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
        out[stem] = tensor.float() * tensors[stem + SCALE].float()[:, None]
    return out


def _replace(file: Path, data: bytes) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, file)
