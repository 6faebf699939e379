"""What a DFlash or DSpark checkpoint says about its maths, in whichever published layout.

Law: every option that changes the maths is honoured or refused by its name; captured layers are
"output-of" ids (-1: the embedding), as in all published block drafters; K is kept, never the
ambiguous block size. This module reads config dictionaries only; it opens no tensor.

    layout            class, projector_type            fields           rows     K
    z-lab DFlash      DFlashDraftModel, none           dflash_config    K + 1    block_size - 1
    SpecForge DSpark  DSparkDraftModel, dspark         dflash_config *  K        block_size
    ModelOpt DSpark   DFlashDraftModel, dspark         dflash_config    K        block_size
    DeepSpec          Qwen3DSparkModel, none           top level        K        block_size
    ours              either of the first two, none    top level        as above

*: or dspark_config; what several places say must agree. shift_label (sample_from_anchor) outranks
class and projector_type: true, a row predicts the position after its own, K rows.

Draft layers are full or sliding: by layer_types with sliding_window; by use_swa with
swa_window_size, which makes all layers slide where layer_types names none. A layer that layer_types
names sliding keeps rows of the draft block from later ones unless is_causal (or causal) says
otherwise; no other layer does.

Sources: DFlash, arXiv 2602.06036, and its authors' package dflash 0.1.0; DSpark, arXiv 2607.05147.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandemkv.base.errors import ConfigError
from tandemkv.model.dflash_options import flag, flattened, layer_ids, number, refuse_unknown, whole
from tandemkv.model.rotary import DEFAULT_ROPE, head_size, parse_rope

METHODS = ("dflash", "dspark")
MARKOV_TYPES = ("vanilla", "gated", "rnn")
MOST_DRAFTS = 64
ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
}


class DFlashConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry and options of one block drafter; names as in Hugging Face configs where they exist.

    method: dflash (row j >= 1 of the draft block predicts its own position, K + 1 rows) or dspark
    (row j >= 0 predicts the next position, K rows). num_draft_tokens: K. taps: captured layers.
    num_target_layers: depth of the target it was trained for, None where that is not said.
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
    num_target_layers: int | None = None
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


def parse_config(config: dict[str, Any], origin: str) -> DFlashConfig:
    """Read a config.json of any supported layout.

    origin names the checkpoint in errors. Raises ConfigError for a missing, unknown or misshapen
    option, for one that is said twice and differently, and where a sliding layer has no window.
    """
    if "speculators_model_type" in config:
        raise ConfigError(
            f"{origin}: the speculators layout of {config['speculators_model_type']!r} is not"
            " supported for block drafters; convert it to the layout of its authors"
        )
    config = flattened(config, origin)
    method = _method(config, origin)
    refuse_unknown(config, origin)
    heads, kv_heads = _heads(config, origin)
    layers = whole(config, "num_hidden_layers", origin)
    hidden = whole(config, "hidden_size", origin)
    rope, max_positions = _rope(config, origin)
    windows, named = _windows(config, layers, origin)
    rank = whole(config, "markov_rank", origin, 0, least=0)
    confidence, with_markov = _confidence(config, rank, origin)

    def given(name: str, least: int) -> int | None:
        return whole(config, name, origin, least=least) if name in config else None

    return DFlashConfig(
        method=method,
        hidden_size=hidden,
        intermediate_size=whole(config, "intermediate_size", origin),
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size(config),
        vocab_size=_vocabulary(config, origin),
        num_draft_tokens=_num_drafts(config, method, origin),
        taps=_taps(config, layers, origin),
        windows=windows,
        causal=_causal(config, named, origin),
        mask_token_id=given("mask_token_id", 0),
        rms_norm_eps=number(config, "rms_norm_eps", origin, 1e-6),
        rope_parameters=rope,
        max_position_embeddings=max_positions,
        target_hidden_size=given("target_hidden_size", 1),
        num_target_layers=given("num_target_layers", 1),
        fc_norm=bool(flag(config, "fc_norm", origin)),
        embedding_scale=number(config, "input_embedding_scale", origin, 1.0),
        logit_scale=number(config, "output_multiplier", origin, 1.0),
        logit_softcap=number(config, "final_logit_softcapping", origin, 0.0) or None,
        markov_rank=rank,
        markov_head_type=_markov_type(config, rank, origin),
        confidence=confidence,
        confidence_with_markov=with_markov,
    )


def to_dict(config: DFlashConfig) -> dict[str, Any]:
    """The config.json of our own layout; `parse_config` reads it back.

    sliding_window and is_causal are lists, one entry per draft layer, where the layers differ.
    """
    windows = {w for w in config.windows if w is not None}
    causal = [config.is_causal(i) for i in range(config.num_layers)]
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    record: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if config.method == "dflash" else "DSparkDraftModel"],
        "model_type": "qwen3",
        "tandemkv_format": 1,
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "block_size": config.num_rows,
        "shift_label": config.method == "dspark",
        "target_layer_ids": list(config.taps),
        "layer_types": kinds,
        "sliding_window": list(config.windows) if len(windows) > 1 else next(iter(windows), None),
        "use_sliding_window": bool(windows),
        "is_causal": causal if len(set(causal)) > 1 else causal[0],
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": config.logit_scale,
        "final_logit_softcapping": config.logit_softcap,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    for name in _SAME_NAME:
        record[name] = getattr(config, name)
    return {name: value for name, value in record.items() if value is not None}


_SAME_NAME = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "mask_token_id", "rms_norm_eps", "rope_parameters", "max_position_embeddings",
    "target_hidden_size", "num_target_layers", "fc_norm", "markov_rank", "markov_head_type",
)  # fmt: skip


def says(config: dict[str, Any], name: str) -> bool:
    """Whether a config.json says this option, in whichever place its layout has for it."""
    return name in flattened(config, "config.json")


def default_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The published default: outputs spread evenly from layer 1 to N - 3, N // 2 for one layer."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_layers))


def _method(config: dict[str, Any], origin: str) -> str:
    """dflash or dspark; said outright, or by the class, unless Markov weights leave it open."""
    classes = config.get("architectures") or []
    projector, shift = config.get("projector_type"), flag(config, "shift_label", origin)
    found = {ARCHITECTURES.get(str(name)) for name in classes}
    if None in found or len(found) > 1 or (not found and projector is None):
        raise ConfigError(
            f"{origin}: architectures {classes!r} is not one of {', '.join(ARCHITECTURES)}"
        )
    if projector not in (None, *METHODS):
        raise ConfigError(
            f"{origin}: projector_type {projector!r} is not one of {', '.join(METHODS)}"
        )
    if shift is not None:
        return "dspark" if shift else "dflash"
    if projector == "dflash" and "dspark" in found:
        raise ConfigError(
            f"{origin}: projector_type is 'dflash', and architectures {classes!r} is not;"
            " say which by 'shift_label'"
        )
    if projector is not None:
        return projector
    method = "dspark" if "dspark" in found else "dflash"
    if method == "dflash" and config.get("markov_rank"):
        raise ConfigError(
            f"{origin}: a DFlashDraftModel with a Markov head predicts either a row's own position"
            " or the next; say which by 'shift_label'"
        )
    return method


def _heads(config: dict[str, Any], origin: str) -> tuple[int, int]:
    heads = whole(config, "num_attention_heads", origin)
    kv_heads = whole(config, "num_key_value_heads", origin, heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{origin}: num_attention_heads {heads} is no multiple of num_key_value_heads"
            f" {kv_heads}"
        )
    whole(config, "head_dim", origin, whole(config, "hidden_size", origin) // heads)
    return heads, kv_heads


def _vocabulary(config: dict[str, Any], origin: str) -> int:
    full = whole(config, "vocab_size", origin)
    drafted = whole(config, "draft_vocab_size", origin, full)
    if drafted != full:
        raise ConfigError(
            f"{origin}: draft_vocab_size {drafted} of {full}: a head over part of the vocabulary is"
            " not supported for block drafters"
        )
    return full


def _num_drafts(config: dict[str, Any], method: str, origin: str) -> int:
    size = whole(config, "block_size", origin)
    trained = whole(config, "training_block_size", origin, size)
    if trained != size:
        raise ConfigError(f"{origin}: block_size is {size}, and training_block_size is {trained}")
    num = size - (method == "dflash")
    if num < 1:
        raise ConfigError(f"{origin}: block_size {size} leaves nothing to draft")
    if num > MOST_DRAFTS:
        raise ConfigError(
            f"{origin}: block_size {size} drafts {num} tokens at once, at most {MOST_DRAFTS} can be"
        )
    return num


def _rope(config: dict[str, Any], origin: str) -> tuple[dict[str, Any], int]:
    for name in ("rope_parameters", "rope_scaling"):
        scope = config.get(name) or {}
        part = scope.get("partial_rotary_factor", 1) if isinstance(scope, dict) else 1
        if part != 1:
            raise ConfigError(f"{origin}: {name}.partial_rotary_factor = {part!r} is not supported")
    try:
        rope, max_positions = parse_rope(config, origin)
    except ConfigError:
        raise
    except Exception as error:  # transformers has no one class for a config it cannot read
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{origin}: its RoPE cannot be read ({first})") from None
    for name in (name for name, value in rope.items() if type(value) in (int, float)):
        number(rope, name, origin, 0.0)
    if not number(rope, "rope_theta", origin, 0.0):
        raise ConfigError(f"{origin}: rope_theta is not given")
    return rope, max_positions


def _windows(
    config: dict[str, Any], layers: int, origin: str
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window of every draft layer, and whether the config names the layer a sliding one."""
    named = _named_sliding(config, layers, origin)
    everywhere = bool(flag(config, "use_swa", origin)) and not any(named)
    sliding = tuple(everywhere or each for each in named)
    if not any(sliding):
        return (None,) * layers, named
    given, swa = config.get("sliding_window"), config.get("swa_window_size")
    if given is not None and swa is not None and given != swa:
        raise ConfigError(f"{origin}: sliding_window is {given!r}, and swa_window_size is {swa!r}")
    by_swa = given is None and swa is not None
    name, given = ("swa_window_size", swa) if by_swa else ("sliding_window", given)
    windows = given if isinstance(given, list) else [given] * layers
    if len(windows) != layers:
        raise ConfigError(f"{origin}: {name} {given!r} is not for {layers} layers")
    for window in (w for w, slides in zip(windows, sliding, strict=True) if slides):
        if window is None:
            raise ConfigError(f"{origin}: it has sliding layers, and sliding_window is not given")
        if type(window) is int and window < 1:
            raise ConfigError(f"{origin}: {name} must be at least 1, got {window}")
        whole({name: window}, name, origin)
    return tuple(w if s else None for w, s in zip(windows, sliding, strict=True)), named


def _named_sliding(config: dict[str, Any], layers: int, origin: str) -> tuple[bool, ...]:
    """Per draft layer, whether layer_types (or the rule it replaced) names it a sliding one."""
    kinds, asked = config.get("layer_types"), flag(config, "use_sliding_window", origin)
    if kinds is None:
        if not asked:
            return (False,) * layers
        first = whole(config, "max_window_layers", origin, least=0)
        return tuple(i >= first for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(f"{origin}: layer_types {kinds!r} is not for {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"{origin}: layer type {kind!r} is not supported")
    named = tuple(kind == "sliding_attention" for kind in kinds)
    if any(named) and asked is False and not config.get("use_swa"):
        raise ConfigError(
            f"{origin}: layer_types names sliding layers, and use_sliding_window is false;"
            " correct the one that is wrong"
        )
    return named


def _causal(config: dict[str, Any], named: tuple[bool, ...], origin: str) -> tuple[bool, ...]:
    """As said; else as trainers and servers have it: layers that are named sliding, no others."""
    said = config.get("is_causal")
    flags = list(named)
    if said is not None:
        flags = said if isinstance(said, list) else [said] * len(named)
    if len(flags) != len(named) or not all(isinstance(each, bool) for each in flags):
        raise ConfigError(
            f"{origin}: is_causal must be true or false, or a list of them for {len(named)} layers,"
            f" got {said!r}"
        )
    return tuple(flags) if any(flags) else ()


def _taps(config: dict[str, Any], layers: int, origin: str) -> tuple[int, ...]:
    outputs, inputs = (
        layer_ids(config, name, first, origin)
        for name, first in (("target_layer_ids", -1), ("eagle_aux_hidden_state_layer_ids", 0))
    )
    from_inputs = None if inputs is None else tuple(i - 1 for i in inputs)
    if outputs is not None and from_inputs not in (None, outputs):
        raise ConfigError(
            f"{origin}: captures outputs of layers {list(outputs)} by 'target_layer_ids', and"
            f" inputs of {list(inputs or ())} by 'eagle_aux_hidden_state_layer_ids'"
        )
    taps = outputs if outputs is not None else from_inputs
    if taps is None:
        if "num_target_layers" not in config:
            raise ConfigError(f"{origin}: config.json lacks 'target_layer_ids'")
        deepest = whole(config, "num_target_layers", origin, least=4)
        return default_taps(deepest, layers)
    return taps


def _markov_type(config: dict[str, Any], rank: int, origin: str) -> str:
    kind = str(config.get("markov_head_type", "vanilla")).lower()
    if rank and kind not in MARKOV_TYPES:
        raise ConfigError(
            f"{origin}: markov_head_type {kind!r} is not one of {', '.join(MARKOV_TYPES)}"
        )
    return kind


def _confidence(config: dict[str, Any], rank: int, origin: str) -> tuple[bool, bool]:
    """Whether there is a confidence head, and whether it reads the Markov embedding too.

    Without a word on the head, SpecForge has one if it was trained with a weight.
    """
    head = flag(config, "enable_confidence_head", origin)
    if head is None:
        head = number(config, "confidence_head_alpha", origin, 0.0) > 0
    with_markov = flag(config, "confidence_head_with_markov", origin) is not False
    return head, with_markov and (rank > 0 or not head)
