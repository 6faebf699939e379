"""A step plan as tensors: packed rows of every segment, and where each layer group finds its KV.

Law: rows are packed in the order of the plan's segments; row r of segment s is position
start + (r - row_start), and sits in slot position + lookahead of every group. A verify segment's
rejected rows never reach the drafter. This module runs no model.

    packed rows   | seg 0: a..b | seg 1: n, n+1, .. n+k | seg 2: ...
    drafter rows  | a..b        | n .. n+accepted       | ...
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from tandemkv.base.spans import Span
from tandemkv.kv.layout import Layout, RebuildFrom
from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool
from tandemkv.model.drafter import DraftInputs, DraftSegment
from tandemkv.sched.batch import Segment, StepPlan


@dataclass(slots=True)
class TargetInputs:
    """token_ids, positions: [R]; rows: one per target group; starts: first row by segment."""

    token_ids: Tensor
    positions: Tensor
    rows: list[GroupRows]
    starts: list[int]


def target_inputs(plan: StepPlan, layout: Layout, pools: Sequence[KVPool]) -> TargetInputs:
    """Pack the plan's target rows; a segment may have none."""
    tokens: list[int] = []
    positions: list[int] = []
    starts: list[int] = []
    for segment in plan.segments:
        starts.append(len(tokens))
        tokens.extend(segment.tokens)
        positions.extend(range(segment.start, segment.stop))
    rows: list[GroupRows] = []
    if tokens:
        for group in layout.target_groups:
            parts = [
                AttentionSegment(
                    row_start=row,
                    row_stop=row + segment.stop - segment.start,
                    slot=segment.start,
                    pages=segment.seq.pages[group],
                    readable=list(segment.seq.coverage[group]),
                    writes=segment.write[group],
                )
                for segment, row in zip(plan.segments, starts, strict=True)
                if segment.stop > segment.start
            ]
            rows.append(GroupRows(pools[group], parts))
    device = pools[0].data.device
    return TargetInputs(
        token_ids=torch.tensor(tokens, dtype=torch.long, device=device),
        positions=torch.tensor(positions, dtype=torch.long, device=device),
        rows=rows,
        starts=starts,
    )


def final_rows(segment: Segment, num_accepted: int) -> int:
    """How many of a segment's target rows are final: a whole chunk, or anchor + accepted drafts."""
    if segment.num_drafts:
        return 1 + num_accepted
    return segment.stop - segment.start


def clip(spans: Sequence[Span], stop: int) -> list[Span]:
    """The part of sorted spans below `stop`."""
    return [(a, min(b, stop)) for a, b in spans if a < stop]


def draft_inputs(
    plan: StepPlan,
    layout: Layout,
    emitted: Sequence[Sequence[int]],
    accepted: Sequence[int],
    starts: Sequence[int],
    features: Tensor | None,
    device: torch.device,
    *,
    skip: Set[int] = frozenset(),
    exact_proposals: bool,
) -> tuple[DraftInputs, list[int]] | None:
    """What the drafter gets after the target's pass; None when no segment has work for it.

    emitted, accepted: per segment, the tokens the step emits and how many of them were drafts.
    features: [R, m, d] of the packed target rows. skip: segments whose requests end. Returns the
    inputs and, per draft segment, the index of the plan's segment.
    """
    groups = layout.draft_groups
    from_tokens = any(layout.groups[g].rebuild_from is RebuildFrom.TOKENS for g in groups)
    segments: list[DraftSegment] = []
    owners: list[int] = []
    token_ids: list[int] = []
    next_ids: list[int] = []
    positions: list[int] = []
    gather: list[int] = []
    for i, segment in enumerate(plan.segments):
        if i in skip:
            continue
        count = final_rows(segment, accepted[i])
        stop = segment.start + count
        known = [*segment.seq.tokens, *emitted[i]] if emitted[i] else segment.seq.tokens
        writes = [clip(segment.write[g], stop + layout.groups[g].lookahead) for g in groups]
        readable = [list(segment.seq.coverage[g]) for g in groups]
        if exact_proposals and segment.num_drafts:
            # rows of the anchor and of accepted drafts were written, truly, while proposing
            fed = segment.start + min(accepted[i] + 1, segment.num_drafts)
            writes = [[(max(a, fed), b) for a, b in spans if b > fed] for spans in writes]
            for spans in readable:
                spans.append((segment.start, fed))
        wants = segment.num_propose if emitted[i] or not segment.samples else 0
        if not wants and not any(writes):
            continue
        first = segment.start
        if from_tokens:
            first = min((spans[0][0] for spans in writes if spans), default=stop)
        row = len(token_ids)
        token_ids.extend(known[first:stop])
        next_ids.extend(known[first + 1 : stop + 1])
        positions.extend(range(first, stop))
        if not from_tokens:
            gather.extend(range(starts[i], starts[i] + count))
        segments.append(
            DraftSegment(
                row_start=row,
                row_stop=row + stop - first,
                position=first,
                pages=[segment.seq.pages[g] for g in groups],
                readable=readable,
                writes=writes,
                tokens=known,
                num_rows=stop,
                num_drafts=wants,
                params=segment.request.params,
                seed=segment.request.seed,
            )
        )
        owners.append(i)
    if not segments:
        return None
    picked = features
    if features is not None and len(gather) != features.shape[0]:
        picked = features[torch.tensor(gather, dtype=torch.long, device=device)]
    return (
        DraftInputs(
            token_ids=torch.tensor(token_ids, dtype=torch.long, device=device),
            next_ids=torch.tensor(next_ids, dtype=torch.long, device=device),
            positions=torch.tensor(positions, dtype=torch.long, device=device),
            features=picked,
            segments=segments,
        ),
        owners,
    )
