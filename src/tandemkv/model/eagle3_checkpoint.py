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
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandemkv.base.errors import ConfigError
from tandemkv.model.draft_checkpoint import (
    RANKING as RANKING,
)
from tandemkv.model.draft_checkpoint import (
    check_ranking,
    check_shapes,
    dequantised,
    read_config,
    read_tensors,
    write,
)
from tandemkv.model.eagle3_config import Eagle3Config, parse_config, to_dict

MID = "midlayer."
DROPPED = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that some layouts carry and no drafter reads."""


def read(directory: str | os.PathLike[str]) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """Config and tensors of a checkpoint directory, under the names of `expected_shapes`.

    d2t comes as int64 offsets whichever map the files hold; t2d is checked against it and dropped.
    Raises ConfigError, naming the file, tensor or option at fault.
    """
    path = Path(directory)
    config = parse_config(read_config(path), str(path))
    weights = normalise(read_tensors(path), str(path))
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
    path = Path(directory)
    weights = normalise(weights, str(path))
    check_tensors(config, weights, str(path))
    record = to_dict(config) | {"has_own_embed_tokens": "embed_tokens.weight" in weights}
    if extra:
        record["training"] = dict(extra)
    return write(path, weights, record, quantise=quantise, dtype=dtype)


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
    check_shapes(weights, required, optional_shapes(config), origin)
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


def normalise(tensors: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Any layout's tensors under our names, dequantised, the vocabulary map as d2t."""
    out: dict[str, Tensor] = {}
    for raw, tensor in dequantised(tensors, origin).items():
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
    check_ranking(weights, full, origin)
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
