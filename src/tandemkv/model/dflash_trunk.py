"""The trunk that DFlash and DSpark share: context rows from captures, a draft block's pass.

Law: context keys and values of every layer are linear in c_i (then normed and rotated by position),
so rows are computed in any batch, any order, alone or again; the pass over a draft block reads them
and its own rows, and always runs the trained number of rows. This module writes no page, draws no
token and knows no sequence.

    c_i = norm(fc(captures of i))     context k, v of layer l: W_kv(l) c_i; no input norm, no layer
    h   = embed([x_n, MASK, ...])     draft block: q, k, v of norm(h); attention; feed-forward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.model.block_attention import BlockContext
from tandemkv.model.dflash_config import DFlashConfig
from tandemkv.model.packed import pack_linear
from tandemkv.model.rotary import Rotary

Group = tuple[int | None, tuple[int, ...]]
"""Window of a layer group and its draft layers."""


class _Layer:
    """Weights of one draft layer; matrices that read the same input are fused."""

    def __init__(self, trunk: Trunk, weights: Mapping[str, Tensor], number: int) -> None:
        def get(*names: str) -> Tensor:
            parts = [weights[f"layers.{number}.{name}.weight"] for name in names]
            return torch.cat(parts).to(trunk.device, trunk.dtype).contiguous()

        config = trunk.config
        self.qkv = pack_linear(get(*(f"self_attn.{x}_proj" for x in "qkv")))
        self.o = pack_linear(get("self_attn.o_proj"))
        self.gate_up = pack_linear(get("mlp.gate_proj", "mlp.up_proj"))
        self.down = pack_linear(get("mlp.down_proj"))
        self.input_norm = get("input_layernorm")
        self.post_norm = get("post_attention_layernorm")
        q_norm, self.k_norm = get("self_attn.q_norm"), get("self_attn.k_norm")
        self.head_norms = torch.cat(
            (
                q_norm.expand(config.num_attention_heads, -1),
                self.k_norm.expand(config.num_key_value_heads, -1),
            )
        )


class Trunk:
    """Weights of the trunk on one device. embedding [V, d]: the target's, or a copy of its own."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        device: torch.device,
        dtype: torch.dtype,
        origin: str,
    ) -> None:
        def get(name: str) -> Tensor:
            return weights[f"{name}.weight"].to(device, dtype).contiguous()

        self.config, self.device, self.dtype = config, device, dtype
        self.groups = groups_of(config)
        self._places = _places(self.groups)
        self._fc = pack_linear(get("fc"))
        self._fc_norm = None
        if config.fc_norm:
            self._fc_norm = torch.stack([get(f"fc_norm.{i}") for i in range(len(config.taps))])
        self._hidden_norm, self._norm = get("hidden_norm"), get("norm")
        self._layers = [_Layer(self, weights, i) for i in range(config.num_layers)]
        self._context_kv = pack_linear(
            torch.cat(
                [
                    get(f"layers.{i}.self_attn.{x}_proj")
                    for i in range(config.num_layers)
                    for x in "kv"
                ]
            )
        )
        self._embedding = embedding.to(device, dtype)
        if config.mask_token_id is None:
            self._mask = get("mask_embedding")
        else:
            self._mask = self._embedding[config.mask_token_id] * config.embedding_scale
        self._rotary = Rotary(
            config.rope_parameters,
            config.head_dim,
            config.max_position_embeddings,
            device,
            dtype,
            origin,
        )

    # ------------------------------------------------------------------ context rows

    def fuse(self, features: Tensor) -> Tensor:
        """c [R, d] from captures [R, m, d_target]."""
        x = features.to(self.device, self.dtype)
        if self._fc_norm is not None:
            x = self._rms(x, None) * self._fc_norm
        return self._rms(self._fc(x.flatten(1)), self._hidden_norm)

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per layer, k and v [R, Hkv, hd] of context rows; features [R, m, d_t], positions [R]."""
        config, num = self.config, positions.shape[0]
        kv = self._context_kv(self.fuse(features))
        kv = kv.view(num, config.num_layers, 2, config.num_key_value_heads, config.head_dim)
        cos, sin = self._rotary.angles(positions)
        return [
            (
                self._rotary.rotate(self._rms(kv[:, i, 0], layer.k_norm), cos, sin),
                kv[:, i, 1],
            )
            for i, layer in enumerate(self._layers)
        ]

    # ------------------------------------------------------------------ the draft block

    def forward(
        self, tokens: Sequence[int], anchors: Sequence[int], contexts: Sequence[BlockContext]
    ) -> Tensor:
        """Normalised output [P, K, d] of the rows that predict drafts 1..K.

        tokens: of the anchors, which stand at positions `anchors`; contexts: one per group.
        """
        config, num, rows = self.config, len(anchors), self.config.num_rows
        starts = torch.tensor(anchors, device=self.device)
        positions = (starts[:, None] + torch.arange(rows, device=self.device)).flatten()
        cos, sin = self._rotary.angles(positions)
        ids = torch.tensor(tokens, device=self.device)
        hidden = self._mask.expand(num, rows, -1).clone()
        hidden[:, 0] = F.embedding(ids, self._embedding) * config.embedding_scale
        hidden = hidden.flatten(0, 1)
        shape = (num, rows, -1, config.head_dim)
        for layer, (g, place) in zip(self._layers, self._places, strict=True):
            q, k, v = self._project(layer, hidden, cos, sin)
            seen = contexts[g].attend(place, q.reshape(shape), k.reshape(shape), v.reshape(shape))
            hidden = hidden + layer.o(seen.reshape(num * rows, -1))
            gate, up = layer.gate_up(self._rms(hidden, layer.post_norm)).chunk(2, -1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        hidden = self._rms(hidden, self._norm).view(num, rows, -1)
        return hidden[:, rows - config.num_draft_tokens :]

    def _project(
        self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [R, H, hd], k and v [R, Hkv, hd] of the draft blocks' own rows."""
        config = self.config
        heads = (config.num_attention_heads, config.num_key_value_heads)
        qkv = layer.qkv(self._rms(hidden, layer.input_norm))
        qkv = qkv.view(hidden.shape[0], -1, config.head_dim)
        qk = self._rms(qkv[:, : sum(heads)], None) * layer.head_norms
        q, k = self._rotary.rotate(qk, cos, sin).split(heads, 1)
        return q, k, qkv[:, sum(heads) :]

    def _rms(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)


def groups_of(config: DFlashConfig) -> list[tuple[int | None, tuple[int, ...]]]:
    """Draft layers by window, each group's layers in order; groups in the order they appear."""
    found: dict[int | None, list[int]] = {}
    for layer, window in enumerate(config.windows):
        found.setdefault(window, []).append(layer)
    return [(window, tuple(layers)) for window, layers in found.items()]


def group_name(config: DFlashConfig, window: int | None) -> str:
    return config.method if window is None else f"{config.method}_w{window}"


def _places(groups: Sequence[tuple[int | None, tuple[int, ...]]]) -> list[tuple[int, int]]:
    """Per draft layer: its group and its place there."""
    where = {
        layer: (g, place)
        for g, (_, layers) in enumerate(groups)
        for place, layer in enumerate(layers)
    }
    return [where[layer] for layer in sorted(where)]
