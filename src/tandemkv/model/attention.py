"""Attention over pages in plain torch: pools, and rows planned once per step, run once per layer.

Law: a query at slot s reads slots (readable U writes) within [s - W + 1, s] and nothing else; what
a page holds outside them, NaN included, cannot reach an output. A read copies the pages that hold
such slots, each once, and no others. This module allocates no pages and knows no sequence.

    pool    page 0                          page 1
            [layer 0: keys S, values S][layer 1: keys S, values S] ... [layer 0: ...
    gather  segment A: its key pages, its value pages; segment B: its key pages, ...
            one index_select a layer into one buffer, so the views the kernel reads never change
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.base.errors import ConfigError, InvariantError
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.layout import LayerGroup, Role

_PACKED_ROWS = 16
"""Up to this many rows of a segment, packing query heads onto their key head is faster on CPU."""


class KVPool:
    """The pages of one layer group on one device.

    data: [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim], page-major; index 2 is
    key, value. poison: free pages hold NaN, so that a read outside coverage shows.
    """

    __slots__ = ("_buffer", "data", "group", "num_pages", "pages_as_rows", "slots_as_rows")

    def __init__(
        self,
        group: LayerGroup,
        num_pages: int,
        device: torch.device | str = "cpu",
        *,
        poison: bool = False,
    ) -> None:
        if group.roles != (Role.KEY, Role.VALUE):
            roles = ", ".join(group.roles)
            raise ConfigError(f"layer group {group.name!r} holds {roles}: only key, value is paged")
        shape = (num_pages, len(group.layers), 2, group.page_size, *_row_shape(group))
        dtype = getattr(torch, group.dtype)
        try:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            size = num_pages * group.page_bytes / 2**20
            raise ConfigError(
                f"no memory for {num_pages} pages ({size:.0f} MiB) of layer group {group.name!r}"
            ) from error
        self.group = group
        self.num_pages = num_pages
        row = group.num_kv_heads * group.head_dim
        self.pages_as_rows = self.data.view(-1, group.page_size * row)
        self.slots_as_rows = self.data.view(-1, row)
        self._buffer = self.data.new_empty(0, group.page_size * row)
        if poison:
            self.data.fill_(float("nan"))

    def copy(self, src: int, dst: int) -> None:
        """Copy page src, all layers, to page dst."""
        self.data[dst].copy_(self.data[src])

    def read(self, pages: Sequence[int], slots: Sequence[int]) -> Tensor:
        """Rows of `slots` by page table `pages`: [len(slots), num_layers, 2, heads, head_dim]."""
        size = self.group.page_size
        held = [_held(pages, slot // size) for slot in slots]
        return self.data[held, :, :, [slot % size for slot in slots]]

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN: debug mode's mark of a free page."""
        self.data[list(pages)] = float("nan")

    def buffer(self, rows: int) -> Tensor:
        """Scratch for `rows` gathered page rows [rows, page_size * heads * head_dim], reused."""
        if len(self._buffer) < rows:
            self._buffer = self.data.new_empty(rows + rows // 4, self.pages_as_rows.shape[1])
        return self._buffer[:rows]


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


@dataclass(slots=True)
class _Read:
    """A segment's read: keys and values are fixed views of the gather buffer."""

    row_start: int
    row_stop: int
    keys: Tensor  # [1, Hkv, T, hd]
    values: Tensor
    mask: Tensor | None  # [Tq, T], additive
    causal: bool  # top-left causal, no mask needed
    packed: bool  # few rows: query heads are packed onto their key head
    tiled: Tensor | None = None  # the mask of packed rows [groups * Tq, T], made by the first layer


@dataclass(slots=True)
class _Plan:
    """Index lists that grow segment by segment; all in layer 0, in pool or buffer rows."""

    write_rows: list[int] = field(default_factory=list)  # rows of the batch
    write_slots: list[int] = field(default_factory=list)  # rows of slots_as_rows
    gather: list[int] = field(default_factory=list)  # rows of pages_as_rows
    dead: list[int] = field(default_factory=list)  # slot rows of the buffer that nobody may read
    blind: list[int] = field(default_factory=list)  # rows of the batch that see no slot at all
    reads: list[tuple] = field(default_factory=list)


class GroupRows:
    """The packed rows of one step in one layer group: planned once, used once per layer.

    `layer` counts within the pool (0 is group.layers[0]). R rows in the batch, H query heads.
    bytes_gathered: what reads have copied from pages so far, in bytes.
    """

    __slots__ = (
        "_blind",
        "_buffer",
        "_dead",
        "_gather",
        "_reads",
        "_whole",
        "_write_all",
        "_write_rows",
        "_write_slots",
        "bytes_gathered",
        "num_rows",
        "pool",
    )

    def __init__(self, pool: KVPool, segments: Sequence[AttentionSegment]) -> None:
        self.pool = pool
        self.bytes_gathered = 0
        self.num_rows = max((s.row_stop for s in segments), default=0)
        plan = _Plan()
        for segment in segments:
            writes = _plan_writes(plan, pool, segment)
            if segment.row_stop > segment.row_start:
                _plan_read(plan, pool, segment, writes)
        self._write_all = plan.write_rows == list(range(self.num_rows))
        self._write_rows = self._index(plan.write_rows)
        size = pool.group.page_size
        self._write_slots = self._per_layer(plan.write_slots, 2 * size)
        self._gather = self._per_layer(plan.gather, 2)
        self._buffer = pool.buffer(len(plan.gather))
        self._dead = self._index(plan.dead) if plan.dead else None
        self._blind = self._index(plan.blind) if plan.blind else None
        self._reads = [self._bind(*read) for read in plan.reads]
        self._whole = len(plan.reads) == 1 and plan.reads[0][:2] == (0, self.num_rows)

    @property
    def pages_read(self) -> int:
        """Pages whose keys and values one layer's read copies."""
        return len(self._buffer) // 2

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the rows whose slot is in `writes`. k, v: [R, Hkv, hd]."""
        if self._write_slots is None:
            return
        slots = self._write_slots[layer]
        k, v = k.flatten(1), v.flatten(1)
        if not self._write_all:
            k, v = k.index_select(0, self._write_rows), v.index_select(0, self._write_rows)
        rows = self.pool.slots_as_rows
        rows.index_copy_(0, slots, k)
        rows.index_copy_(0, slots + self.pool.group.page_size, v)

    def read(
        self,
        layer: int,
        q: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend. q [R, H, hd] -> [R, H, hd]; scale defaults to hd ** -0.5; sinks [H]."""
        if self._gather is not None:
            self._copy_pages(layer)
        if self._whole and self._blind is None:
            return _attend(self._reads[0], q, scale, softcap, sinks)
        out = torch.zeros_like(q)
        for read in self._reads:
            rows = slice(read.row_start, read.row_stop)
            out[rows] = _attend(read, q[rows], scale, softcap, sinks)
        if self._blind is not None:
            out.index_fill_(0, self._blind, 0.0)
        return out

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """write, then read. q [R, H, hd], k and v [R, Hkv, hd] -> [R, H, hd]."""
        self.write(layer, k, v)
        return self.read(layer, q, scale=scale, softcap=softcap, sinks=sinks)

    def _copy_pages(self, layer: int) -> None:
        torch.index_select(self.pool.pages_as_rows, 0, self._gather[layer], out=self._buffer)
        self.bytes_gathered += self._buffer.nbytes
        if self._dead is not None:
            heads, dim = _row_shape(self.pool.group)
            self._buffer.view(-1, heads * dim).index_fill_(0, self._dead, 0.0)

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.pool.data.device)

    def _per_layer(self, values: list[int], stride: int) -> tuple[Tensor, ...] | None:
        """The indices of layer 0 moved to every layer: num_layers tensors [len(values)]."""
        if not values:
            return None
        shift = torch.arange(len(self.pool.group.layers), device=self.pool.data.device) * stride
        return (self._index(values) + shift[:, None]).unbind(0)

    def _bind(self, start: int, stop: int, first: int, num: int, keys: Span, mask, causal) -> _Read:
        """Views of the buffer for a read of `num` pages gathered from buffer row `first`."""
        heads, dim = _row_shape(self.pool.group)
        pages = self._buffer[first : first + 2 * num].view(2, -1, heads, dim)
        k, v = pages[:, keys[0] : keys[1]].transpose(1, 2).unsqueeze(1).unbind(0)
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=self.pool.data.dtype)
            mask = bias.masked_fill_(~mask, float("-inf")).to(self.pool.data.device)
        packed = not causal and stop - start <= _PACKED_ROWS
        return _Read(start, stop, k, v, mask, causal, packed)


def _row_shape(group: LayerGroup) -> tuple[int, int]:
    return group.num_kv_heads, group.head_dim


def _held(pages: Sequence[int], number: int) -> int:
    page = pages[number] if number < len(pages) else -1
    if page < 0:
        raise InvariantError(f"page {number} of the table is used but not held")
    return page


def _plan_writes(plan: _Plan, pool: KVPool, segment: AttentionSegment) -> list[Span]:
    """Append the segment's writes, clipped to its rows; returns the clipped spans."""
    size, per_page = pool.group.page_size, 2 * len(pool.group.layers) * pool.group.page_size
    first, last = segment.slot, segment.slot + segment.row_stop - segment.row_start
    clipped = [(max(a, first), min(b, last)) for a, b in segment.writes]
    clipped = [(a, b) for a, b in clipped if a < b]
    for start, stop in clipped:
        offset = segment.row_start - first
        plan.write_rows.extend(range(start + offset, stop + offset))
        for slot in range(start, stop):
            page = _held(segment.pages, slot // size)
            plan.write_slots.append(page * per_page + slot % size)
    return clipped


def _plan_read(
    plan: _Plan, pool: KVPool, segment: AttentionSegment, writes: Iterable[Span]
) -> None:
    """Append the segment's gather and the read of it."""
    group, num_rows = pool.group, segment.row_stop - segment.row_start
    low = 0 if group.window is None else max(0, segment.slot - group.window + 1)
    visible = SpanSet(segment.readable)
    for start, stop in writes:
        visible.add(start, stop)
    high = segment.slot + num_rows if segment.causal else visible.stop
    spans = visible.within(low, high)
    if not spans:
        plan.blind.extend(range(segment.row_start, segment.row_stop))
        return
    numbers = _page_numbers(spans, group.page_size)
    first = len(plan.gather)
    base = [_held(segment.pages, number) * 2 * len(group.layers) for number in numbers]
    plan.gather.extend(base)
    plan.gather.extend(row + 1 for row in base)
    if len(spans) == 1:
        origin = numbers[0] * group.page_size
        keys = (spans[0][0] - origin, spans[0][1] - origin)
        mask, causal = _mask_of_span(segment, group.window, spans[0], num_rows)
    else:
        slots, live = _slots_of_pages(numbers, spans, group.page_size)
        keys, causal = (0, len(slots)), False
        mask = _visible(segment, group.window, slots, num_rows) & live
        dead = (~live).nonzero().flatten() + first * group.page_size
        plan.dead.extend(dead.tolist())
        plan.dead.extend((dead + len(slots)).tolist())
    if mask is not None:
        mask = _mend_blind_rows(plan, segment.row_start, mask)
    plan.reads.append(
        (segment.row_start, segment.row_stop, first, len(numbers), keys, mask, causal)
    )


def _page_numbers(spans: Sequence[Span], size: int) -> list[int]:
    """Table indices of the pages that hold any slot of the spans, each once, in order."""
    numbers: list[int] = []
    for start, stop in spans:
        low = start // size
        if numbers and numbers[-1] == low:
            low += 1
        numbers.extend(range(low, (stop - 1) // size + 1))
    return numbers


def _mask_of_span(
    segment: AttentionSegment, window: int | None, span: Span, num_rows: int
) -> tuple[Tensor | None, bool]:
    """(mask, top-left causal) for keys that are exactly the slots of one span."""
    last = segment.slot + num_rows - 1
    windowed = window is not None and span[0] < last - window + 1
    if not windowed:
        if num_rows == 1 or not segment.causal:
            return None, False
        if span == (segment.slot, last + 1):
            return None, True
    return _visible(segment, window, torch.arange(*span), num_rows), False


def _slots_of_pages(
    numbers: Sequence[int], spans: Sequence[Span], size: int
) -> tuple[Tensor, Tensor]:
    """Slots [T] that the gathered pages hold, and whether each lies in a span [T]."""
    slots = (torch.tensor(numbers)[:, None] * size + torch.arange(size)).flatten()
    live = torch.zeros(len(slots), dtype=torch.bool)
    for start, stop in spans:
        live |= (slots >= start) & (slots < stop)
    return slots, live


def _visible(segment: AttentionSegment, window: int | None, slots: Tensor, num_rows: int) -> Tensor:
    """[num_rows, T]: whether a row's query may see a slot, by causality and window alone."""
    queries = segment.slot + torch.arange(num_rows)[:, None]
    seen = torch.ones(num_rows, len(slots), dtype=torch.bool)
    if segment.causal:
        seen &= slots <= queries
    if window is not None:
        seen &= slots > queries - window
    return seen


def _mend_blind_rows(plan: _Plan, row_start: int, mask: Tensor) -> Tensor | None:
    """Rows that see nothing get a finite softmax; their output is zeroed. All True: no mask."""
    if bool(mask.all()):
        return None
    blind = ~mask.any(1)
    if bool(blind.any()):
        plan.blind.extend((blind.nonzero().flatten() + row_start).tolist())
        mask = mask | blind[:, None]
    return mask


def _attend(
    read: _Read, q: Tensor, scale: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [Tq, H, hd] -> [Tq, H, hd] over one segment's keys."""
    if softcap is not None or sinks is not None:
        return _attend_plainly(read, q, scale, softcap, sinks)
    if read.packed:
        return _attend_packed(read, q, scale)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        read.keys,
        read.values,
        attn_mask=read.mask,
        is_causal=read.causal,
        scale=scale,
        enable_gqa=q.shape[1] != read.keys.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _attend_packed(read: _Read, q: Tensor, scale: float | None) -> Tensor:
    """The query heads that share a key head become rows of one product: keys are read once."""
    num_rows, num_heads, dim = q.shape
    groups = num_heads // read.keys.shape[1]
    if num_rows == 1:
        rows = q.view(1, -1, groups, dim)
    else:
        rows = q.transpose(0, 1).reshape(1, -1, groups * num_rows, dim)
    if read.mask is not None and read.tiled is None:
        read.tiled = read.mask.repeat(groups, 1)
    out = F.scaled_dot_product_attention(
        rows, read.keys, read.values, attn_mask=read.tiled, scale=scale
    )
    return out.reshape(num_heads, num_rows, dim).transpose(0, 1)


def _attend_plainly(
    read: _Read, q: Tensor, scale: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax attention spelled out, for what the fused kernel lacks: softcap and sinks."""
    num_rows, num_heads, dim = q.shape
    groups = num_heads // read.keys.shape[1]
    keys = read.keys[0].repeat_interleave(groups, 0)
    values = read.values[0].repeat_interleave(groups, 0)
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float()
    if read.mask is not None:
        scores = scores + read.mask
    elif read.causal:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.float().view(-1, 1, 1).expand(num_heads, num_rows, 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return (weights.to(q.dtype) @ values).transpose(0, 1)
