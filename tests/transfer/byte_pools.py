"""Pools in which every byte has a name: the oracle of transfers, through numpy's own strides.

Law: the source's bytes are named by (slot, layer, role, head, byte) where a slot is covered, and
are nobody's elsewhere; after a transfer each destination rank holds the names it should, each
written once, and every other byte is as it was. It trusts page tables and strides, no planner.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tandemkv.base.ids import NO_PAGE
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.layout import Domain, LayerGroup, Role
from tandemkv.transfer import plan
from tandemkv.transfer.plan import Region, Route
from tandemkv.transfer.shards import GroupOffer, Shard, group_offer, shards_of

NOBODY = -1
UNTOUCHED = -2
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 128)
DIMS = ("page", "layer", "role", "slot", "head")


def group(heads: int = 2, page_size: int = 4, **changes: Any) -> LayerGroup:
    """Rows of two bytes: head_dim 1 of two bytes each."""
    known = {
        "name": "t",
        "domain": Domain.TARGET,
        "layers": (0, 1),
        "num_kv_heads": heads,
        "head_dim": 1,
        "dtype": "float16",
        "page_size": page_size,
    }
    return LayerGroup(**{**known, **changes})


class BytePools:
    """A group's pool on every rank; `flat[rank]` has a cell per byte of its memory."""

    def __init__(self, offer: GroupOffer) -> None:
        self.offer = offer
        self.flat: dict[int, np.ndarray] = {}
        self.writes: dict[int, np.ndarray] = {}
        self.views: dict[int, np.ndarray] = {}
        for shard in offer.shards:
            shape = (
                offer.num_pages,
                shard.num_layers,
                len(offer.roles),
                offer.page_size,
                shard.num_heads,
                offer.row_bytes,
            )
            cells = np.zeros(shape, np.int64)
            if shard.strides:
                ends = [(n - 1) * s for n, s in zip(shape[:-1], shard.strides, strict=True)]
                memory = np.zeros(sum(ends) + offer.row_bytes, np.int64)
                strides = [8 * s for s in (*shard.strides, 1)]
                cells = np.lib.stride_tricks.as_strided(memory, shape, strides)
            else:
                memory = cells.reshape(-1)
            memory[:] = UNTOUCHED
            self.flat[shard.rank] = memory
            self.views[shard.rank] = cells
            self.writes[shard.rank] = np.zeros(len(memory), np.int64)

    def name(self, spans: Iterable[Span], table: Sequence[int]) -> None:
        """Write the names of the rows of `spans` where each rank keeps them."""
        size = self.offer.page_size
        for shard in self.offer.shards:
            for slot in (slot for a, b in spans for slot in range(a, b)):
                rows = self.views[shard.rank][table[slot // size], :, :, slot % size]
                rows[:] = self._names(shard, slot)

    def _names(self, shard: Shard, slot: int) -> np.ndarray:
        offer = self.offer
        counts = (len(offer.layers), len(offer.roles), offer.num_kv_heads, offer.row_bytes)
        whole = np.arange(np.prod(counts)).reshape(counts) + slot * np.prod(counts)
        return whole[slice(*shard.layers), :, slice(*shard.heads)]

    def receive(self, source: BytePools, route: Route, moved: Iterable[Region]) -> None:
        src, dst = source.flat[route.src_rank], self.flat[route.dst_rank]
        for s, d, size in moved:
            assert size > 0
            assert s >= 0 <= d
            assert s + size <= len(src)
            assert d + size <= len(dst)
            dst[d : d + size] = src[s : s + size]
            self.writes[route.dst_rank][d : d + size] += 1


@dataclass
class Transfer:
    """Spans on their way from one group offer's pages to another's."""

    src: GroupOffer
    dst: GroupOffer
    spans: list[Span]
    src_pages: list[int]
    dst_pages: list[int]

    def routes(self) -> tuple[Route, ...]:
        return plan.routes(self.src, self.dst)

    def regions(self, route: Route) -> list[Region]:
        return plan.regions(route, self.spans, self.src_pages, self.dst_pages)

    def source(self) -> BytePools:
        source = BytePools(self.src)
        for memory in source.flat.values():
            memory[:] = NOBODY
        source.name(self.spans, self.src_pages)
        return source

    def check(self) -> list[list[Region]]:
        """Run it over named bytes; AssertionError unless exactly the right bytes arrived once."""
        source, target = self.source(), BytePools(self.dst)
        everything: list[list[Region]] = []
        for route in self.routes():
            moved = self.regions(route)
            target.receive(source, route, moved)
            everything.append(moved)
            assert plan.cost(moved).num_bytes == plan.expected_bytes([route], self.spans)
        self.compare(target)
        return everything

    def compare(self, target: BytePools) -> None:
        expected = BytePools(self.dst)
        expected.name(self.spans, self.dst_pages)
        for rank, memory in expected.flat.items():
            assert np.array_equal(target.flat[rank], memory), f"rank {rank}: wrong bytes"
            once = (memory != UNTOUCHED).astype(np.int64)
            assert np.array_equal(target.writes[rank], once), f"rank {rank}: written twice"


def table(num: int, order: str = "shuffled", seed: int = 0, spare: int = 2) -> list[int]:
    """A page table of `num` pages out of num + spare: in order, backwards, or in shuffled runs."""
    pages = list(range(spare // 2, spare // 2 + num))
    if order == "backwards":
        return pages[::-1]
    if order == "shuffled":
        runs = [pages[i : i + 1 + seed % 3] for i in range(0, num, 1 + seed % 3)]
        random.Random(seed).shuffle(runs)
        return list(itertools.chain.from_iterable(runs))
    return pages


def transfer(
    src: LayerGroup,
    dst: LayerGroup,
    spans: Iterable[Span],
    *,
    order: str = "shuffled",
    seed: int = 0,
    ranks: tuple[int, int] = (1, 1),
) -> Transfer:
    """A transfer with page tables just long enough."""
    wanted = SpanSet(spans)
    tables = [
        table(-(-wanted.stop // g.page_size), order, seed + i) for i, g in enumerate((src, dst))
    ]
    offers = [
        group_offer(g, len(t) + 2, shards_of(g, n))
        for g, t, n in zip((src, dst), tables, ranks, strict=True)
    ]
    return Transfer(offers[0], offers[1], list(wanted), tables[0], tables[1])


Choose = Callable[[Sequence[Any]], Any]


def any_transfer(choose: Choose) -> Transfer:
    """A transfer of any shape; choose(options) picks one, so that Hypothesis can, or a seed."""
    heads = choose((1, 2, 4, 8))
    layers = tuple(range(choose((1, 2, 3))))
    roles = choose(((Role.KEY, Role.VALUE), (Role.LATENT,)))
    size = choose(PAGE_SIZES)
    groups = [
        group(heads, choose((size, *PAGE_SIZES)), layers=layers, roles=roles) for _ in range(2)
    ]
    alike = choose((False, True))
    if alike:
        groups[1] = groups[0]
    edges = sorted({choose(range(140)) for _ in range(choose((2, 2, 4)))})
    spans = list(zip(edges[::2], edges[1::2], strict=False)) or [(0, 1)]
    chosen = transfer(
        groups[0],
        groups[1],
        spans,
        order=choose(("shuffled", "in order", "backwards")),
        seed=choose(range(9)),
    )
    chosen.src = _spread(choose, chosen.src)
    shards = chosen.src.shards if alike else _spread(choose, chosen.dst).shards
    chosen.dst = msgspec.structs.replace(chosen.dst, shards=shards)
    for pages, side in ((chosen.src_pages, groups[0]), (chosen.dst_pages, groups[1])):
        if choose((False, True)):  # a windowed group holds what it needs and no more
            for number in range(len(pages)):
                here = (number * side.page_size, (number + 1) * side.page_size)
                if not SpanSet(spans).within(*here):
                    pages[number] = NO_PAGE
    return chosen


def _spread(choose: Choose, offer: GroupOffer) -> GroupOffer:
    """Over ranks, over pipeline stages, with strides of any order."""
    shards = shards_of(offer.layer_group(), choose((1, 1, 2, 4)))
    if choose((False, False, True)):
        cut = len(offer.layers) // 2
        stages = [part for part in ((0, cut), (cut, len(offer.layers))) if part[0] < part[1]]
        shards = tuple(
            msgspec.structs.replace(
                shard,
                rank=stage * len(shards) + shard.rank,
                first_layer=first,
                num_layers=last - first,
            )
            for stage, (first, last) in enumerate(stages)
            for shard in shards
        )
    order = choose(
        (None, None, DIMS, ("layer", "role", "page", "slot", "head"), (*DIMS[:3], "head", "slot"))
    )
    if order is not None:
        gap = choose((0, 0, 3))
        shards = tuple(
            msgspec.structs.replace(shard, strides=strides(offer, shard, order, gap))
            for shard in shards
        )
    return msgspec.structs.replace(offer, shards=shards)


def strides(offer: GroupOffer, shard: Shard, order: Sequence[str], gap: int = 0) -> tuple[int, ...]:
    """Strides of a pool whose axes lie in `order`, outermost first, each `gap` bytes apart."""
    counts = {
        "page": offer.num_pages,
        "layer": shard.num_layers,
        "role": len(offer.roles),
        "slot": offer.page_size,
        "head": shard.num_heads,
    }
    extent, found = offer.row_bytes, {}
    for dim in reversed(order):
        found[dim] = extent + gap
        extent = found[dim] * counts[dim]
    return tuple(found[dim] for dim in DIMS)
