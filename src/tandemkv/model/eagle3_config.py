"""What an EAGLE-3 checkpoint says about its maths, whichever of the published layouts it uses.

Law: every option that changes the maths is either honoured or refused by its name; captured layers
are kept as "output-of" ids, and each layout's own convention is translated here, once. This module
reads config dictionaries only; it opens no tensor.

    layout                      key                                            convention
    SafeAILab, SpecForge, ours  eagle_config.eagle_aux_hidden_state_layer_ids  output of layer i
    vLLM, speculators           eagle_aux_hidden_state_layer_ids (top level)   input of layer i
    none given, three captures  -                                        outputs of 1, N//2-1, N-4
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandemkv.base.errors import ConfigError
from tandemkv.model.rotary import DEFAULT_ROPE, head_size, parse_rope


class Eagle3Config(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry and options of one EAGLE-3 drafter; names as in Hugging Face configs.

    taps: target layers whose output is captured (-1: the embedding), None where the checkpoint
    leaves the published default. fc_norm: one RMSNorm per capture before fc; norm_before_fc: one
    over their concatenation. norm_output: the state fed back is the normalised one.
    norm_before_residual: the residual is the normalised g. rope_parameters: as in transformers 5.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = msgspec.field(default_factory=lambda: dict(DEFAULT_ROPE))
    max_position_embeddings: int = 2048
    target_hidden_size: int | None = None
    taps: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    @property
    def captured_size(self) -> int:
        """Width of one captured hidden state."""
        return self.target_hidden_size or self.hidden_size


HONOURED = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings",
    "target_hidden_size", "fc_norm", "norm_before_fc", "norm_output", "norm_before_residual",
    "eagle_config", "eagle_aux_hidden_state_layer_ids", "transformer_layer_config",
    "num_aux_hidden_states", "num_capture_layers",
}  # fmt: skip

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "hidden_act": ("silu", "swish"),
    "logit_scale": (1, 1.0),
    "partial_rotary_factor": (1, 1.0),
    "is_causal": (True,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "parallel_draft_step": (1,),
    "has_own_embed_tokens": (True, False),
    "layer_types": (["full_attention"],),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
}
"""Options that would change the maths, and the values for which they do not."""

IGNORED = {
    "_name_or_path", "name_or_path", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "initializer_range", "pretraining_tp", "attention_dropout", "hidden_dropout", "auto_map",
    "speculators_model_type", "speculators_config", "speculators_version", "embed_requires_grad",
    "enable_sp_ulysses", "has_no_defaults_at_init", "tie_word_embeddings", "return_dict",
    "is_encoder_decoder", "is_decoder", "chunk_size_feed_forward", "id2label", "label2id",
    "problem_type", "output_attentions", "output_hidden_states", "torchscript", "use_bfloat16",
    "max_window_layers", "num_target_layers", "target_model_type", "tandemkv_format",
    "quantisation", "unit", "training", "modules", "ttt_length", "length",
    "base_model_name_or_path", "target_model_name_or_path",
}  # fmt: skip
"""Options that say nothing about the maths of inference."""


def parse_config(config: dict[str, Any], origin: str) -> Eagle3Config:
    """Read a config.json of any supported layout.

    origin names the checkpoint in errors. Raises ConfigError for a missing or unknown option.
    """
    speculators = "speculators_model_type" in config
    if speculators:
        config = _flatten_speculators(config, origin)
    eagle = config.get("eagle_config") or {}
    for scope in (config, {k: v for k, v in eagle.items() if not k.endswith("layer_ids")}):
        _refuse_unknown(scope, origin)
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise ConfigError(f"{origin}: option 'sliding_window' is not supported for EAGLE-3")
    _need(config, ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"), origin)
    if config.get("fc_norm") and config.get("norm_before_fc"):
        raise ConfigError(f"{origin}: fc_norm and norm_before_fc exclude each other")
    heads = int(config["num_attention_heads"])
    rope, max_positions = parse_rope(config)
    return Eagle3Config(
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_size(config),
        vocab_size=int(config["vocab_size"]),
        draft_vocab_size=int(config.get("draft_vocab_size") or config["vocab_size"]),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_parameters=rope,
        max_position_embeddings=max_positions,
        target_hidden_size=config.get("target_hidden_size"),
        taps=_taps(config, eagle, origin),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        norm_output=bool(config.get("norm_output", False)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
    )


def to_dict(config: Eagle3Config) -> dict[str, Any]:
    """The config.json of our own layout, readable by engines that read SpecForge's.

    Raises ConfigError if the captured layers are left open: off by one costs acceptance silently.
    """
    if config.taps is None:
        raise ConfigError("an EAGLE-3 checkpoint is written with its captured layers named")
    fields = msgspec.to_builtins(config)
    taps = fields.pop("taps")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "tandemkv_format": 1,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        **{name: value for name, value in fields.items() if value is not None},
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(taps),
        },
    }


def default_taps(num_layers: int, origin: str) -> tuple[int, ...]:
    """The published default: the inputs of layers 2, N//2 and N-3, as output-of ids."""
    taps = (1, num_layers // 2 - 1, num_layers - 4)
    if not -1 <= taps[0] < taps[1] < taps[2]:
        raise ConfigError(
            f"{origin}: names no captured layers, and the default {list(taps)} does not fit a"
            f" target of {num_layers} layers"
        )
    return taps


def _flatten_speculators(config: dict[str, Any], origin: str) -> dict[str, Any]:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise ConfigError(f"{origin}: speculators_model_type is {kind!r}, expected 'eagle3'")
    _need(config, ("transformer_layer_config", "norm_before_residual"), origin)
    outer = {k: v for k, v in config.items() if k != "transformer_layer_config"}
    inner = _with_model_defaults(config["transformer_layer_config"], origin)
    return {**inner, **{k: v for k, v in outer.items() if v is not None}}


def _with_model_defaults(layer: dict[str, Any], origin: str) -> dict[str, Any]:
    """speculators writes only what differs from the model type's defaults; put those back."""
    from transformers import AutoConfig

    model_type = layer.get("model_type", "llama")
    if model_type not in ("llama", "qwen3"):
        raise ConfigError(f"{origin}: transformer_layer_config.model_type {model_type!r} unknown")
    kwargs = {k: v for k, v in layer.items() if k != "model_type"}
    full = AutoConfig.for_model(model_type, **kwargs)
    defaults = full.to_dict()
    keep = {k: v for k, v in defaults.items() if k in HONOURED or k in NEUTRAL}
    return {**keep, **layer, "rope_parameters": defaults["rope_parameters"], "rope_scaling": None}


def _refuse_unknown(config: dict[str, Any], origin: str) -> None:
    for name, value in config.items():
        if name in NEUTRAL:
            if value is not None and value not in NEUTRAL[name]:
                raise ConfigError(
                    f"{origin}: option {name!r} is {value!r}, EAGLE-3 here supports only"
                    f" {NEUTRAL[name][0]!r}"
                )
        elif name not in HONOURED and name not in IGNORED and name != "sliding_window" and value:
            raise ConfigError(f"{origin}: unknown option {name!r} = {value!r}")


def _need(config: dict[str, Any], names: tuple[str, ...], origin: str) -> None:
    for name in names:
        if config.get(name) is None:
            raise ConfigError(f"{origin}: config.json lacks {name!r}")


def _taps(config: dict[str, Any], eagle: dict[str, Any], origin: str) -> tuple[int, ...] | None:
    output_of = eagle.get("eagle_aux_hidden_state_layer_ids")
    input_of = config.get("eagle_aux_hidden_state_layer_ids")
    if output_of and input_of and [i + 1 for i in output_of] != list(input_of):
        raise ConfigError(
            f"{origin}: eagle_config names outputs of layers {output_of}, the top level inputs of"
            f" layers {input_of}: they are not the same layers"
        )
    if output_of:
        return tuple(int(i) for i in output_of)
    if input_of:
        return tuple(int(i) - 1 for i in input_of)
    return None
