"""What a DFlash or DSpark checkpoint says about its maths, in whichever published layout.

Law: every option that changes the maths is honoured or refused by its name; captured layers are
"output-of" ids (-1: the embedding), as in all published block drafters; K is kept, never the
ambiguous block size. This module reads config dictionaries only; it opens no tensor.

    layout            fields                        block_size   layers may be
    z-lab DFlash      dflash_config and top level   K + 1        full or sliding
    SpecForge DSpark  dflash_config, projector_type K            full or sliding (use_swa)
    DeepSpec DSpark   top level                     K            full
    ours              top level                     as above     full or sliding

Sources: DFlash, arXiv 2602.06036, and its authors' package dflash 0.1.0; DSpark, arXiv 2607.05147.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandemkv.base.errors import ConfigError
from tandemkv.model.rotary import DEFAULT_ROPE, head_size, parse_rope

METHODS = ("dflash", "dspark")
MARKOV_TYPES = ("vanilla", "gated", "rnn")


class DFlashConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry and options of one block drafter; names as in Hugging Face configs where they exist.

    method: dflash (row j >= 1 of the draft block predicts its own position, K + 1 rows) or dspark
    (row j >= 0 predicts the next position, K rows). num_draft_tokens: K. taps: captured layers.
    windows: per draft layer, W or None. causal: per draft layer, whether a row of the draft block
    is kept from later ones; empty: none is. mask_token_id None: the checkpoint brings a vector of
    its own. fc_norm: one RMSNorm per capture before fc. markov_rank 0: no Markov head.
    """

    method: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_draft_tokens: int
    taps: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...] = ()
    mask_token_id: int | None = None
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = msgspec.field(default_factory=lambda: dict(DEFAULT_ROPE))
    max_position_embeddings: int = 2048
    target_hidden_size: int | None = None
    fc_norm: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = True

    @property
    def num_rows(self) -> int:
        """Rows of a draft block."""
        return self.num_draft_tokens + (self.method == "dflash")

    @property
    def captured_size(self) -> int:
        """Width of one captured hidden state."""
        return self.target_hidden_size or self.hidden_size

    def is_causal(self, layer: int) -> bool:
        """Whether rows of the draft block are kept from later ones in this draft layer."""
        return bool(self.causal) and self.causal[layer]


ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
}

HONOURED = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers", "use_swa", "swa_window_size",
    "is_causal", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers",
    "target_hidden_size", "projector_type", "shift_label", "sample_from_anchor", "markov_rank",
    "markov_head_type", "enable_confidence_head", "use_confidence_head",
    "confidence_head_with_markov", "fc_norm", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping", "dflash_config", "tandemkv_format",
}  # fmt: skip

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "attention_mode": ("gqa", "mha"),
    "dspark_backbone_conv_enabled": (False,),
    "is_neox_style": (True,),
    "quantization_config": (),
}
"""Options that would change the maths, and the values for which they do not."""

IGNORED = {
    "_name_or_path", "name_or_path", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp",
    "attention_dropout", "auto_map", "tie_word_embeddings", "return_dict", "is_encoder_decoder",
    "is_decoder", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    "output_attentions", "output_hidden_states", "torchscript", "use_bfloat16", "cross_attention",
    "num_anchors", "training_block_size", "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha",
    "confidence_head_alpha", "target_model_type", "target_model_name_or_path", "quantisation",
    "training",
}  # fmt: skip
"""Options that say nothing about the maths of inference."""


def parse_config(config: dict[str, Any], origin: str) -> DFlashConfig:
    """Read a config.json of any supported layout.

    origin names the checkpoint in errors. Raises ConfigError for a missing or unknown option, for
    one that is said twice and differently, and where a sliding layer has no window.
    """
    if "speculators_model_type" in config:
        raise ConfigError(
            f"{origin}: the speculators layout of {config['speculators_model_type']!r} is not"
            " supported for block drafters; convert it to the layout of its authors"
        )
    config = _flattened(config, origin)
    _refuse_unknown(config, origin)
    _need(
        config,
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "vocab_size", "block_size"),
        origin,
    )  # fmt: skip
    method = _method(config, origin)
    heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
    rope, max_positions = parse_rope(config)
    windows = _windows(config, layers, origin)
    num_drafts = int(config["block_size"]) - (method == "dflash")
    if num_drafts < 1:
        raise ConfigError(f"{origin}: block_size {config['block_size']} leaves nothing to draft")
    markov = str(config.get("markov_head_type") or "vanilla")
    rank = int(config.get("markov_rank") or 0)
    if rank and markov not in MARKOV_TYPES:
        raise ConfigError(
            f"{origin}: markov_head_type {markov!r} is not one of {', '.join(MARKOV_TYPES)}"
        )
    return DFlashConfig(
        method=method,
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_size(config),
        vocab_size=int(config["vocab_size"]),
        num_draft_tokens=num_drafts,
        taps=_taps(config, layers, origin),
        windows=windows,
        causal=_causal(config, windows, method),
        mask_token_id=config.get("mask_token_id"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_parameters=rope,
        max_position_embeddings=max_positions,
        target_hidden_size=config.get("target_hidden_size"),
        fc_norm=bool(config.get("fc_norm", False)),
        embedding_scale=float(config.get("input_embedding_scale") or 1.0),
        logit_scale=float(config.get("output_multiplier") or 1.0),
        logit_softcap=config.get("final_logit_softcapping") or None,
        markov_rank=rank,
        markov_head_type=markov,
        confidence=bool(
            config.get("enable_confidence_head") or config.get("use_confidence_head") or False
        ),
        confidence_with_markov=bool(rank) and bool(config.get("confidence_head_with_markov", True)),
    )


def to_dict(config: DFlashConfig) -> dict[str, Any]:
    """The config.json of our own layout; `parse_config` reads it back."""
    sliding = next((w for w in config.windows if w is not None), None)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    record: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if config.method == "dflash" else "DSparkDraftModel"],
        "model_type": "qwen3",
        "tandemkv_format": 1,
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "block_size": config.num_rows,
        "target_layer_ids": list(config.taps),
        "layer_types": kinds,
        "sliding_window": sliding,
        "use_sliding_window": sliding is not None,
        "is_causal": _said_causal(config),
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": config.logit_scale,
        "final_logit_softcapping": config.logit_softcap,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    for name in _SAME_NAME:
        record[name] = getattr(config, name)
    return {name: value for name, value in record.items() if value is not None}


def _said_causal(config: DFlashConfig) -> bool | None:
    """One word for all layers; None where they differ, which is the authors' default alone."""
    flags = {config.is_causal(i) for i in range(config.num_layers)}
    return flags.pop() if len(flags) == 1 else None


_SAME_NAME = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "mask_token_id", "rms_norm_eps", "rope_parameters", "max_position_embeddings",
    "target_hidden_size", "fc_norm", "markov_rank", "markov_head_type",
)  # fmt: skip


def default_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The published default: outputs spread evenly from layer 1 to N - 3, N // 2 for one layer."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_layers))


def _flattened(config: dict[str, Any], origin: str) -> dict[str, Any]:
    """Top level and dflash_config as one; what both say must be the same."""
    inner = config.get("dflash_config") or {}
    outer = {k: v for k, v in config.items() if k != "dflash_config"}
    for name in inner.keys() & outer.keys():
        if outer[name] is not None and outer[name] != inner[name]:
            raise ConfigError(
                f"{origin}: {name} is {outer[name]!r} at the top level and {inner[name]!r} in"
                " dflash_config"
            )
    return {**outer, **inner}


def _refuse_unknown(config: dict[str, Any], origin: str) -> None:
    for name, value in config.items():
        if name in NEUTRAL:
            if value is not None and value not in NEUTRAL[name]:
                raise ConfigError(f"{origin}: option {name!r} = {value!r} is not supported")
        elif name not in HONOURED and name not in IGNORED and value:
            raise ConfigError(f"{origin}: unknown option {name!r} = {value!r}")


def _need(config: dict[str, Any], names: tuple[str, ...], origin: str) -> None:
    for name in names:
        if config.get(name) is None:
            raise ConfigError(f"{origin}: config.json lacks {name!r}")


def _method(config: dict[str, Any], origin: str) -> str:
    """dflash or dspark; said outright, or by the class, unless Markov weights leave it open."""
    for name in ("shift_label", "sample_from_anchor"):
        if config.get(name) is not None:
            return "dspark" if config[name] else "dflash"
    projector = config.get("projector_type")
    if projector is not None:
        if projector not in METHODS:
            raise ConfigError(
                f"{origin}: projector_type {projector!r} is not one of {', '.join(METHODS)}"
            )
        return projector
    classes = config.get("architectures") or []
    found = {ARCHITECTURES[name] for name in classes if name in ARCHITECTURES}
    if len(found) != 1 or len(classes) != 1:
        raise ConfigError(
            f"{origin}: architectures {classes!r} is not one of {', '.join(ARCHITECTURES)}"
        )
    (method,) = found
    if method == "dflash" and config.get("markov_rank"):
        raise ConfigError(
            f"{origin}: a DFlashDraftModel with a Markov head predicts either a row's own position"
            " or the next; say which by 'shift_label'"
        )
    return method


def _windows(config: dict[str, Any], layers: int, origin: str) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if config.get("use_swa"):
        window = config.get("swa_window_size") or window
        kinds = ["sliding_attention"] * layers
    elif kinds is None:
        first = int(config.get("max_window_layers") or 0) if window else layers
        sliding = bool(config.get("use_sliding_window", False)) and window
        kinds = [
            "sliding_attention" if sliding and i >= first else "full_attention"
            for i in range(layers)
        ]
    if len(kinds) != layers:
        raise ConfigError(f"{origin}: layer_types names {len(kinds)} layers, there are {layers}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"{origin}: layer type {kind!r} is not supported")
    if "sliding_attention" in kinds and not window:
        raise ConfigError(
            f"{origin}: layer_types names sliding layers and sliding_window is not given"
        )
    return tuple(int(window or 0) if k == "sliding_attention" else None for k in kinds)


def _causal(
    config: dict[str, Any], windows: tuple[int | None, ...], method: str
) -> tuple[bool, ...]:
    """As said; else as the authors' code has it: DFlash's sliding layers are causal, no others."""
    said = config.get("is_causal")
    if said is not None:
        flags = tuple(bool(said) for _ in windows)
    else:
        flags = tuple(method == "dflash" and w is not None for w in windows)
    return flags if any(flags) else ()


def _taps(config: dict[str, Any], layers: int, origin: str) -> tuple[int, ...]:
    ids = config.get("target_layer_ids")
    if ids is None:
        if config.get("num_target_layers") is None:
            raise ConfigError(f"{origin}: config.json lacks 'target_layer_ids'")
        return default_taps(int(config["num_target_layers"]), layers)
    if not ids:
        raise ConfigError(f"{origin}: target_layer_ids is empty")
    return tuple(int(i) for i in ids)
