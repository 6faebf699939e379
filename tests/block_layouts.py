"""DFlash and DSpark checkpoints as others publish them: their config.json, and files on disk.

The drafters are those of `drafting.block_config` with a token as the mask; this module reads none.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from drafting import block_config, block_weights
from safetensors.torch import save_file

from tandemkv.model.dflash_config import DFlashConfig

FULL, SLIDING = "full_attention", "sliding_attention"
BIAS = "confidence_head.proj.bias"


def trunk(config: DFlashConfig, **changes) -> dict:
    """What all published layouts say at the top level, of attention and its window too."""
    window = next((w for w in config.windows if w), None)
    rope = config.rope_parameters
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": [FULL if w is None else SLIDING for w in config.windows],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": config.num_layers,
        "num_target_layers": config.num_target_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": [2, 3],
        "tie_word_embeddings": False,
        "transformers_version": "4.57.3",
        "use_cache": True,
        **changes,
    }


def dflash() -> tuple[DFlashConfig, dict]:
    """(config, weights): a sliding and a full layer, a token as the mask."""
    config = block_config(
        "dflash", mask_token_id=9, windows=(6, None), causal=(True, False), num_target_layers=6
    )
    return config, block_weights(config)


def dspark() -> tuple[DFlashConfig, dict]:
    """(config, weights): full attention, a Markov and a confidence head, a token as the mask."""
    config = block_config("dspark", mask_token_id=9, windows=(None, None), num_target_layers=6)
    return config, block_weights(config, BIAS)


def heads(config: DFlashConfig) -> dict:
    """DSpark's options of its two heads."""
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def old_dflash() -> dict:
    """The first layout of z-lab: block_size and rope_theta at the top."""
    return trunk(
        dflash()[0],
        architectures=["DFlashDraftModel"],
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        block_size=5,
        dflash_config={"mask_token_id": 9, "target_layer_ids": [0, 2, 4]},
    )


def specforge(**changes) -> dict:
    """SpecForge's DSpark, its own options in dflash_config; changes go there."""
    config, _ = dspark()
    inner = {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "mask_token_id": 9,
        "target_layer_ids": [0, 2, 4],
        "confidence_head_alpha": 1.0,
        **heads(config),
        **changes,
    }
    return trunk(config, architectures=["DSparkDraftModel"], block_size=4, dflash_config=inner)


def deepspec(**changes) -> dict:
    """DeepSpec's DSpark: all at the top level."""
    config, _ = dspark()
    flat = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 4,
        "mask_token_id": 9,
        "target_layer_ids": [0, 2, 4],
        "num_anchors": 512,
        "_attn_implementation": "flex_attention",
        **heads(config),
    }
    return trunk(config, **{**flat, **changes})


def without(record: dict, *names: str) -> dict:
    return {name: value for name, value in record.items() if name not in names}


def write(path: Path, config: dict, tensors: dict, *, pickled: bool = False) -> Path:
    """A checkpoint directory: config.json and the tensors, in safetensors or the older file."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = {k: v.contiguous().clone() for k, v in tensors.items()}
    if pickled:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors")
    return path
