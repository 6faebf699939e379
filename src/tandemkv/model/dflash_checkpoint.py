"""DFlash and DSpark checkpoints: published layouts in, one set of names out; and our own writer.

Law: a checkpoint is read whole or refused by name; nothing is unpickled. Names are those of the
published files. Embedding and head are the target's unless the files bring copies. This module does
not run the drafter and knows no target.

    fc, hidden_norm, norm, layers.I.*        the trunk (Qwen3 layers with q and k norms)
    mask_embedding                           the mask's vector, where no token stands for it
    fc_norm.J                                ours: one norm per capture before fc
    markov_head.*, confidence_head.proj      DSpark's heads; DeepSpec and SpecForge
    markov_w1, markov_w2, confidence_proj    the same, by ModelOpt's names
    draft_vocab                              ours: ranked target ids (see draft_checkpoint)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tandemkv.base.errors import ConfigError
from tandemkv.model.dflash_config import DFlashConfig, parse_config, says, to_dict
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

_PREFIXES = ("model.", "draft_model.", "logit_head.")
_DROPPED = ("rotary_emb.inv_freq",)
_RENAMED = {
    "mask_embedding": "mask_embedding.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "confidence_proj.weight": "confidence_head.proj.weight",
    "confidence_proj.bias": "confidence_head.proj.bias",
}
_SIDE_FILE = "mask_embedding.pt"


def read(directory: str | os.PathLike[str]) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """Config and tensors of a checkpoint directory, under the names of `expected_shapes`.

    Raises ConfigError, naming the file, tensor or option at fault.
    """
    path = Path(directory)
    record = read_config(path)
    config = parse_config(record, str(path))
    if (path / _SIDE_FILE).exists():
        raise ConfigError(
            f"{path / _SIDE_FILE}: a mask vector beside the weights is not supported; store it as"
            " tensor 'mask_embedding.weight' and leave mask_token_id out of config.json"
        )
    weights = normalise(read_tensors(path), str(path))
    if config.confidence and not says(record, "confidence_head_with_markov"):
        config = _as_wide_as(weights.get("confidence_head.proj.weight"), config)
    check_tensors(config, weights, str(path))
    return config, weights


def _as_wide_as(head: Tensor | None, config: DFlashConfig) -> DFlashConfig:
    """Whether the confidence head reads the Markov embedding; trainers' defaults differ."""
    alone = head is not None and tuple(head.shape) == (1, config.hidden_size)
    with_markov = config.markov_rank > 0 and not alone
    return msgspec.structs.replace(config, confidence_with_markov=with_markov)


def save(
    directory: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    config: DFlashConfig,
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
    record = to_dict(config)
    parse_config(record, str(path))  # what could not be read back is not written
    if extra:
        record["training"] = dict(extra)
    return write(path, weights, record, quantise=quantise, dtype=dtype)


def expected_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that this config must come with, and their shapes."""
    d, inter, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, len(config.taps) * config.captured_size),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (d,),
            f"{layer}post_attention_layernorm.weight": (d,),
            f"{layer}self_attn.q_proj.weight": (q, d),
            f"{layer}self_attn.k_proj.weight": (kv, d),
            f"{layer}self_attn.v_proj.weight": (kv, d),
            f"{layer}self_attn.o_proj.weight": (d, q),
            f"{layer}self_attn.q_norm.weight": (head,),
            f"{layer}self_attn.k_norm.weight": (head,),
            f"{layer}mlp.gate_proj.weight": (inter, d),
            f"{layer}mlp.up_proj.weight": (inter, d),
            f"{layer}mlp.down_proj.weight": (d, inter),
        }
    if config.mask_token_id is None:
        shapes["mask_embedding.weight"] = (d,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.captured_size,) for i in range(len(config.taps))}
    return shapes | _head_shapes(config)


def _head_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    d, r, shapes = config.hidden_size, config.markov_rank, {}
    if r:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, r)
        shapes["markov_head.markov_w2.weight"] = (config.vocab_size, r)
        if config.markov_head_type == "gated":
            shapes["markov_head.gate_proj.weight"] = (r, d + r)
        elif config.markov_head_type == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + d)
    if config.confidence:
        shapes["confidence_head.proj.weight"] = (1, d + (r if config.confidence_with_markov else 0))
    return shapes


def optional_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that a checkpoint may bring: copies of the target's, the confidence head's bias."""
    full = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": full, "lm_head.weight": full}
    if config.confidence:
        shapes["confidence_head.proj.bias"] = (1,)
    if config.markov_head_type == "gated":
        shapes["markov_head.gate_proj.bias"] = (config.markov_rank,)
    if config.markov_head_type == "rnn":
        shapes["markov_head.joint_proj.bias"] = (3 * config.markov_rank,)
    return shapes


def check_tensors(config: DFlashConfig, weights: Mapping[str, Tensor], origin: str) -> None:
    """Raise ConfigError unless the tensors are exactly what the config calls for."""
    check_shapes(weights, expected_shapes(config), optional_shapes(config), origin)
    check_ranking(weights, config.vocab_size, origin)


def normalise(tensors: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Any layout's tensors under our names, dequantised."""
    out: dict[str, Tensor] = {}
    for raw, tensor in dequantised(tensors, origin).items():
        name = raw
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name.endswith(_DROPPED):
            continue
        if name in ("fc_norm", "fc_norm.weight") and tensor.dim() == 2:
            out |= {f"fc_norm.{i}.weight": row for i, row in enumerate(tensor)}
            continue
        name = _RENAMED.get(name, name)
        if name in out:
            raise ConfigError(f"{origin}: tensor {name!r} appears twice")
        out[name] = tensor.reshape(-1) if name == "mask_embedding.weight" else tensor
    return out
