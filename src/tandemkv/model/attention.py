"""Attention over pages in plain torch: pools, and rows planned once per step, run once per layer.

Law: a query at slot s reads slots (readable U writes) within [s - W + 1, s] and nothing else; what
a page holds outside them, NaN included, cannot reach an output. A read copies the pages that hold
such slots, each once, and no others. This module allocates no pages and knows no sequence.

    pool    page 0                          page 1
            [layer 0: keys S, values S][layer 1: keys S, values S] ... [layer 0: ...
    gather  segment A: its key pages, its value pages; segment B: its key pages, ...
            one index_select a round into one buffer, so the views the kernel reads never change
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.base.errors import ConfigError, InvariantError
from tandemkv.base.spans import Span
from tandemkv.kv.layout import LayerGroup, Role
from tandemkv.model.attention_plan import AttentionSegment, ReadPlan, plan_read

__all__ = ["AttentionSegment", "GroupRows", "KVPool"]

_PACKED_ROWS = 16
"""Up to this many rows of a segment, packing query heads onto their key head is faster on CPU."""

_ROUND_BYTES = 2**20
"""Pages gathered before they are read, so that they are still in the core's cache when they are."""


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
        kv_shape = (group.num_kv_heads, group.head_dim)
        shape = (num_pages, len(group.layers), 2, group.page_size, *kv_shape)
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

    def rows(self, pages: Sequence[int], spans: Iterable[Span]) -> Tensor:
        """Where layer 0 keeps the keys of covered slots: rows of slots_as_rows, on the CPU.

        Values lie page_size rows further, each next layer 2 * page_size. pages: a page table.
        """
        size, per_page = self.group.page_size, 2 * len(self.group.layers) * self.group.page_size
        parts: list[Tensor] = []
        for start, stop in spans:
            slots = torch.arange(start, stop)
            first, last = start // size, (stop - 1) // size + 1
            held = torch.tensor([_held(pages, number) for number in range(first, last)])
            parts.append(held[slots // size - first] * per_page + slots % size)
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN: debug mode's mark of a free page."""
        self.data[list(pages)] = float("nan")

    def buffer(self, rows: int) -> Tensor:
        """Scratch for `rows` gathered page rows [rows, page_size * heads * head_dim], reused."""
        if len(self._buffer) < rows:
            self._buffer = self.data.new_empty(rows + rows // 4, self.pages_as_rows.shape[1])
        return self._buffer[:rows]


@dataclass(slots=True)
class _Read:
    """A segment's read, bound: keys and values are views of the buffer, the same for all layers."""

    row_start: int
    row_stop: int
    keys: Tensor  # [1, Hkv, T, hd]
    values: Tensor
    mask: Tensor | None  # [Tq, T], additive
    causal: bool  # top-left causal, no mask needed
    packed: bool  # few rows: query heads are packed onto their key head
    tiled: Tensor | None = None  # the mask of packed rows [groups * Tq, T], made by the first layer


class _Round:
    """Segments whose pages are gathered together: as many as the buffer keeps near the core."""

    __slots__ = ("dead", "gather", "plans", "reads", "view")

    def __init__(self) -> None:
        self.gather: list[int] = []  # rows of pages_as_rows in layer 0: one to a row of the buffer
        self.plans: list[tuple[AttentionSegment, ReadPlan, int]] = []
        self.reads: list[_Read] = []
        self.view: Tensor  # the part of the buffer that is filled
        self.dead: Tensor | None = None  # slot rows of the buffer that nobody may read

    def add(self, segment: AttentionSegment, plan: ReadPlan, rows: list[int]) -> None:
        """rows: where the plan's pages have their keys; values follow one row later."""
        self.plans.append((segment, plan, len(self.gather)))
        self.gather.extend(rows)
        self.gather.extend([row + 1 for row in rows])


class GroupRows:
    """The packed rows of one step in one layer group: planned once, used once per layer.

    `layer` counts within the pool (0 is group.layers[0]). R rows in the batch, H query heads.
    reads: False plans writes alone (context rows of a drafter, which attend to nothing).
    bytes_gathered: what reads have copied from pages so far, in bytes.
    """

    __slots__ = (
        "_blind",
        "_gather",
        "_rounds",
        "_sizes",
        "_whole",
        "_write_all",
        "_write_rows",
        "_write_slots",
        "bytes_gathered",
        "num_rows",
        "pool",
    )

    def __init__(
        self, pool: KVPool, segments: Sequence[AttentionSegment], *, reads: bool = True
    ) -> None:
        self.pool = pool
        self.bytes_gathered = 0
        self.num_rows = max((s.row_stop for s in segments), default=0)
        self._rounds: list[_Round] = []
        rows: list[int] = []
        slots: list[int] = []
        blind: list[int] = []
        for segment in segments:
            written = segment.written()
            self._plan_writes(segment, written, rows, slots)
            if segment.num_rows and reads:
                blind.extend(self._plan_read(segment, written))
        self._write_all = rows == list(range(self.num_rows))
        self._write_rows = self._index(rows)
        self._write_slots = self._per_layer(slots, 2 * pool.group.page_size)
        self._sizes = [len(r.gather) for r in self._rounds]
        self._gather = self._per_layer([row for r in self._rounds for row in r.gather], 2)
        self._blind = self._index(blind) if blind else None
        self._bind(pool.buffer(max(self._sizes, default=0)))
        reads = [read for r in self._rounds for read in r.reads]
        alone = len(reads) == 1 and (reads[0].row_start, reads[0].row_stop) == (0, self.num_rows)
        self._whole = reads[0] if alone and not blind else None

    @property
    def pages_read(self) -> int:
        """Pages whose keys and values one layer's read copies."""
        return sum(self._sizes) // 2

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
        if self._whole is not None:
            self._copy_pages(self._rounds[0], self._gather[layer])
            return _attend(self._whole, q, scale, softcap, sinks)
        out = torch.zeros_like(q)
        indices = self._gather[layer].split(self._sizes) if self._rounds else ()
        for batch, index in zip(self._rounds, indices, strict=True):
            self._copy_pages(batch, index)
            for read in batch.reads:
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

    def _copy_pages(self, batch: _Round, index: Tensor) -> None:
        torch.index_select(self.pool.pages_as_rows, 0, index, out=batch.view)
        self.bytes_gathered += batch.view.nbytes
        if batch.dead is not None:
            row = batch.view.shape[1] // self.pool.group.page_size
            batch.view.view(-1, row).index_fill_(0, batch.dead, 0.0)

    def _plan_writes(
        self, segment: AttentionSegment, written: list[Span], rows: list[int], slots: list[int]
    ) -> None:
        """Append the rows of the batch to write and, in rows of slots_as_rows, where to."""
        group = self.pool.group
        size, per_page = group.page_size, 2 * len(group.layers) * group.page_size
        for start, stop in written:
            offset = segment.row_start - segment.slot
            rows.extend(range(start + offset, stop + offset))
            for slot in range(start, stop):
                page = _held(segment.pages, slot // size)
                slots.append(page * per_page + slot % size)

    def _plan_read(self, segment: AttentionSegment, written: list[Span]) -> list[int]:
        """Put the segment in a round; returns the rows of the batch that see nothing."""
        group = self.pool.group
        plan = plan_read(segment, written, group.page_size, group.window)
        if plan.numbers:
            per_page = 2 * len(group.layers)
            pages = [_held(segment.pages, number) * per_page for number in plan.numbers]
            self._round(len(pages)).add(segment, plan, pages)
        return [segment.row_start + row for row in plan.blind]

    def _round(self, num_pages: int) -> _Round:
        """The last round if it has room, else a new one; a large segment has one of its own."""
        row_bytes = self.pool.pages_as_rows.shape[1] * self.pool.data.element_size()
        if self._rounds:
            filled = len(self._rounds[-1].gather) + 2 * num_pages
            if filled * row_bytes <= _ROUND_BYTES:
                return self._rounds[-1]
        self._rounds.append(_Round())
        return self._rounds[-1]

    def _bind(self, buffer: Tensor) -> None:
        """Turn plans into views of the buffer, which all rounds fill from its first row."""
        group = self.pool.group
        for batch in self._rounds:
            batch.view = buffer[: len(batch.gather)]
            dead: list[int] = []
            for segment, plan, first in batch.plans:
                num_slots = len(plan.numbers) * group.page_size
                keys = first * group.page_size  # where the plan's axis begins, in slot rows
                dead.extend(keys + place for place in plan.dead)
                dead.extend(keys + num_slots + place for place in plan.dead)
                batch.reads.append(self._read_of(segment, plan, buffer[first:], num_slots))
            batch.dead = self._index(dead) if dead else None

    def _read_of(
        self, segment: AttentionSegment, plan: ReadPlan, buffer: Tensor, num_slots: int
    ) -> _Read:
        """buffer: begins where the plan's keys are gathered; its values follow them."""
        group = self.pool.group
        slots = buffer.view(-1, group.num_kv_heads, group.head_dim)[: 2 * num_slots]
        pair = slots.view(2, num_slots, group.num_kv_heads, group.head_dim)
        k, v = pair[:, plan.keys[0] : plan.keys[1]].transpose(1, 2).unsqueeze(1).unbind(0)
        mask = plan.mask
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=self.pool.data.dtype)
            mask = bias.masked_fill_(~mask, float("-inf")).to(self.pool.data.device)
        packed = not plan.causal and segment.num_rows <= _PACKED_ROWS
        return _Read(segment.row_start, segment.row_stop, k, v, mask, plan.causal, packed)

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.pool.data.device)

    def _per_layer(self, values: list[int], stride: int) -> tuple[Tensor, ...] | None:
        """The indices of layer 0 moved to every layer: num_layers tensors [len(values)]."""
        if not values:
            return None
        shift = torch.arange(len(self.pool.group.layers), device=self.pool.data.device) * stride
        return (self._index(values) + shift[:, None]).unbind(0)


def _held(pages: Sequence[int], number: int) -> int:
    page = pages[number] if number < len(pages) else -1
    if page < 0:
        raise InvariantError(f"page {number} of the table is used but not held")
    return page


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
