"""Options of block drafters: one flat dictionary from the places layouts put them in, unknowns out.

Law: an option that is said in two places says the same in both; an option that would change the
maths and is not honoured is refused by its name. Values are checked, never coerced. This module
knows the names of options and not what they mean.
"""

from __future__ import annotations

import sys
from typing import Any

from tandemkv.base.errors import ConfigError

NESTED = ("dflash_config", "dspark_config")
ALIASES = {
    "causal": "is_causal",
    "sample_from_anchor": "shift_label",
    "use_confidence_head": "enable_confidence_head",
}
"""Other names of an option, by which some layouts or servers write it."""

HONOURED = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings",
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "use_swa",
    "swa_window_size", "is_causal", "block_size", "training_block_size", "mask_token_id",
    "target_layer_ids", "eagle_aux_hidden_state_layer_ids", "num_target_layers",
    "target_hidden_size", "projector_type", "shift_label", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_alpha", "confidence_head_with_markov", "fc_norm",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
}  # fmt: skip

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "attention_mode": ("gqa", "mha"),
    "attention_modes": ("gqa", "mha"),
    "dspark_backbone_conv_enabled": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
    "logit_scale": (1, 1.0),
    "quantization_config": (),
    "tandemkv_format": (1,),
}
"""Options that would change the maths, and the values for which they do not."""

IGNORED = {
    "_name_or_path", "name_or_path", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp",
    "attention_dropout", "auto_map", "tie_word_embeddings", "return_dict", "is_encoder_decoder",
    "is_decoder", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    "output_attentions", "output_hidden_states", "torchscript", "use_bfloat16", "cross_attention",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "num_anchors",
    "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "mask_token", "target_model_type",
    "target_text_model_type", "target_model_name_or_path", "quantisation", "training",
}  # fmt: skip
"""Options that say nothing about the maths of inference."""


def flattened(config: dict[str, Any], origin: str) -> dict[str, Any]:
    """All places of a config.json as one; None says nothing.

    Raises ConfigError where two places say the same option differently.
    """
    out: dict[str, Any] = {}
    places: dict[str, str] = {}
    for place in (None, *NESTED):
        scope = config if place is None else config.get(place) or {}
        if not isinstance(scope, dict):
            raise ConfigError(f"{origin}: {place} must be an object, got {scope!r}")
        for written, value in scope.items():
            name = ALIASES.get(written, written)
            if written in NESTED or value is None:
                continue
            where = f"{place}.{written}" if place else written
            if name in out and out[name] != value and name not in IGNORED:
                raise ConfigError(
                    f"{origin}: {places[name]} is {out[name]!r}, and {where} is {value!r}"
                )
            out[name], places[name] = value, where
    return out


def refuse_unknown(config: dict[str, Any], origin: str) -> None:
    """Raise ConfigError for an option that nothing honours and that is not switched off."""
    for name, value in config.items():
        if name in NEUTRAL:
            values = value if isinstance(value, list) else [value]
            if not values or any(v not in NEUTRAL[name] for v in values):
                raise ConfigError(f"{origin}: option {name!r} = {value!r} is not supported")
        elif name not in HONOURED and name not in IGNORED and value:
            raise ConfigError(f"{origin}: unknown option {name!r} = {value!r}")


def whole(
    config: dict[str, Any], name: str, origin: str, default: int | None = None, least: int = 1
) -> int:
    """An integer option of at least `least`. Raises ConfigError; without a default, if it lacks."""
    value = config.get(name, default)
    if value is None:
        raise ConfigError(f"{origin}: config.json lacks {name!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{origin}: {name} must be an integer from {least}, got {value!r}")
    return value


def number(config: dict[str, Any], name: str, origin: str, default: float) -> float:
    """An option that is a finite number of at least 0."""
    value = config.get(name, default)
    fits = not isinstance(value, bool) and isinstance(value, int | float)
    if not fits or not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"{origin}: {name} must be a finite number from 0, got {value!r}")
    return float(value)


def flag(config: dict[str, Any], name: str, origin: str) -> bool | None:
    """An option that is true or false; None where it is not said."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{origin}: {name} must be true or false, got {value!r}")
    return value


def layer_ids(config: dict[str, Any], name: str, first: int, origin: str) -> tuple[int, ...] | None:
    """An option that lists layers, each from `first`; None where it is not said."""
    ids = config.get(name)
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < first for i in ids):
        raise ConfigError(f"{origin}: {name} must list layers from {first}, got {ids!r}")
    return tuple(ids)
