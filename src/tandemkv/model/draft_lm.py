"""An independent draft model: any smaller causal LM of the target's vocabulary, over its own pages.

Law: a draft row is a function of the tokens up to it, so it may be rebuilt without the target, and
rows written while proposing are true rows of whatever drafts turn out to be accepted. Tokens that
only one of the two models has are never drafted. This module verifies nothing; its forward pass is
the target's own (model/target.py), with the draft model's weights.

    run, per sequence   rows that are missing, ..., x_{n-1} | anchor x_n | draft 1 | ... | draft K-1
    slot (lookahead 0)                                 n-1  |     n      |  n+1    |     | n+K-1
    gives                                                   |  draft 1   | draft 2 |     | draft K

Source: speculative sampling with a draft model, Leviathan et al. 2022 (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.base.errors import ConfigError
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.layout import Domain, LayerGroup, RebuildFrom
from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool
from tandemkv.model.draft_head import Choice, choose, collect
from tandemkv.model.drafter import Drafter, DrafterSpec, DraftInputs, Drafts, DraftSegment
from tandemkv.model.target import Target

LARGEST_PADDING = 1024
"""Vocabularies that differ by more rows than this are not one vocabulary, padded."""


@dataclass(slots=True)
class _Proposal:
    """One proposing sequence: which slots each group can read."""

    segment: DraftSegment
    index: int
    num_drafts: int
    visible: list[SpanSet]

    @property
    def anchor(self) -> int:
        return self.segment.num_rows


class DraftModel(Drafter):
    """A causal LM drafting for `target`. model: loaded as a target of its own.

    Raises ConfigError if the vocabularies differ by more than padding.
    """

    def __init__(
        self,
        target: Target,
        model: Target,
        *,
        num_draft_tokens: int = 4,
        origin: str = "draft_model",
    ) -> None:
        wanted, given = target.spec.vocab_size, model.spec.vocab_size
        if abs(wanted - given) > LARGEST_PADDING:
            raise ConfigError(
                f"{origin}: draft model has a vocabulary of {given}, the target {wanted}: they are"
                " not the same vocabulary"
            )
        self.model = model
        self.vocab_size = wanted
        self._common = min(wanted, given)
        self._last_position = model.spec.max_model_len - 1
        self._pools: tuple[KVPool, ...] = ()
        self.spec = DrafterSpec(
            method="draft_model",
            fingerprint=model.spec.fingerprint,
            num_draft_tokens=num_draft_tokens,
            exact_proposals=True,
        )

    def layer_groups(self, page_size: int, dtype: str) -> tuple[LayerGroup, ...]:
        """The model's own groups, as draft groups; their dtype is the model's."""
        return tuple(
            msgspec.structs.replace(
                group,
                name=group.name.replace("target", "draft_model", 1),
                domain=Domain.DRAFT,
                lookahead=0,
                rebuild_from=RebuildFrom.TOKENS,
                pointwise=False,
            )
            for group in self.model.layer_groups(page_size)
        )

    def bind(self, pools: Sequence[KVPool]) -> None:
        self._pools = tuple(pools)

    @torch.inference_mode()
    def run(self, inputs: DraftInputs) -> Drafts:
        proposals = [
            p for i, s in enumerate(inputs.segments) if (p := self._proposal(i, s)) is not None
        ]
        hidden = self._context(inputs, proposals)
        steps: list[tuple[list[int], Choice]] = []
        while proposals:
            choice = self._choose(proposals, hidden, len(steps))
            steps.append(([p.index for p in proposals], choice))
            kept = [k for k, p in enumerate(proposals) if len(steps) < p.num_drafts]
            proposals = [proposals[k] for k in kept]
            if proposals:
                hidden = self._feed(proposals, choice.tokens[kept], len(steps))
        return collect(len(inputs.segments), steps)

    # ------------------------------------------------------------------ passes of the model

    def _context(self, inputs: DraftInputs, proposals: list[_Proposal]) -> Tensor:
        """Missing rows and anchors in one pass; the anchors' hidden states [P, d]."""
        num_rows = inputs.token_ids.shape[0]
        device = inputs.token_ids.device
        anchors = [(p.segment.tokens[p.anchor], p.anchor) for p in proposals]
        extra = torch.tensor(anchors, dtype=torch.long, device=device).reshape(-1, 2)
        if not num_rows + len(anchors):
            return torch.empty(0)
        tokens = torch.cat((inputs.token_ids, extra[:, 0]))
        positions = torch.cat((inputs.positions, extra[:, 1]))
        plans = []
        for group, pool in enumerate(self._pools):
            parts = [_context_rows(s, group) for s in inputs.segments]
            parts += [_one_row(p, group, num_rows + k, 0) for k, p in enumerate(proposals)]
            plans.append(GroupRows(pool, parts))
        self._see(proposals, 0)
        return self._forward(tokens, positions, plans)[num_rows:]

    def _feed(self, proposals: list[_Proposal], tokens: Tensor, step: int) -> Tensor:
        """One row per sequence: draft number `step`, at the position it would have. [P, d]."""
        where = torch.tensor([p.anchor + step for p in proposals], device=tokens.device)
        plans = [
            GroupRows(pool, [_one_row(p, group, k, step) for k, p in enumerate(proposals)])
            for group, pool in enumerate(self._pools)
        ]
        self._see(proposals, step)
        return self._forward(tokens, where, plans)

    def _forward(self, tokens: Tensor, positions: Tensor, plans: list[GroupRows]) -> Tensor:
        """Ids that only the target has, and positions past the model's own limit, are clamped."""
        tokens = tokens.clamp(max=self.model.spec.vocab_size - 1)
        return self.model.forward(tokens, positions.clamp(max=self._last_position), plans).hidden

    def _choose(self, proposals: list[_Proposal], hidden: Tensor, step: int) -> Choice:
        choice = choose(
            self.model.logits(hidden)[:, : self._common],
            [p.segment.params for p in proposals],
            [p.segment.seed for p in proposals],
            [p.anchor + 1 + step for p in proposals],
            [p.anchor for p in proposals],
        )
        missing = (0, self.vocab_size - self._common)
        choice.probs = [None if q is None else F.pad(q, missing) for q in choice.probs]
        return choice

    # ------------------------------------------------------------------ slots

    def _proposal(self, index: int, segment: DraftSegment) -> _Proposal | None:
        """What the segment wants, shortened to the slots whose pages are held in every group."""
        num = 0
        while num < segment.num_drafts and all(
            _held(segment.pages[group], segment.num_rows + num, pool.group.page_size)
            for group, pool in enumerate(self._pools)
        ):
            num += 1
        if not num:
            return None
        visible = []
        for group in range(len(self._pools)):
            slots = SpanSet(segment.readable[group])
            for start, stop in _clipped(segment, group):
                slots.add(start, stop)
            visible.append(slots)
        return _Proposal(segment, index, num, visible)

    def _see(self, proposals: list[_Proposal], step: int) -> None:
        for proposal in proposals:
            for slots in proposal.visible:
                slots.add(proposal.anchor + step, proposal.anchor + step + 1)


def _held(pages: Sequence[int], slot: int, page_size: int) -> bool:
    return slot // page_size < len(pages) and pages[slot // page_size] >= 0


def _clipped(segment: DraftSegment, group: int) -> list[Span]:
    """The slots to write that this segment's rows reach (slot = position)."""
    first = segment.position
    last = first + segment.row_stop - segment.row_start
    spans = [(max(a, first), min(b, last)) for a, b in segment.writes[group]]
    return [(a, b) for a, b in spans if a < b]


def _context_rows(segment: DraftSegment, group: int) -> AttentionSegment:
    return AttentionSegment(
        segment.row_start,
        segment.row_stop,
        segment.position,
        segment.pages[group],
        segment.readable[group],
        segment.writes[group],
    )


def _one_row(proposal: _Proposal, group: int, row: int, step: int) -> AttentionSegment:
    """The anchor (step 0) or draft `step`, at its slot."""
    slot = proposal.anchor + step
    return AttentionSegment(
        row,
        row + 1,
        slot,
        proposal.segment.pages[group],
        proposal.visible[group],
        [(slot, slot + 1)],
    )
