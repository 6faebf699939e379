"""DFlash and DSpark: a draft block in one pass, over a context projected from the target's states.

Law: a context row is a function of its own position's captures alone, all layers at once, so any
row can be rebuilt by itself and no draft row ever depends on a draft. The draft block's own keys
and values reach no page. The trunk always runs its trained number of rows, whatever K is asked:
draft j is the same for every K >= j. This module reads no checkpoint and verifies nothing.

    context row i      k, v of every layer from c_i = norm(fc(captures of i)), RoPE at i, slot i
    draft block at n   inputs [x_n, MASK, MASK, ...] at positions n, n+1, ...

                       DFlash: K + 1 rows              DSpark: K rows
    row                0    1    2   ..  K             0    1    2   .. K-1
    position           n   n+1  n+2     n+K            n   n+1  n+2     n+K-1
    predicts           -   n+1  n+2     n+K           n+1  n+2  n+3     n+K

Sources: DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandemkv.base.errors import ConfigError, InvariantError
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.layout import Domain, LayerGroup, RebuildFrom
from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool
from tandemkv.model.block_attention import BlockContext
from tandemkv.model.dflash_checkpoint import RANKING, check_tensors
from tandemkv.model.dflash_config import DFlashConfig
from tandemkv.model.dflash_trunk import Trunk, group_name
from tandemkv.model.draft_checkpoint import fingerprint
from tandemkv.model.draft_head import Choice, DraftHead, collect, ranked_ids
from tandemkv.model.drafter import (
    Drafter,
    DrafterSpec,
    DraftInputs,
    Drafts,
    DraftSegment,
    check_made_for,
)
from tandemkv.model.dspark_heads import ConfidenceHead, MarkovHead
from tandemkv.model.target import Target

CONTEXT_BYTES = 256 << 20
"""Of context rows that draft blocks of one pass copy out of their pages, at most."""
_NO_GAP = float("inf")


@dataclass(slots=True)
class _Block:
    """One proposing sequence: its place among the segments and what it reads, per group."""

    index: int
    segment: DraftSegment
    visible: list[list[Span]]

    @property
    def anchor(self) -> int:
        return self.segment.num_rows

    def context(self) -> int:
        """Slots of its longest context."""
        return max((sum(b - a for a, b in spans) for spans in self.visible), default=0)

    @property
    def anchor_token(self) -> int:
        return self.segment.tokens[self.segment.num_rows]


@dataclass(slots=True)
class _Drawn:
    """Drafts of P blocks: tokens and gaps [P, K]; probs: per block and draft q [V], None where it
    was the best; chance [P, K]: to be accepted once those before are, None where nobody asks."""

    tokens: Tensor
    gaps: Tensor
    probs: list[list[Tensor | None]]
    chance: Tensor | None


class DFlash(Drafter):
    """A DFlash or DSpark drafter bound to its target.

    weights: as `dflash_checkpoint.read` returns them. draft_vocab: draft over that many rows of
    the target's head, the first of the checkpoint's ranking. confidence_threshold: end a draft
    block before the first draft, but not the very first, whose predicted chance to survive is lower
    (None: never).
    Raises ConfigError, naming both values, where drafter and target do not fit.
    """

    def __init__(
        self,
        target: Target,
        config: DFlashConfig,
        weights: Mapping[str, Tensor],
        *,
        num_draft_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        draft_vocab: int | None = None,
        confidence_threshold: float | None = None,
        origin: str = "dflash",
    ) -> None:
        check_tensors(config, weights, origin)
        _fit(target, config, weights, origin)
        self.config = config
        self.target = target
        self.dtype = dtype or target.head_weight.dtype
        self.device = torch.device(device or target.head_weight.device)
        self._threshold = _threshold(config, confidence_threshold, origin)
        self._pools: list[KVPool] = []
        self._take_weights(weights, draft_vocab, origin)
        digest = hashlib.sha256(fingerprint(config, weights).encode())
        self.spec = DrafterSpec(
            method=config.method,
            fingerprint=digest.hexdigest(),
            num_draft_tokens=_num_drafts(config, num_draft_tokens, origin),
            taps=config.taps,
        )

    def _take_weights(
        self, weights: Mapping[str, Tensor], draft_vocab: int | None, origin: str
    ) -> None:
        config = self.config
        embedding = weights.get("embed_tokens.weight", self.target.embedding_weight)
        self.trunk = Trunk(config, weights, embedding, self.device, self.dtype, origin)
        head, ids = weights.get("lm_head.weight"), None
        if head is None:
            ids = ranked_ids(self.target, weights.get(RANKING), draft_vocab, origin)
            head = self.target.head_weight
            head = head if ids is None else head[ids.to(head.device)]
        elif draft_vocab is not None:
            raise ConfigError(f"{origin}: draft_vocab does not apply, it has a head of its own")
        self.head = DraftHead(
            head.to(self.device, self.dtype), ids, self.target.spec.vocab_size, screen=False
        )
        self._markov = self._confidence = None
        if config.markov_rank:
            self._markov = MarkovHead(config, weights, ids, self.device, self.dtype)
        if config.confidence:
            self._confidence = ConfidenceHead(config, weights, self.device)

    # ------------------------------------------------------------------ the contract

    def layer_groups(self, page_size: int, dtype: str) -> tuple[LayerGroup, ...]:
        config = self.config
        return tuple(
            LayerGroup(
                name=config.method if len(self.trunk.groups) == 1 else group_name(config, window),
                domain=Domain.DRAFT,
                layers=layers,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                dtype=dtype,
                page_size=page_size,
                window=window,
                lookahead=0,
                rebuild_from=RebuildFrom.HIDDEN,
                pointwise=True,
            )
            for window, layers in self.trunk.groups
        )

    def bind(self, pools: Sequence[KVPool]) -> None:
        self._pools = list(pools)

    @torch.inference_mode()
    def run(self, inputs: DraftInputs) -> Drafts:
        if not self._pools:
            raise ValueError(f"{self.spec.method}: run before bind")
        segments = inputs.segments
        if any(spans for s in segments for spans in s.writes):
            self._write(inputs)
        blocks = [self._block(i, s) for i, s in enumerate(segments) if s.num_drafts]
        if not blocks:
            return collect(len(segments), ())
        drafts = Drafts([[] for _ in segments], [None] * len(segments), [_NO_GAP] * len(segments))
        for part in self._parts(blocks):
            tokens, anchors = [b.anchor_token for b in part], [b.anchor for b in part]
            hidden = self.trunk.forward(tokens, anchors, self._contexts(part))
            self._collect(drafts, part, self._draw(part, hidden))
        return drafts

    # ------------------------------------------------------------------ context rows

    def _write(self, inputs: DraftInputs) -> None:
        """Keys and values of all layers for the rows that the segments ask for."""
        if inputs.features is None:
            raise InvariantError(f"{self.spec.method}: rows came without the target's states")
        context = self.trunk.context(inputs.features, inputs.positions)
        for g, (_, layers) in enumerate(self.trunk.groups):
            rows = [_context_segment(s, g) for s in inputs.segments]
            written = GroupRows(self._pools[g], rows, reads=False)
            for place, layer in enumerate(layers):
                written.write(place, *context[layer])

    # ------------------------------------------------------------------ proposing

    def _block(self, index: int, segment: DraftSegment) -> _Block:
        """The draft block of a segment; it reads what is covered and what this run has written."""
        visible: list[list[Span]] = []
        n = segment.num_rows
        for g, pool in enumerate(self._pools):
            seen = SpanSet(segment.readable[g])
            for start, stop in _clipped(segment, g):
                seen.add(start, stop)
            visible.append(seen.within(pool.group.first_needed(n), n))
        return _Block(index, segment, visible)

    def _parts(self, blocks: list[_Block]) -> list[list[_Block]]:
        """Draft blocks that share a pass: their contexts, padded to the longest, stay small.

        A context is copied out of its pages for the pass; a longer one than CONTEXT_BYTES has a
        pass to itself.
        """
        row = sum(pool.group.slot_bytes for pool in self._pools)
        parts: list[list[_Block]] = []
        for block in sorted(blocks, key=_Block.context, reverse=True):
            room = len(parts[-1]) + 1 if parts else 0
            if room and room * row * parts[-1][0].context() <= CONTEXT_BYTES:
                parts[-1].append(block)
            else:
                parts.append([block])
        return parts

    def _contexts(self, blocks: list[_Block]) -> list[BlockContext]:
        """What the draft blocks read, per group."""
        return [
            BlockContext(
                self._pools[g],
                [b.segment.pages[g] for b in blocks],
                [b.visible[g] for b in blocks],
                [b.anchor for b in blocks],
                self.config.num_rows,
                [self.config.is_causal(layer) for layer in layers],
            )
            for g, (_, layers) in enumerate(self.trunk.groups)
        ]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[R, d] -> [R, V_draft] float32."""
        config, logits = self.config, self.head.logits(hidden, 0)
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_softcap:
            logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
        return logits

    def _draw(self, blocks: list[_Block], hidden: Tensor) -> _Drawn:
        """Drafts 1..K of every block; all at once where none depends on another."""
        num, longest = len(blocks), max(self._wanted(b) for b in blocks)
        hidden = hidden[:, :longest]
        logits = self._logits(hidden.flatten(0, 1)).view(num, longest, -1)
        if self._markov is not None:
            return self._draw_in_turn(self._markov, blocks, hidden, logits)
        rows = [(block, step) for block in blocks for step in range(longest)]
        choice = self._pick(logits.flatten(0, 1), rows)
        chance = None
        if self._threshold is not None and self._confidence is not None:
            chance = self._confidence.chance(hidden.flatten(0, 1), None).view(num, longest)
        probs = [choice.probs[i * longest : (i + 1) * longest] for i in range(num)]
        shape = (num, longest)
        return _Drawn(choice.tokens.view(shape), choice.gaps.view(shape), probs, chance)

    def _draw_in_turn(
        self, markov: MarkovHead, blocks: list[_Block], hidden: Tensor, logits: Tensor
    ) -> _Drawn:
        """Draft after draft, each with the bias of the one before."""
        tokens = torch.tensor([b.anchor_token for b in blocks], device=self.device)
        state: Tensor | None = None
        choices: list[Choice] = []
        chances: list[Tensor] = []
        for step in range(hidden.shape[1]):
            embedded = markov.embed(tokens)
            if self._threshold is not None and self._confidence is not None:
                chances.append(self._confidence.chance(hidden[:, step], embedded))
            bias, state = markov.bias(embedded, hidden[:, step], state)
            choices.append(self._pick(logits[:, step] + bias, [(b, step) for b in blocks]))
            tokens = choices[-1].tokens
        return _Drawn(
            torch.stack([c.tokens for c in choices], 1),
            torch.stack([c.gaps for c in choices], 1),
            [list(each) for each in zip(*(c.probs for c in choices), strict=True)],
            torch.stack(chances, 1) if chances else None,
        )

    def _pick(self, logits: Tensor, rows: Sequence[tuple[_Block, int]]) -> Choice:
        return self.head.pick(
            logits,
            [b.segment.params for b, _ in rows],
            [b.segment.seed for b, _ in rows],
            [b.anchor + 1 + step for b, step in rows],
            [b.anchor for b, _ in rows],
        )

    def _collect(self, drafts: Drafts, blocks: list[_Block], drawn: _Drawn) -> None:
        """Put the drafts in place, cut to what was wanted and to what confidence lets through.

        Whether draft k is kept is known before it is drawn, so the cut leaves output lossless. The
        first draft always goes: a step without one would count in no acceptance length.
        """
        tokens, gaps = drawn.tokens.tolist(), drawn.gaps.tolist()
        kept = [self._wanted(b) for b in blocks]
        if drawn.chance is not None and self._threshold is not None:
            alive = (drawn.chance.cumprod(1) >= self._threshold).cumprod(1).sum(1).tolist()
            kept = [min(num, max(1, n)) for num, n in zip(kept, alive, strict=True)]
        for i, (block, num) in enumerate(zip(blocks, kept, strict=True)):
            if not num:
                continue
            drafts.tokens[block.index] = tokens[i][:num]
            drafts.gaps[block.index] = min(gaps[i][:num])
            probs = [q for q in drawn.probs[i][:num] if q is not None]
            drafts.probs[block.index] = torch.stack(probs) if probs else None

    def _wanted(self, block: _Block) -> int:
        return min(block.segment.num_drafts, self.config.num_draft_tokens)


def _clipped(segment: DraftSegment, g: int) -> list[Span]:
    """The slots to write in group g that this segment's rows reach (slot = position)."""
    first = segment.position
    last = first + segment.row_stop - segment.row_start
    spans = [(max(a, first), min(b, last)) for a, b in segment.writes[g]]
    return [(a, b) for a, b in spans if a < b]


def _context_segment(segment: DraftSegment, g: int) -> AttentionSegment:
    """Rows that are written and attend to nothing."""
    return AttentionSegment(
        segment.row_start,
        segment.row_stop,
        segment.position,
        segment.pages[g],
        (),
        segment.writes[g],
    )


def _num_drafts(config: DFlashConfig, asked: int | None, origin: str) -> int:
    if asked is not None and asked > config.num_draft_tokens:
        raise ConfigError(
            f"{origin}: num_draft_tokens {asked} was asked for, it was trained to draft"
            f" {config.num_draft_tokens}"
        )
    return config.num_draft_tokens if asked is None else asked


def _threshold(config: DFlashConfig, asked: float | None, origin: str) -> float | None:
    if asked is None:
        return None
    if not config.confidence:
        raise ConfigError(
            f"{origin}: confidence_threshold {asked} was asked for, it has no confidence head"
        )
    if not 0.0 <= asked <= 1.0:
        raise ConfigError(f"{origin}: confidence_threshold must be in [0, 1], got {asked}")
    return asked


def _fit(target: Target, config: DFlashConfig, weights: Mapping[str, Tensor], origin: str) -> None:
    """Refuse by name what does not fit the target."""
    spec = target.spec
    check_made_for(
        spec,
        origin,
        captured_size=config.captured_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_target_layers,
    )
    if config.hidden_size != spec.hidden_size and not (
        "embed_tokens.weight" in weights and "lm_head.weight" in weights
    ):
        raise ConfigError(
            f"{origin}: hidden size {config.hidden_size} is not the target's {spec.hidden_size}, so"
            " it needs embed_tokens and lm_head of its own"
        )
    for tap in config.taps:
        if not -1 <= tap < spec.num_layers:
            raise ConfigError(
                f"{origin}: captures the output of layer {tap}, this target has layers"
                f" 0..{spec.num_layers - 1}"
            )
    mask = config.mask_token_id
    if mask is not None and not 0 <= mask < spec.vocab_size:
        raise ConfigError(f"{origin}: mask token {mask} is outside the target's vocabulary")
