"""What is shipped, and from which bytes to which: the one home of both questions.

Law: what ships is what the receiver needs and lacks and the sender has, in slots, never in pages:
no scratch, no row that is not final, none twice. Every byte of it lands once, from the byte that
holds the same value on the other side, and no other byte is written. A page that is not held is
never an address. Pure arithmetic over spans, page tables and strides; it moves nothing.

    slots    first_wanted(n) ... held ======= ............... n
    covered       =========================================
    ship          ------------.           .-----------------

    route    one source rank to one destination rank: the heads and layers that both hold
    region   whole pages of one size: one each, neighbours merged; else one per layer, role, run
             of slots that share a page on both sides (and per slot where heads are re-cut)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tandemkv.base.errors import InvariantError
from tandemkv.base.ids import NO_PAGE, PageId
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.coverage import read_from
from tandemkv.kv.layout import LayerGroup
from tandemkv.transfer.shards import GroupOffer, Shard, overlap

Region = tuple[int, int, int]
"""(source offset, destination offset, bytes): offsets within the ranks' pools of the group."""


# -- which slots ---------------------------------------------------------------------------------


def first_wanted(group: LayerGroup, n: int, ahead: int = 0) -> int:
    """First slot that a worker wants when it takes over n rows.

    A draft group: what it needs. A target group: what a pass reads that starts `ahead` positions
    early, for the largest lookahead of the worker's groups, as a resumed request's does.
    """
    return read_from(group, max(0, n - ahead)) if group.required else group.first_needed(n)


def wanted(group: LayerGroup, n: int, held: SpanSet, *, ahead: int = 0) -> list[Span]:
    """What the receiver asks for: the slots it needs at n rows, less those it holds."""
    return held.missing(first_wanted(group, n, ahead), n)


def ship(
    group: LayerGroup, n: int, held: SpanSet, covered: SpanSet, *, ahead: int = 0
) -> list[Span]:
    """What is shipped: wanted by the receiver, intersected with what the sender covers.

    group: GroupPair.group; ahead: GroupPair.ahead. covered: slots whose rows are canonical,
    reused ones included (Sequence.canonical).
    """
    return due(SpanSet(wanted(group, n, held, ahead=ahead)), covered, SpanSet())


def due(wanted: SpanSet, covered: SpanSet, sent: SpanSet, grain: int = 1) -> list[Span]:
    """What of `wanted` can go out now: covered, and not sent before.

    grain: the larger of the two page sizes holds back the start of a page whose rest is still
    to be computed, so that it goes as one region and not as one per layer. 1: all that is covered,
    as when nothing more will be.
    """
    out: list[Span] = []
    for start, stop in wanted:
        for a, b in covered.within(start, stop):
            out.extend(sent.missing(a, b if b == stop else b - b % grain))
    return out


# -- which ranks ---------------------------------------------------------------------------------


class Side(msgspec.Struct, frozen=True):
    """One end of a route: a pool in bytes. origin: where page 0 has the route's first layer and
    head; then the bytes to the next page, layer, role, slot and head."""

    page_size: int
    num_pages: int
    origin: int
    page: int
    layer: int
    role: int
    slot: int
    head: int


class Route(msgspec.Struct, frozen=True):
    """From one rank to one rank: the rectangle of heads x layers that goes this way."""

    src_rank: int
    dst_rank: int
    src: Side
    dst: Side
    num_layers: int
    num_roles: int
    num_heads: int
    row_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes that go this way for one slot."""
        return self.num_layers * self.num_roles * self.num_heads * self.row_bytes


def routes(src: GroupOffer, dst: GroupOffer) -> tuple[Route, ...]:
    """All routes between the ranks of a matched pair: every row that a destination rank holds
    comes from exactly one source rank; replicas at the source share the work."""
    replicas: dict[tuple[Span, Span], list[Shard]] = {}
    for shard in src.shards:
        replicas.setdefault((shard.heads, shard.layers), []).append(shard)
    out: list[Route] = []
    for i, there in enumerate(dst.shards):
        for holders in replicas.values():
            here = holders[i % len(holders)]
            heads, layers = overlap(here.heads, there.heads), overlap(here.layers, there.layers)
            if heads and layers:
                out.append(_route(src, here, dst, there, heads, layers))
    return tuple(out)


def _route(
    src: GroupOffer, here: Shard, dst: GroupOffer, there: Shard, heads: Span, layers: Span
) -> Route:
    return Route(
        src_rank=here.rank,
        dst_rank=there.rank,
        src=_side(src, here, heads[0], layers[0]),
        dst=_side(dst, there, heads[0], layers[0]),
        num_layers=layers[1] - layers[0],
        num_roles=len(src.roles),
        num_heads=heads[1] - heads[0],
        row_bytes=src.row_bytes,
    )


def _side(group: GroupOffer, shard: Shard, head: int, layer: int) -> Side:
    strides = group.strides(shard)
    origin = (layer - shard.first_layer) * strides[1] + (head - shard.first_head) * strides[4]
    return Side(group.page_size, group.num_pages, origin, *strides)


def staged(route: Route, num_pages: int) -> tuple[Route, Route]:
    """A route in two steps, through a packed buffer of num_pages pages of the destination's size.

    The first re-cuts pages and heads in local memory, where regions are cheap; the second then
    moves whole pages wherever the destination rank takes nothing from elsewhere.
    """
    slot = route.num_heads * route.row_bytes
    role = route.dst.page_size * slot
    layer = route.num_roles * role
    page = route.num_layers * layer
    size = route.dst.page_size
    buffer = Side(size, num_pages, 0, page, layer, role, slot, route.row_bytes)
    replace = msgspec.structs.replace
    return replace(route, dst=buffer), replace(route, src=buffer)


def staging_pages(spans: Iterable[Span], page_size: int) -> list[PageId]:
    """The page table of a staging buffer: one page after another for each that `spans` touch."""
    table: list[PageId] = []
    used = 0
    for start, stop in SpanSet(spans):
        table.extend([NO_PAGE] * (start // page_size - len(table)))
        while len(table) * page_size < stop:
            table.append(PageId(used))
            used += 1
    return table


# -- which bytes ---------------------------------------------------------------------------------


def regions(
    route: Route, spans: Iterable[Span], src_pages: Sequence[int], dst_pages: Sequence[int]
) -> list[Region]:
    """The regions that carry `spans` along a route, in slot order.

    Neighbours are merged where both sides go on: in packed pools no region touches the one before
    it on both. src_pages, dst_pages: page tables, index = slot // page_size. InvariantError if a
    slot lies on no page, on one beyond the pool, or on one that the table holds twice.
    """
    slots = SpanSet(spans)
    for side, pages, where in ((route.src, src_pages, "source"), (route.dst, dst_pages, "target")):
        if why := lacks(side, slots, pages):
            raise InvariantError(f"{where} of a transfer: {why}")
    cut = _Cut(route, src_pages, dst_pages)
    size, whole = route.dst.page_size, _moves_whole_pages(route)
    for start, stop in slots:
        first, last = -(-start // size), stop // size
        if whole and first < last:
            cut.rows(start, first * size)
            cut.pages(first, last)
            cut.rows(last * size, stop)
        else:
            cut.rows(start, stop)
    return cut.out


def lacks(side: Side, spans: Iterable[Span], pages: Sequence[int]) -> str:
    """Why a page table does not hold `spans` in this pool; '' if it does. Ask it of a peer's."""
    size, after = side.page_size, 0
    touched: list[int] = []
    for start, stop in SpanSet(spans):
        first, after = max(after, start // size), (stop - 1) // size + 1
        if start < 0 or after > len(pages):
            return f"slots [{start}, {stop}) are not on {len(pages)} pages of {size} slots"
        touched.extend(pages[first:after])
    if touched and not 0 <= min(touched) <= max(touched) < side.num_pages:
        bad = next(page for page in touched if not 0 <= page < side.num_pages)
        what = "a page that is not held" if bad == NO_PAGE else f"page {bad}"
        return f"slots are on {what}, the pool has pages 0..{side.num_pages - 1}"
    if len(set(touched)) < len(touched):
        return "one page holds two runs of slots"
    return ""


def _moves_whole_pages(route: Route) -> bool:
    """Whether a page is one stretch of bytes of the same slots on both sides, and its neighbour
    in the pool the next."""
    src, dst = route.src, route.dst
    alike = src.page_size == dst.page_size and src.page == dst.page
    alike = alike and src.page == src.page_size * route.slot_bytes
    return alike and len(_pieces(route, src.page_size)) == 1


def _pieces(route: Route, num_slots: int) -> list[Region]:
    """A run of slots as regions, relative to its first byte on either side.

    From the inside out: what is contiguous on both sides grows the piece, the rest repeats it.
    """
    src, dst, size = route.src, route.dst, route.row_bytes
    starts = [(0, 0)]
    for count, s, d in (
        (route.num_heads, src.head, dst.head),
        (num_slots, src.slot, dst.slot),
        (route.num_roles, src.role, dst.role),
        (route.num_layers, src.layer, dst.layer),
    ):
        if len(starts) == 1 and s == d == size:
            size *= count
        elif count > 1:
            starts = [(x + i * s, y + i * d) for i in range(count) for x, y in starts]
    return [(x, y, size) for x, y in starts]


class _Cut:
    """Collects the regions of one transfer in `out`."""

    __slots__ = ("_dst_pages", "_pieces", "_route", "_src_pages", "out")

    def __init__(self, route: Route, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        self._route = route
        self._src_pages = src_pages
        self._dst_pages = dst_pages
        self._pieces: dict[int, list[Region]] = {}
        self.out: list[Region] = []

    def pages(self, first: int, last: int) -> None:
        """Whole pages [first, last) of the tables, neighbours in both pools merged."""
        page, at, to = self._route.src.page, self._route.src.origin, self._route.dst.origin
        merged: list[Region] = []
        begin, goal, num = self._src_pages[first], self._dst_pages[first], 0
        for s, d in zip(self._src_pages[first:last], self._dst_pages[first:last], strict=True):
            if s == begin + num and d == goal + num:
                num += 1
            else:
                merged.append((at + begin * page, to + goal * page, num * page))
                begin, goal, num = s, d, 1
        merged.append((at + begin * page, to + goal * page, num * page))
        self._extend(merged)

    def rows(self, start: int, stop: int) -> None:
        """Slots [start, stop): runs within one page on both sides, merged where slots go on."""
        src, dst = self._route.src, self._route.dst
        grain = min(src.page_size, dst.page_size)
        begin = goal = num = 0
        while start < stop:
            end = min(stop, start - start % grain + grain)
            page, slot = divmod(start, src.page_size)
            s = src.origin + self._src_pages[page] * src.page + slot * src.slot
            page, slot = divmod(start, dst.page_size)
            d = dst.origin + self._dst_pages[page] * dst.page + slot * dst.slot
            if num and s == begin + num * src.slot and d == goal + num * dst.slot:
                num += end - start
            else:
                self._run(begin, goal, num)
                begin, goal, num = s, d, end - start
            start = end
        self._run(begin, goal, num)

    def _run(self, begin: int, goal: int, num: int) -> None:
        if not num:
            return
        pieces = self._pieces.get(num)
        if pieces is None:
            pieces = self._pieces[num] = _pieces(self._route, num)
        self._extend([(begin + x, goal + y, size) for x, y, size in pieces])

    def _extend(self, more: list[Region]) -> None:
        """Append regions, the first merged with what came before where both sides touch."""
        out = self.out
        if out:
            (s, d, size), (x, y, grown) = out[-1], more[0]
            if s + size == x and d + size == y:
                more[0] = (s, d, size + grown)
                out.pop()
        out.extend(more)


# -- what it costs -------------------------------------------------------------------------------


class Cost(msgspec.Struct, frozen=True):
    """Regions are what a data plane is paid in, beside bytes: each costs microseconds."""

    num_regions: int
    num_bytes: int


def cost(regions: Iterable[Region]) -> Cost:
    sizes = [size for _, _, size in regions]
    return Cost(len(sizes), sum(sizes))


def expected_bytes(routes: Iterable[Route], spans: Iterable[Span]) -> int:
    """Bytes that carry `spans` along these routes, replicas counted as often as they are made."""
    return SpanSet(spans).count() * sum(route.slot_bytes for route in routes)
