"""The target model: a transformers causal LM whose attention reads and writes our pages.

Law: a row's hidden state is a function of its token, its position and the slots its GroupRows make
readable; nothing else of a sequence lives in the model. A class for which that is not so (recurrent
state, attention outside the interface, a mask we do not apply) is refused by name at load, by
running it: five tokens whole, then in two passes over pages, must give one answer. This module
loads no files and allocates no pages.

    rows of all sequences packed as one batch [1, R]
      -> transformers model(input_ids, position_ids, tandemkv=pass)     no cache, no mask
           -> each attention layer calls paged_attention(module, q, k, v, ..., tandemkv=pass)
                -> pass: layer index -> (group, layer in pool) -> GroupRows.attend
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tandemkv.base.errors import ConfigError, InvariantError
from tandemkv.kv.layout import Domain, LayerGroup, RebuildFrom
from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool
from tandemkv.model.packed import pack_linear, pack_modules

ATTENTION = "tandemkv"
"""The name of our attention function in transformers: attn_implementation=ATTENTION."""

_IGNORED = frozenset(
    {
        "cache",
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "use_cache",
    }
)
"""Arguments of an attention call that change nothing here; any other that is set is refused."""

_PROBE_TOKENS = 5


class TargetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the engine knows of a target. fingerprint: hash of config and weights."""

    model_class: str
    fingerprint: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str


@dataclass(slots=True)
class TargetOutput:
    """hidden [R, d]: after the final norm. features [R, m, d]: the tapped layers, None if none."""

    hidden: Tensor
    features: Tensor | None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tandemkv: _Pass | _Probe | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls, once per layer.

    query [1, H, R, hd], key and value [1, Hkv, R, hd] -> [1, R, H, hd]. tandemkv: the pass.
    """
    if tandemkv is None:
        raise InvariantError(f"{type(module).__name__} ran without the rows of a pass")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if isinstance(tandemkv, _Probe):
        tandemkv.record(module, q, k, v, attention_mask, sliding_window, kwargs)
    rows, layer = tandemkv.rows_of(module.layer_idx, sliding_window)
    out = rows.attend(layer, q, k, v, scale=scaling, softcap=softcap, sinks=s_aux)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, paged_attention)


class _Pass:
    """One forward pass: which rows and which layer of a pool an attention layer works on."""

    __slots__ = ("_places", "_rows")

    def __init__(self, rows: Sequence[GroupRows], places: dict[int, tuple[int, int]]) -> None:
        self._rows = rows
        self._places = places

    def rows_of(self, layer_idx: int, window: int | None) -> tuple[GroupRows, int]:
        group, layer = self._places[layer_idx]
        rows = self._rows[group]
        if rows.pool.group.window != window:
            raise InvariantError(
                f"layer {layer_idx} attends with window {window}, its layer group"
                f" {rows.pool.group.name!r} has window {rows.pool.group.window}"
            )
        return rows, layer


class Target:
    """A loaded target. model: a PreTrainedModel with attn_implementation ATTENTION, in eval mode.

    Raises ConfigError, naming the model's class, if it cannot be served from pages.
    """

    def __init__(
        self, model: PreTrainedModel, *, fingerprint: str, eos_token_ids: Sequence[int] = ()
    ) -> None:
        config = model.config.get_text_config()
        self.model = model
        self._decoder = model.base_model
        self._head = model.get_output_embeddings()
        self._embedding = model.get_input_embeddings()
        self._logit_scale, self._logit_softcap = _logit_rules(config)
        self.spec = TargetSpec(
            model_class=type(model).__name__,
            fingerprint=fingerprint,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=self._head.weight.shape[0],
            max_model_len=_max_model_len(config),
            eos_token_ids=tuple(eos_token_ids) or _eos_token_ids(model),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
        )
        self._tapped: dict[int, Tensor | None] = {}
        probe = _Probe(self)
        whole = probe.run_whole()
        self._groups = probe.layer_groups()
        if not self.spec.max_model_len:
            raise ConfigError(f"{self.spec.model_class} states no maximum context length")
        self._places = {
            layer: (index, position)
            for index, group in enumerate(self._groups)
            for position, layer in enumerate(group.layers)
        }
        pack_modules(self._decoder)
        self._head = pack_linear(self._head.weight, self._head.bias)
        probe.check_paged(whole)

    def layer_groups(self, page_size: int) -> tuple[LayerGroup, ...]:
        """The full-attention group if there is one, then one per sliding window, ascending."""
        return tuple(msgspec.structs.replace(g, page_size=page_size) for g in self._groups)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Sequence[GroupRows],
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """Run R packed rows. token_ids, positions: [R] int64; rows: one per layer group.

        taps: layers whose output residual stream is wanted (-1: the embedding).
        """
        self._tap(taps)
        output = self._decoder(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            tandemkv=_Pass(rows, self._places),
        )
        return TargetOutput(output.last_hidden_state[0], self._features(taps))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [r, d], after the final norm -> [r, V] float32, as the class gives them."""
        logits = self._head(hidden).float()
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._logit_softcap is not None:
            logits = torch.tanh(logits / self._logit_softcap) * self._logit_softcap
        return logits

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """[r] -> [r, d], scaled as the model scales its embedding."""
        return self._embedding(token_ids)

    @property
    def embedding_weight(self) -> Tensor:
        """[V, d]."""
        return self._embedding.weight

    @property
    def head_weight(self) -> Tensor:
        """[V, d]; the embedding's own tensor when they are tied."""
        return self.model.get_output_embeddings().weight

    def _tap(self, taps: Sequence[int]) -> None:
        for layer in taps:
            if layer not in self._tapped:
                self._hook(layer)

    def _hook(self, layer: int) -> None:
        """Keep the output of a decoder layer (or of the embedding) on every pass from now on."""
        if not -1 <= layer < self.spec.num_layers:
            raise ConfigError(
                f"tapped layer {layer} is not in {self.spec.model_class}'s layers"
                f" -1..{self.spec.num_layers - 1}"
            )
        module = self._embedding if layer == -1 else self._layers()[layer]

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._tapped[layer] = (output[0] if isinstance(output, tuple) else output).detach()

        module.register_forward_hook(keep)
        self._tapped[layer] = None

    def _features(self, taps: Sequence[int]) -> Tensor | None:
        if not taps:
            return None
        features = torch.stack([self._tapped[layer][0] for layer in taps], dim=1)
        self._tapped = dict.fromkeys(self._tapped)
        return features

    def _layers(self) -> nn.ModuleList:
        for module in self._decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.spec.num_layers:
                return module
        raise ConfigError(f"{self.spec.model_class}: its decoder layers were not found")


class _Probe:
    """Runs a model on a few tokens, at load, to learn its layer groups and to catch a misfit."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._name = target.spec.model_class
        self._seen: dict[int, LayerGroup] = {}
        device = target.model.device
        self._tokens = torch.arange(1, 1 + _PROBE_TOKENS, device=device) % target.spec.vocab_size
        self._positions = torch.arange(_PROBE_TOKENS, device=device)

    @torch.inference_mode()
    def run_whole(self) -> Tensor:
        """The class's own logits [tokens, V], every layer's attention recorded on the way."""
        try:
            output = self._target.model(
                input_ids=self._tokens[None],
                position_ids=self._positions[None],
                use_cache=False,
                tandemkv=self,
            )
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise self._refusal(
                f"a first pass failed ({type(error).__name__}: {reason})"
            ) from error
        return output.logits[0].float()

    def record(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        window: int | None,
        others: dict[str, Any],
    ) -> None:
        """Note one attention call's geometry; refuse what paged attention would not honour."""
        layer = module.layer_idx
        unknown = [n for n, value in others.items() if value is not None and n not in _IGNORED]
        if unknown:
            raise self._refusal(f"its attention takes {', '.join(unknown)}, which is not supported")
        if mask is not None:
            raise self._refusal("it builds an attention mask of its own")
        if not getattr(module, "is_causal", True):
            raise self._refusal("its attention is not causal")
        if k.shape != v.shape or q.shape[-1] != k.shape[-1] or len(k) != _PROBE_TOKENS:
            raise self._refusal(
                f"keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit key/value pages"
            )
        if layer in self._seen:
            raise self._refusal(f"layer {layer} attends twice in one pass")
        self._seen[layer] = LayerGroup(
            name="target" if window is None else f"target_w{window}",
            domain=Domain.TARGET,
            layers=(layer,),
            num_kv_heads=k.shape[1],
            head_dim=k.shape[2],
            dtype=str(k.dtype).removeprefix("torch."),
            page_size=8,
            window=window,
            rebuild_from=RebuildFrom.TOKENS,
        )

    def rows_of(self, layer_idx: int, window: int | None) -> tuple[GroupRows, int]:
        """A one-layer pool for the layer just recorded."""
        pool = KVPool(self._seen[layer_idx], 1, self._target.model.device, poison=True)
        return GroupRows(pool, [_segment(0, _PROBE_TOKENS)]), 0

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Layers gathered by window and geometry; refuses a model with a layer we did not see."""
        unseen = sorted(set(range(self._target.spec.num_layers)) - set(self._seen))
        if unseen:
            raise self._refusal(
                f"layers {', '.join(map(str, unseen))} do not attend through the attention"
                " interface, so their state cannot be paged"
            )
        self._check_windows()
        merged: dict[tuple, LayerGroup] = {}
        for layer, group in sorted(self._seen.items()):
            key = (group.window or 0, group.num_kv_heads, group.head_dim)
            known = merged.get(key)
            layers = (*known.layers, layer) if known else (layer,)
            merged[key] = msgspec.structs.replace(group, layers=layers)
        groups = [merged[key] for key in sorted(merged)]
        names = [group.name for group in groups]
        return tuple(
            msgspec.structs.replace(g, name=f"{g.name}_{g.num_kv_heads}x{g.head_dim}")
            if names.count(g.name) > 1
            else g
            for g in groups
        )

    def _check_windows(self) -> None:
        """The windows the layers passed are those the config names, layer by layer."""
        config = self._target.model.config.get_text_config()
        types = getattr(config, "layer_types", None)
        for layer, kind in enumerate(types or ()):
            sliding = self._seen[layer].window is not None
            if kind not in ("full_attention", "sliding_attention"):
                raise self._refusal(f"layer {layer} is of type {kind}, which is not supported")
            if sliding != (kind == "sliding_attention"):
                raise self._refusal(f"layer {layer} is {kind} but its window says otherwise")
        window = getattr(config, "sliding_window", None)
        unused = window is None or getattr(config, "use_sliding_window", True) is False
        if not types and not unused and all(g.window != window for g in self._seen.values()):
            raise self._refusal(f"its sliding window {window} does not reach its attention")

    def check_paged(self, whole: Tensor) -> None:
        """Two passes over pages give the logits of one whole pass, else the model is refused."""
        target, cut = self._target, _PROBE_TOKENS - 2
        device = target.model.device
        pools = [KVPool(g, 1, device, poison=True) for g in target.layer_groups(8)]
        hidden = []
        for start, stop in ((0, cut), (cut, _PROBE_TOKENS)):
            rows = [GroupRows(pool, [_segment(start, stop)]) for pool in pools]
            span = slice(start, stop)
            output = target.forward(self._tokens[span], self._positions[span], rows)
            hidden.append(output.hidden)
        gap = (target.logits(torch.cat(hidden)) - whole).norm() / whole.norm()
        if not gap <= (1e-3 if target.spec.dtype == "float32" else 0.1):
            raise self._refusal(
                f"two passes over pages differ from one whole pass by {gap:.2g} of the logits:"
                " it keeps state outside its keys and values, or changes its logits after the head"
            )

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._name} cannot be served from pages: {reason}")


def _segment(start: int, stop: int) -> AttentionSegment:
    return AttentionSegment(
        row_start=0,
        row_stop=stop - start,
        slot=start,
        pages=[0],
        readable=[(0, start)],
        writes=[(start, stop)],
    )


def _logit_rules(config: Any) -> tuple[float, float | None]:
    """What classes do to logits after the head: a factor (Cohere, Granite), a softcap (Gemma)."""
    scale = getattr(config, "logit_scale", None) or 1.0 / (
        getattr(config, "logits_scaling", None) or 1.0
    )
    return float(scale), getattr(config, "final_logit_softcapping", None)


def _max_model_len(config: Any) -> int:
    """The longest context whose rows do not depend on how long the batch is; 0 if none is stated.

    RoPE that rescales when a batch passes the trained length (dynamic, longrope) would make a row
    a function of its neighbours, so such a model is served up to its trained length only.
    """
    longest = getattr(config, "max_position_embeddings", None) or 0
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds):
        trained = [k.get("original_max_position_embeddings") for k in kinds]
        longest = min([longest, *(int(length) for length in trained if length)])
    return longest


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
