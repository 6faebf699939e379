"""Where a layer group lives: on which rank, which heads and layers, and at which strides.

Law: two shards of a group hold the same rectangle of heads x layers (replicas) or share nothing,
and together they hold all of it; `fault` says what breaks that. A shard's strides are declared,
never guessed from its shape. This module compares no peers and moves no bytes.

    group   heads  0 1 2 3                    2 ranks: [0 1] [2 3]     8 ranks: 0 0 1 1 2 2 3 3
    page    [layer][role][slot][head][value], packed, unless the shard's strides say otherwise
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tandemkv.base.errors import ConfigError
from tandemkv.base.spans import Span
from tandemkv.kv.layout import DTYPE_BYTES, Domain, LayerGroup, Layout, Role

MAX_RANKS = 256


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of every page of a group: a rectangle of heads x layers.

    first_layer, num_layers count within the group's `layers`. address: of the rank's pool, 0 where
    memory is not registered. strides: bytes from one page, layer, role, slot and head to the next;
    empty for a packed pool, page-major in that order. Values of a head always lie side by side.
    """

    rank: int
    first_head: int
    num_heads: int
    first_layer: int
    num_layers: int
    address: int = 0
    strides: tuple[int, ...] = ()

    @property
    def heads(self) -> Span:
        return self.first_head, self.first_head + self.num_heads

    @property
    def layers(self) -> Span:
        return self.first_layer, self.first_layer + self.num_layers


class GroupOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer group as a peer sees it. num_pages: pages of its pool, the same ids on all ranks.

    Two shards hold the same rectangle (replicas) or share nothing; together they hold all of it.
    """

    name: str
    domain: Domain
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str
    roles: tuple[Role, ...]
    page_size: int
    window: int | None
    lookahead: int
    pointwise: bool
    num_pages: int
    shards: tuple[Shard, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's row: one token, layer and role."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    def page_bytes(self, shard: Shard) -> int:
        """Bytes of a page's rows on one rank."""
        rows = shard.num_layers * len(self.roles) * self.page_size * shard.num_heads
        return rows * self.row_bytes

    def strides(self, shard: Shard) -> tuple[int, ...]:
        """Bytes to the next page, layer, role, slot and head in a rank's pool."""
        if shard.strides:
            return shard.strides
        slot = shard.num_heads * self.row_bytes
        role = self.page_size * slot
        layer = len(self.roles) * role
        return shard.num_layers * layer, layer, role, slot, self.row_bytes

    def layer_group(self) -> LayerGroup:
        """The group as kv/layout.py knows it; ConfigError if that refuses its numbers."""
        return LayerGroup(
            name=self.name,
            domain=self.domain,
            layers=self.layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            roles=self.roles,
            page_size=self.page_size,
            window=self.window,
            lookahead=self.lookahead,
            pointwise=self.pointwise,
        )


def shards_of(group: LayerGroup, num_ranks: int = 1) -> tuple[Shard, ...]:
    """Tensor parallelism: ranks share out the heads, or heads are replicated over more ranks."""
    heads = group.num_kv_heads
    if num_ranks < 1 or (heads % num_ranks and num_ranks % heads):
        raise ConfigError(
            f"layer group {group.name!r}: {heads} KV heads cannot be shared out over {num_ranks}"
            " ranks; one number must divide the other"
        )
    each = max(1, heads // num_ranks)
    return tuple(
        Shard(
            rank=rank,
            first_head=rank * heads // num_ranks,
            num_heads=each,
            first_layer=0,
            num_layers=len(group.layers),
        )
        for rank in range(num_ranks)
    )


def group_offer(group: LayerGroup, num_pages: int, shards: Iterable[Shard] = ()) -> GroupOffer:
    """A group with its pool; by default one rank holds all of it."""
    return GroupOffer(
        name=group.name,
        domain=group.domain,
        layers=group.layers,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        dtype=group.dtype,
        roles=group.roles,
        page_size=group.page_size,
        window=group.window,
        lookahead=group.lookahead,
        pointwise=group.pointwise,
        num_pages=num_pages,
        shards=tuple(shards) or shards_of(group),
    )


def group_offers(layout: Layout, num_pages: Sequence[int]) -> tuple[GroupOffer, ...]:
    """The groups of a worker of one rank, in layout order."""
    return tuple(group_offer(g, n) for g, n in zip(layout.groups, num_pages, strict=True))


# -- what an offer may say -----------------------------------------------------------------------


def fault(group: GroupOffer, block_size: int) -> str:
    """What is wrong with a group's offer, '' if nothing."""
    try:
        group.layer_group()
    except ConfigError as error:
        return str(error)
    if block_size % group.page_size:
        return f"page_size {group.page_size} does not divide block_size {block_size}"
    if group.num_pages < 1 or not group.roles:
        return "num_pages and roles must not be empty or zero"
    if len(set(group.layers)) < len(group.layers) or len(set(group.roles)) < len(group.roles):
        return "a layer or role is named twice"
    return _fault_of_shards(group)


def _fault_of_shards(group: GroupOffer) -> str:
    shards = group.shards
    if not 1 <= len(shards) <= MAX_RANKS:
        return f"{len(shards)} shards: between 1 and {MAX_RANKS} are allowed"
    if len({shard.rank for shard in shards}) < len(shards):
        return "a rank has two shards"
    for shard in shards:
        if why := _fault_of_shard(group, shard):
            return f"rank {shard.rank}: {why}"
    parts = list({(s.heads, s.layers): s for s in shards}.values())
    for i, shard in enumerate(parts):
        for other in parts[:i]:
            if overlap(shard.heads, other.heads) and overlap(shard.layers, other.layers):
                return f"ranks {other.rank} and {shard.rank} share some rows, but not all"
    held = sum(shard.num_heads * shard.num_layers for shard in parts)
    if held < group.num_kv_heads * len(group.layers):
        return f"shards hold {held} of {group.num_kv_heads * len(group.layers)} heads x layers"
    return ""


def _fault_of_shard(group: GroupOffer, shard: Shard) -> str:
    heads, layers = shard.heads, shard.layers
    if not 0 <= heads[0] < heads[1] <= group.num_kv_heads:
        return f"heads [{heads[0]}, {heads[1]}) of {group.num_kv_heads}"
    if not 0 <= layers[0] < layers[1] <= len(group.layers):
        return f"layers [{layers[0]}, {layers[1]}) of {len(group.layers)}"
    if min(shard.rank, shard.address) < 0:
        return "rank or address is negative"
    if len(shard.strides) not in (0, 5):
        return f"{len(shard.strides)} strides: page, layer, role, slot and head are five"
    counts = (group.num_pages, shard.num_layers, len(group.roles), group.page_size, shard.num_heads)
    extent = group.row_bytes
    for stride, count in sorted(zip(group.strides(shard), counts, strict=True)):
        if count > 1 and stride < extent:
            return f"strides {shard.strides} let rows overlap"
        extent += (count - 1) * stride
    return ""


def overlap(a: Span, b: Span) -> Span | None:
    """What two spans have in common, None if nothing."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None
