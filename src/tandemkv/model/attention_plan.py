"""What one sequence's rows read: which pages, which of their slots, and who may see what.

Law: a plan names exactly the pages that hold a slot some row may see, each once; every gathered
slot is cut off, masked for the rows that may not see it, or named dead (to be zeroed before it is
multiplied). This module touches no pool: it computes with slots, page numbers and small masks.

    readable     [0 ........ 21)            [40 ............ 70)
    pages of 16  0         1                2     3          4
    gathered     [ 0 .. 15 | 16 .. 20 dead ..31 | 32 dead 40 .. ]   one axis, T keys
    one span     no mask and nothing dead: the axis is cut to the span
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandemkv.base.spans import Span, SpanSet


@dataclass(slots=True)
class AttentionSegment:
    """One sequence's consecutive rows in a packed batch.

    row_start, row_stop: rows of the batch. slot: slot of row_start; rows are consecutive slots.
    pages: page table (index slot // page_size, -1 not held). readable: covered slots. writes:
    slots to write; those of this segment's rows become readable in this pass. causal: a query sees
    slots up to its own; otherwise every readable slot from the start of its window.
    """

    row_start: int
    row_stop: int
    slot: int
    pages: Sequence[int]
    readable: Iterable[Span]
    writes: Iterable[Span]
    causal: bool = True

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    def written(self) -> list[Span]:
        """The writes, cut to the slots of the segment's own rows."""
        first, last = self.slot, self.slot + self.num_rows
        clipped = [(max(start, first), min(stop, last)) for start, stop in self.writes]
        return [(start, stop) for start, stop in clipped if start < stop]


@dataclass(slots=True)
class ReadPlan:
    """A segment's read of numbered pages, laid one after the other on an axis of keys.

    numbers: indices into the page table. keys: the part of the axis that attention runs over.
    mask [num_rows, T]: who sees which of them, None for all. causal: the mask would be top-left
    causal, and is left out. dead: places on the axis that nobody may read. blind: rows, counted
    in the segment, that see nothing; their mask is open and their output is to be zero.
    """

    numbers: list[int] = field(default_factory=list)
    keys: Span = (0, 0)
    mask: Tensor | None = None
    causal: bool = False
    dead: list[int] = field(default_factory=list)
    blind: list[int] = field(default_factory=list)


def plan_read(
    segment: AttentionSegment, written: Iterable[Span], page_size: int, window: int | None
) -> ReadPlan:
    """Plan a segment of at least one row; the slots it has just written are readable too."""
    low = 0 if window is None else max(0, segment.slot - window + 1)
    visible = SpanSet(segment.readable)
    for start, stop in written:
        visible.add(start, stop)
    spans = visible.within(low, segment.slot + segment.num_rows if segment.causal else visible.stop)
    if not spans:
        return ReadPlan(blind=list(range(segment.num_rows)))
    numbers = page_numbers(spans, page_size)
    if len(spans) == 1:
        plan = _plan_span(segment, window, spans[0])
        origin = numbers[0] * page_size
        plan.keys = (spans[0][0] - origin, spans[0][1] - origin)
    else:
        plan = _plan_holes(segment, window, spans, numbers, page_size)
    plan.numbers = numbers
    _mend(plan)
    return plan


def page_numbers(spans: Sequence[Span], size: int) -> list[int]:
    """Table indices of the pages that hold any slot of the spans, each once, in order."""
    numbers: list[int] = []
    for start, stop in spans:
        low = start // size
        if numbers and numbers[-1] == low:
            low += 1
        numbers.extend(range(low, (stop - 1) // size + 1))
    return numbers


def _plan_span(segment: AttentionSegment, window: int | None, span: Span) -> ReadPlan:
    """Keys are the slots of one span, so most segments need no mask at all."""
    last = segment.slot + segment.num_rows - 1
    if window is None or span[0] >= last - window + 1:  # no row's window cuts the span
        if segment.num_rows == 1 or not segment.causal:
            return ReadPlan()
        if span == (segment.slot, last + 1):
            return ReadPlan(causal=True)
    return ReadPlan(mask=_visible(segment, window, torch.arange(*span)))


def _plan_holes(
    segment: AttentionSegment,
    window: int | None,
    spans: Sequence[Span],
    numbers: Sequence[int],
    size: int,
) -> ReadPlan:
    """Keys are all slots of the gathered pages; those outside the spans are masked and dead."""
    slots = (torch.tensor(numbers)[:, None] * size + torch.arange(size)).flatten()
    live = torch.zeros(len(slots), dtype=torch.bool)
    for start, stop in spans:
        live |= (slots >= start) & (slots < stop)
    return ReadPlan(
        keys=(0, len(slots)),
        mask=_visible(segment, window, slots) & live,
        dead=(~live).nonzero().flatten().tolist(),
    )


def _visible(segment: AttentionSegment, window: int | None, slots: Tensor) -> Tensor:
    """[num_rows, T]: whether a row's query may see a slot, by causality and window alone."""
    queries = segment.slot + torch.arange(segment.num_rows)[:, None]
    seen = torch.ones(segment.num_rows, len(slots), dtype=torch.bool)
    if segment.causal:
        seen &= slots <= queries
    if window is not None:
        seen &= slots > queries - window
    return seen


def _mend(plan: ReadPlan) -> None:
    """Open the mask of rows that see nothing (no softmax is finite there); drop a full mask."""
    if plan.mask is None:
        return
    if bool(plan.mask.all()):
        plan.mask = None
        return
    blind = ~plan.mask.any(1)
    if bool(blind.any()):
        plan.blind = blind.nonzero().flatten().tolist()
        plan.mask = plan.mask | blind[:, None]
