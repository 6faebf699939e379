"""EAGLE-3: one decoder layer over the target's hidden states, drafting a chain of tokens.

Law: a draft row in a page is a function of the target's hidden state h_i and the token x_{i+1}
alone; rows computed from the drafter's own states never reach a page. Context rows need no
attention, so they are one GEMM whatever the chunking. This module reads no checkpoint and verifies
nothing.

    row i        k, v from [norm(embed(x_{i+1})), norm(g_i)], RoPE at i, g_i = fc(captures of h_i)
    slot         i + 1: where its newest token is
    draft 1      the output of row n-1 (slot n, token: the anchor x_n)
    draft j > 1  a row at position n-2+j from draft j-1 and the state a that gave it

                 readable          written  | the chain's own, in no page
    slot         1 ........... n-1    n     |
    position     0 ........... n-2   n-1    |  n   n+1  ...  n+K-2
    drafts                            1        2    3   ...    K

Source: EAGLE-3, Li et al. 2025 (arXiv 2503.01840), chain drafting; fc_norm, norm_output: EAGLE-3.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.base.errors import ConfigError, InvariantError
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.layout import Domain, LayerGroup, RebuildFrom
from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool
from tandemkv.model.chain_attention import ChainKeys
from tandemkv.model.draft_checkpoint import RANKING, fingerprint
from tandemkv.model.draft_head import Choice, DraftHead, collect, ranked_ids
from tandemkv.model.drafter import (
    Drafter,
    DrafterSpec,
    DraftInputs,
    Drafts,
    DraftSegment,
    check_made_for,
)
from tandemkv.model.eagle3_checkpoint import (
    MID,
    check_tensors,
    draft_ids,
    num_taps,
)
from tandemkv.model.eagle3_config import Eagle3Config, default_taps
from tandemkv.model.packed import pack_linear
from tandemkv.model.rotary import Rotary
from tandemkv.model.target import Target


@dataclass(slots=True)
class _Chain:
    """One proposing sequence: row of the batch that holds position n-1, and what it reads."""

    segment: DraftSegment
    index: int
    row: int
    visible: SpanSet

    @property
    def anchor(self) -> int:
        return self.segment.num_rows

    @property
    def num_drafts(self) -> int:
        return self.segment.num_drafts


class Eagle3(Drafter):
    """An EAGLE-3 drafter bound to its target.

    weights: as `eagle3_checkpoint.read` returns them. draft_vocab: draft over that many rows of
    the target's head, the first of the checkpoint's ranking (None: default_draft_vocab).
    Raises ConfigError, naming both values, where drafter and target do not fit.
    """

    def __init__(
        self,
        target: Target,
        config: Eagle3Config,
        weights: Mapping[str, Tensor],
        *,
        num_draft_tokens: int = 4,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        draft_vocab: int | None = None,
        origin: str = "eagle3",
    ) -> None:
        check_tensors(config, weights, origin)
        taps = _fit(target, config, num_taps(config, weights, origin), origin)
        self.config = config
        self.target = target
        self.dtype = dtype or target.head_weight.dtype
        self.device = torch.device(device or target.head_weight.device)
        self._pool: KVPool | None = None
        self._take_weights(weights, len(taps))
        self._rotary = Rotary(
            config.rope_parameters,
            config.head_dim,
            config.max_position_embeddings,
            self.device,
            self.dtype,
            origin,
        )
        head, ids = _head(target, config, weights, draft_vocab, origin)
        head = head.to(self.device, self.dtype)
        self.head = DraftHead(head, ids, target.spec.vocab_size)
        digest = hashlib.sha256(fingerprint(config, weights).encode())
        digest.update(repr((taps, None if ids is None else ids.tolist())).encode())
        self.spec = DrafterSpec(
            method="eagle3",
            fingerprint=digest.hexdigest(),
            num_draft_tokens=num_draft_tokens,
            taps=taps,
        )

    def _take_weights(self, weights: Mapping[str, Tensor], num: int) -> None:
        """Matrices that read the same input are fused: q,k,v and gate,up."""

        def get(*names: str) -> Tensor:
            parts = [weights[name + ".weight"].to(self.device, self.dtype) for name in names]
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

        config, attn, mlp = self.config, f"{MID}self_attn.", f"{MID}mlp."
        self._fc = pack_linear(get("fc"))
        self._fc_norm = None
        if config.fc_norm:
            self._fc_norm = torch.stack([get(f"fc_norm.{i}") for i in range(num)])
        self._input_norm = get("input_norm") if config.norm_before_fc else None
        self._qkv = pack_linear(get(*(f"{attn}{x}_proj" for x in "qkv")))
        self._heads = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
        self._head_norms: Tensor | None = None
        if f"{attn}q_norm.weight" in weights:
            q_norm, k_norm = get(f"{attn}q_norm"), get(f"{attn}k_norm")
            num_q, num_k, _ = self._heads
            self._head_norms = torch.cat((q_norm.expand(num_q, -1), k_norm.expand(num_k, -1)))
        self._o = pack_linear(get(f"{attn}o_proj"))
        self._gate_up = pack_linear(get(f"{mlp}gate_proj", f"{mlp}up_proj"))
        self._down = pack_linear(get(f"{mlp}down_proj"))
        self._embed_norm, self._hidden_norm = get(f"{MID}input_layernorm"), get(f"{MID}hidden_norm")
        self._post_norm, self._norm = get(f"{MID}post_attention_layernorm"), get("norm")
        self._embed = get("embed_tokens") if "embed_tokens.weight" in weights else None

    # ------------------------------------------------------------------ the contract

    def layer_groups(self, page_size: int, dtype: str) -> tuple[LayerGroup, ...]:
        return (
            LayerGroup(
                name="eagle3",
                domain=Domain.DRAFT,
                layers=(0,),
                num_kv_heads=self.config.num_key_value_heads,
                head_dim=self.config.head_dim,
                dtype=dtype,
                page_size=page_size,
                lookahead=1,
                rebuild_from=RebuildFrom.HIDDEN,
                pointwise=True,
            ),
        )

    def bind(self, pools: Sequence[KVPool]) -> None:
        (self._pool,) = pools

    @torch.inference_mode()
    def run(self, inputs: DraftInputs) -> Drafts:
        segments = inputs.segments
        chains = [c for i, s in enumerate(segments) if (c := self._chain(i, s)) is not None]
        writing = any(s.writes[0] for s in segments)
        if not chains and not writing:
            return collect(len(segments), ())
        if inputs.features is None:
            raise InvariantError("eagle3: rows came without the target's hidden states")
        fused = self.fuse(inputs.features)
        q, k, v = self._project(inputs.next_ids, fused, *self._rotary.angles(inputs.positions))
        if writing:
            rows = [_context_segment(s) for s in segments]
            GroupRows(self._bound(), rows, reads=False).write(0, k, v)
        if not chains:
            return collect(len(segments), ())
        last = torch.tensor([c.row for c in chains], device=self.device)
        return collect(len(segments), self._propose(chains, fused[last], q[last]))

    # ------------------------------------------------------------------ context rows

    def fuse(self, features: Tensor) -> Tensor:
        """g [R, d] from captures [R, m, d_target]."""
        x = features.to(self.device, self.dtype)
        if self._fc_norm is not None:
            x = self._rms(x, None) * self._fc_norm
        x = x.flatten(1)
        if self._input_norm is not None:
            x = self._rms(x, self._input_norm)
        return self._fc(x)

    def _inputs(self, next_ids: Tensor, state: Tensor) -> Tensor:
        """[R, 2d]: what a row is a function of; the embedding half first."""
        if self._embed is None:
            embedded = self.target.embed(next_ids).to(self.device, self.dtype)
        else:
            embedded = F.embedding(next_ids, self._embed)
        return torch.cat(
            (self._rms(embedded, self._embed_norm), self._rms(state, self._hidden_norm)), -1
        )

    def _project(
        self, next_ids: Tensor, state: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [R, H, hd], k and v [R, Hkv, hd] of rows at the positions of cos and sin."""
        qkv = self._qkv(self._inputs(next_ids, state))
        qkv = qkv.view(-1, sum(self._heads), self.config.head_dim)
        num_q, num_k, _ = self._heads
        q, k = self._rotate(qkv[:, : num_q + num_k], cos, sin).split((num_q, num_k), 1)
        return q, k, qkv[:, num_q + num_k :]

    # ------------------------------------------------------------------ proposing

    def _chain(self, index: int, segment: DraftSegment) -> _Chain | None:
        """The chain this segment can draft; None if it wants none, or lacks what draft 1 needs.

        That is: row n-1 among its rows, for the hidden state, and its slot n written or readable.
        """
        n = segment.num_rows
        row = segment.row_start + n - 1 - segment.position
        if not segment.num_drafts or not segment.row_start <= row < segment.row_stop:
            return None
        visible = SpanSet(segment.readable[0])
        for start, stop in _clipped(segment):
            visible.add(start, stop)
        visible.remove(n + 1, max(n + 1, visible.stop))
        return _Chain(segment, index, row, visible) if n in visible else None

    def _propose(
        self, chains: list[_Chain], state: Tensor, q: Tensor
    ) -> list[tuple[list[int], Choice]]:
        """Draft every chain. state [P, d], q [P, H, hd]: of the rows at position n-1."""
        steps = []
        pool, longest = self._bound(), max(c.num_drafts for c in chains)
        keys = [ChainKeys(pool, c.segment.pages[0], c.visible, c.num_drafts - 1) for c in chains]
        starts = torch.tensor([c.anchor - 1 for c in chains], device=self.device)
        cos, sin = self._rotary.angles(starts[:, None] + torch.arange(longest, device=self.device))
        for step in range(longest):
            attended = _stacked([k.attend(row) for k, row in zip(keys, q, strict=True)])
            state = self._layer(state, attended)
            normed = self._rms(state, self._norm)
            choice = self._choose(chains, normed, step)
            steps.append(([c.index for c in chains], choice))
            tokens = choice.tokens
            if self.config.norm_output:
                state = normed
            kept = [i for i, c in enumerate(chains) if c.num_drafts > step + 1]
            if not kept:
                break
            if len(kept) < len(chains):
                chains, keys = [chains[i] for i in kept], [keys[i] for i in kept]
                state, tokens, cos, sin = state[kept], tokens[kept], cos[kept], sin[kept]
            q, k, v = self._project(tokens, state, cos[:, step + 1], sin[:, step + 1])
            for i, each in enumerate(keys):
                each.append(k[i], v[i])
        return steps

    def _choose(self, chains: list[_Chain], normed: Tensor, step: int) -> Choice:
        return self.head.choose(
            normed,
            [c.segment.params for c in chains],
            [c.segment.seed for c in chains],
            [c.anchor + 1 + step for c in chains],
            [c.anchor for c in chains],
        )

    # ------------------------------------------------------------------ the layer

    def _layer(self, residual: Tensor, attended: Tensor) -> Tensor:
        """a [P, d] from the row's state and its attention output [P, H, hd]."""
        if self.config.norm_before_residual:
            residual = self._rms(residual, self._hidden_norm)
        x = residual + self._o(attended.flatten(1))
        gate, up = self._gate_up(self._rms(x, self._post_norm)).chunk(2, -1)
        return x + self._down(F.silu(gate) * up)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RoPE (half rotation) of q and k heads [R, H + Hkv, hd], after head norms if any."""
        if self._head_norms is not None:
            x = self._rms(x, None) * self._head_norms
        return self._rotary.rotate(x, cos, sin)

    def _rms(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)

    def _bound(self) -> KVPool:
        if self._pool is None:
            raise ValueError("eagle3: run before bind")
        return self._pool


def _stacked(rows: list[Tensor]) -> Tensor:
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)


def _clipped(segment: DraftSegment) -> list[Span]:
    """The slots to write that this segment's rows reach (slot = position + 1)."""
    first = segment.position + 1
    last = first + segment.row_stop - segment.row_start
    spans = [(max(a, first), min(b, last)) for a, b in segment.writes[0]]
    return [(a, b) for a, b in spans if a < b]


def _context_segment(segment: DraftSegment) -> AttentionSegment:
    """Rows that are written and attend to nothing."""
    return AttentionSegment(
        segment.row_start,
        segment.row_stop,
        segment.position + 1,
        segment.pages[0],
        (),
        segment.writes[0],
    )


def _fit(target: Target, config: Eagle3Config, num: int, origin: str) -> tuple[int, ...]:
    """Captured layers, after refusing by name what does not fit the target."""
    spec = target.spec
    check_made_for(
        spec,
        origin,
        captured_size=config.captured_size,
        vocab_size=config.vocab_size,
    )
    taps = config.taps
    if taps is None:
        if num != 3:
            raise ConfigError(f"{origin}: names no captured layers, and fc.weight reads {num}")
        taps = default_taps(spec.num_layers, origin)
    for tap in taps:
        if not -1 <= tap < spec.num_layers:
            raise ConfigError(
                f"{origin}: captures the output of layer {tap}, this target has layers"
                f" 0..{spec.num_layers - 1}"
            )
    return taps


def _head(
    target: Target,
    config: Eagle3Config,
    weights: Mapping[str, Tensor],
    draft_vocab: int | None,
    origin: str,
) -> tuple[Tensor, Tensor | None]:
    """(head [V_draft, d], target ids of its rows or None): own, the target's, or rows of it."""
    own, vocab_size = weights.get("lm_head.weight"), target.spec.vocab_size
    if config.hidden_size != target.spec.hidden_size and (
        own is None or "embed_tokens.weight" not in weights
    ):
        raise ConfigError(
            f"{origin}: hidden size {config.hidden_size} is not the target's"
            f" {target.spec.hidden_size}, so it needs embed_tokens and lm_head of its own"
        )
    ids = draft_ids(weights["d2t"]) if "d2t" in weights else None
    if ids is None:
        ids = ranked_ids(target, weights.get(RANKING), draft_vocab, origin)
    elif draft_vocab is not None:
        raise ConfigError(f"{origin}: draft_vocab does not apply, it has a vocabulary of its own")
    if ids is not None and torch.equal(ids, torch.arange(vocab_size)):
        ids = None
    if own is not None:
        return own, ids
    head = target.head_weight
    return (head if ids is None else head[ids.to(head.device)]), ids
