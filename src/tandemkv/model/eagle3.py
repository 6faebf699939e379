"""EAGLE-3: one decoder layer over the target's hidden states, drafting a chain of tokens.

Law: a covered draft row is a function of the target's hidden state h_i and the token x_{i+1} alone;
rows that drafting writes from its own states are scratch, in slots that no coverage names. Context
rows need no attention, so they are one GEMM whatever the chunking. This module reads no checkpoint
and verifies nothing.

    row i        k, v from [norm(embed(x_{i+1})), norm(g_i)], RoPE at i, g_i = fc(captures of h_i)
    slot         i + 1: where its newest token is
    draft 1      the output of row n-1 (slot n, token: the anchor x_n)
    draft j > 1  a row at position n-2+j, slot n-1+j (scratch), from draft j-1 and its state a

            readable (rows < n-1)   row n-1      scratch ->
    slot    1 ............... n-1      n       n+1   n+2 ...  n+K-1
    drafts                             1        2     3  ...    K

Source: EAGLE-3, Li et al. 2025 (arXiv 2503.01840), chain drafting; fc_norm, norm_output: EAGLE-3.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.base.errors import ConfigError
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.layout import Domain, LayerGroup, RebuildFrom
from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool
from tandemkv.model.draft_head import Choice, DraftHead
from tandemkv.model.drafter import Drafter, DrafterSpec, DraftInputs, Drafts, DraftSegment
from tandemkv.model.eagle3_checkpoint import (
    MID,
    RANKING,
    check_tensors,
    draft_ids,
    fingerprint,
    num_taps,
)
from tandemkv.model.eagle3_config import Eagle3Config, default_taps
from tandemkv.model.target import Target

DEFAULT_DRAFT_VOCAB = 16384
"""Rows of the target's head to draft over, where the checkpoint ranks them and nobody asked."""


@dataclass(slots=True)
class _Chain:
    """One proposing sequence: row of the batch that holds position n-1, and what it drafted."""

    segment: DraftSegment
    index: int
    row: int
    num_drafts: int
    visible: SpanSet
    tokens: list[Tensor] = field(default_factory=list)
    probs: list[Tensor | None] = field(default_factory=list)
    gaps: list[Tensor] = field(default_factory=list)

    @property
    def anchor(self) -> int:
        return self.segment.num_rows


class Eagle3(Drafter):
    """An EAGLE-3 drafter bound to its target.

    weights: as `eagle3_checkpoint.read` returns them. draft_vocab: draft over that many rows of
    the target's head, the first of the checkpoint's ranking (None: DEFAULT_DRAFT_VOCAB).
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
        self._inv_freq, self._rope_scale = _rotary(config, origin)
        self._inv_freq = self._inv_freq.to(self.device)
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

        attn, mlp = f"{MID}self_attn.", f"{MID}mlp."
        self._fc = get("fc")
        self._fc_norm = None
        if self.config.fc_norm:
            self._fc_norm = torch.stack([get(f"fc_norm.{i}") for i in range(num)])
        self._input_norm = get("input_norm") if self.config.norm_before_fc else None
        self._qkv = get(*(f"{attn}{x}_proj" for x in "qkv"))
        self._q_rows = self.config.num_attention_heads * self.config.head_dim
        self._head_norms: tuple[Tensor, Tensor] | None = None
        if f"{attn}q_norm.weight" in weights:
            self._head_norms = (get(f"{attn}q_norm"), get(f"{attn}k_norm"))
        self._o = get(f"{attn}o_proj")
        self._gate_up, self._down = get(f"{mlp}gate_proj", f"{mlp}up_proj"), get(f"{mlp}down_proj")
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
        if inputs.features is not None and (chains or any(s.writes[0] for s in segments)):
            fused = self.fuse(inputs.features)
            rows = self._inputs(inputs.next_ids, fused)
            cos, sin = self._angles(inputs.positions)
            self._write_context(segments, rows, cos, sin)
            if chains:
                last = torch.tensor([c.row for c in chains], device=self.device)
                q = self._queries(rows[last], cos[last], sin[last])
                self._propose(chains, fused[last], q)
        return _collect(len(segments), chains)

    # ------------------------------------------------------------------ context rows

    def fuse(self, features: Tensor) -> Tensor:
        """g [R, d] from captures [R, m, d_target]."""
        x = features.to(self.device, self.dtype)
        eps = self.config.rms_norm_eps
        if self._fc_norm is not None:
            x = F.rms_norm(x, x.shape[-1:], eps=eps) * self._fc_norm
        x = x.flatten(1)
        if self._input_norm is not None:
            x = self._rms(x, self._input_norm)
        return F.linear(x, self._fc)

    def _inputs(self, next_ids: Tensor, state: Tensor) -> Tensor:
        """[R, 2d]: what a row is a function of; the embedding half first."""
        if self._embed is None:
            embedded = self.target.embed(next_ids).to(self.device, self.dtype)
        else:
            embedded = F.embedding(next_ids, self._embed)
        return torch.cat(
            (self._rms(embedded, self._embed_norm), self._rms(state, self._hidden_norm)), -1
        )

    def _write_context(
        self, segments: Sequence[DraftSegment], rows: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        if not any(s.writes[0] for s in segments):
            return
        kv = F.linear(rows, self._qkv[self._q_rows :]).unflatten(-1, (2, -1, self.config.head_dim))
        plan = GroupRows(self._bound(), [_context_segment(s) for s in segments])
        plan.write(0, self._rotate(kv[:, 0], cos, sin, 1), kv[:, 1])

    # ------------------------------------------------------------------ proposing

    def _chain(self, index: int, segment: DraftSegment) -> _Chain | None:
        """The chain this segment can draft; None if it wants none or row n-1 is not among its rows.

        Shortened to the pages held: a scratch slot without a page ends it.
        """
        row = segment.row_start + segment.num_rows - 1 - segment.position
        if not segment.num_drafts or not segment.row_start <= row < segment.row_stop:
            return None
        size, pages, n = self._bound().group.page_size, segment.pages[0], segment.num_rows
        num = 0
        while num < segment.num_drafts and (n + num) // size < len(pages):
            if pages[(n + num) // size] < 0:
                break
            num += 1
        visible = SpanSet(segment.readable[0])
        for start, stop in _clipped(segment):
            visible.add(start, stop)
        return _Chain(segment, index, row, num, visible) if num and n in visible else None

    def _propose(self, chains: list[_Chain], state: Tensor, q: Tensor) -> None:
        """Draft every chain. state [P, d], q [P, H, hd]: of the rows at position n-1."""
        longest = max(c.num_drafts for c in chains)
        starts = torch.tensor([c.anchor - 1 for c in chains], device=self.device)
        positions = starts[:, None] + torch.arange(longest, device=self.device)
        cos, sin = self._angles(positions)
        attended = self._plan(chains, 0).read(0, q)
        alive = list(range(len(chains)))
        for step in range(longest):
            state = self._layer(state, attended)
            normed = self._rms(state, self._norm)
            choice = self._choose([chains[i] for i in alive], normed, step)
            if self.config.norm_output:
                state = normed
            kept = [k for k, i in enumerate(alive) if chains[i].num_drafts > step + 1]
            if not kept:
                break
            tokens = choice.tokens
            if len(kept) < len(alive):
                keep = torch.tensor(kept, device=self.device)
                state, tokens = state[keep], tokens[keep]
                alive = [alive[k] for k in kept]
            attended = self._attend_scratch(
                [chains[i] for i in alive], tokens, state,
                cos[alive, step + 1], sin[alive, step + 1], step + 1,
            )  # fmt: skip

    def _choose(self, chains: list[_Chain], normed: Tensor, step: int) -> Choice:
        choice = self.head.choose(
            normed,
            [c.segment.params for c in chains],
            [c.segment.seed for c in chains],
            [c.anchor + 1 + step for c in chains],
            [c.anchor for c in chains],
        )
        for k, chain in enumerate(chains):
            chain.tokens.append(choice.tokens[k])
            chain.probs.append(choice.probs[k])
            chain.gaps.append(choice.gaps[k])
        return choice

    def _attend_scratch(
        self,
        chains: list[_Chain],
        tokens: Tensor,
        state: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: int,
    ) -> Tensor:
        """One row per chain at position n-1+step, written to slot n+step, attended."""
        qkv = F.linear(self._inputs(tokens, state), self._qkv)
        qkv = qkv.unflatten(-1, (-1, self.config.head_dim))
        num_q, num_kv = self.config.num_attention_heads, self.config.num_key_value_heads
        q = self._rotate(qkv[:, :num_q], cos, sin, 0)
        k = self._rotate(qkv[:, num_q : num_q + num_kv], cos, sin, 1)
        return self._plan(chains, step).attend(0, q, k, qkv[:, num_q + num_kv :])

    def _plan(self, chains: list[_Chain], step: int) -> GroupRows:
        """Attention of one row per chain at slot n+step; from step 1 on it writes that slot."""
        segments = []
        for k, chain in enumerate(chains):
            slot = chain.anchor + step
            writes: list[Span] = [(slot, slot + 1)] if step else []
            segments.append(
                AttentionSegment(k, k + 1, slot, chain.segment.pages[0], chain.visible, writes)
            )
        plan = GroupRows(self._bound(), segments)
        if step:
            for chain in chains:
                chain.visible.add(chain.anchor + step, chain.anchor + step + 1)
        return plan

    # ------------------------------------------------------------------ the layer

    def _layer(self, residual: Tensor, attended: Tensor) -> Tensor:
        """a [P, d] from the row's state and its attention output [P, H, hd]."""
        if self.config.norm_before_residual:
            residual = self._rms(residual, self._hidden_norm)
        x = residual + F.linear(attended.flatten(1), self._o)
        gate, up = F.linear(self._rms(x, self._post_norm), self._gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self._down)

    def _queries(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = F.linear(rows, self._qkv[: self._q_rows]).unflatten(-1, (-1, self.config.head_dim))
        return self._rotate(q, cos, sin, 0)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor, which: int) -> Tensor:
        """RoPE (half rotation) of [R, heads, hd], after the head norm if there is one."""
        if self._head_norms is not None:
            x = self._rms(x, self._head_norms[which])
        low, high = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., hd] at absolute positions [...]."""
        angles = positions.to(self.device)[..., None].float() * self._inv_freq
        angles = torch.cat((angles, angles), -1)
        scale = self._rope_scale
        return (angles.cos() * scale).to(self.dtype), (angles.sin() * scale).to(self.dtype)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)

    def _bound(self) -> KVPool:
        if self._pool is None:
            raise ValueError("eagle3: run before bind")
        return self._pool


def _clipped(segment: DraftSegment) -> list[Span]:
    """The slots to write that this segment's rows reach (slot = position + 1)."""
    first = segment.position + 1
    last = first + segment.row_stop - segment.row_start
    spans = [(max(a, first), min(b, last)) for a, b in segment.writes[0]]
    return [(a, b) for a, b in spans if a < b]


def _context_segment(segment: DraftSegment) -> AttentionSegment:
    """Rows that are written and attend to nothing but themselves (the read is never run)."""
    return AttentionSegment(
        segment.row_start,
        segment.row_stop,
        segment.position + 1,
        segment.pages[0],
        (),
        segment.writes[0],
    )


def _collect(num_segments: int, chains: list[_Chain]) -> Drafts:
    """Drafts of every segment, in order; one transfer from the device for all of them."""
    drafts = Drafts([[] for _ in range(num_segments)], [None] * num_segments, [])
    drafts.gaps = [float("inf")] * num_segments
    if not chains:
        return drafts
    tokens = torch.stack([t for c in chains for t in c.tokens]).tolist()
    gaps = torch.stack([g for c in chains for g in c.gaps]).tolist()
    done = 0
    for chain in chains:
        part = slice(done, done := done + len(chain.tokens))
        drafts.tokens[chain.index] = tokens[part]
        drafts.gaps[chain.index] = min(gaps[part])
        if chain.probs[0] is not None:
            drafts.probs[chain.index] = torch.stack(chain.probs)  # type: ignore[arg-type]
    return drafts


def _fit(target: Target, config: Eagle3Config, num: int, origin: str) -> tuple[int, ...]:
    """Captured layers, after refusing by name what does not fit the target."""
    spec = target.spec
    if config.captured_size != spec.hidden_size:
        raise ConfigError(
            f"{origin}: made for a target of hidden size {config.captured_size}, this target has"
            f" {spec.hidden_size}"
        )
    if config.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"{origin}: made for a vocabulary of {config.vocab_size}, this target has"
            f" {spec.vocab_size}"
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
    if RANKING in weights:
        ids = _ranked(weights[RANKING], draft_vocab, vocab_size, origin)
    elif draft_vocab is not None:
        raise ConfigError(
            f"{origin}: draft_vocab {draft_vocab} was asked for, but the checkpoint does not rank"
            f" its vocabulary (tensor {RANKING!r})"
        )
    if ids is not None and torch.equal(ids, torch.arange(vocab_size)):
        ids = None
    if own is not None:
        return own, ids
    head = target.head_weight
    return (head if ids is None else head[ids.to(head.device)]), ids


def _ranked(ranking: Tensor, num: int | None, vocab_size: int, origin: str) -> Tensor | None:
    """The first num ids of a ranking, ascending; None for the whole vocabulary."""
    num = min(DEFAULT_DRAFT_VOCAB, len(ranking)) if num is None else num
    if num >= vocab_size:
        return None
    if num > len(ranking):
        raise ConfigError(
            f"{origin}: draft_vocab {num} was asked for, the checkpoint ranks {len(ranking)} tokens"
        )
    return ranking[:num].long().sort().values


def _rotary(config: Eagle3Config, origin: str) -> tuple[Tensor, float]:
    """Inverse frequencies [hd / 2] and scale of the drafter's own RoPE."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(f"{origin}: RoPE of type {kind!r} is not a function of position alone")
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.head_dim * config.num_attention_heads,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            rope_parameters=dict(config.rope_parameters),
            max_position_embeddings=config.max_position_embeddings,
        )
    )
    return rotary.inv_freq.float(), float(rotary.attention_scaling)
