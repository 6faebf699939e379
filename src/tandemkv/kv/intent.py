"""From a claim plan to pages: which runs are shared, which pages are copied, how many are new.

Law: a page that the sequence will write is its own: a run of the tree with a planned write in it
is copied, never written; a run of a partial block is always copied. An intent takes nothing: it
counts what taking would need, so that a claim is all or nothing. It decides no coverage.

    block        0      1      2      3  |  T-1   |  reserved
    group        share  share  own <- copy  own <- copy of a partial block   new, new, ...
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec

from tandemkv.base.ids import GroupId, PageId
from tandemkv.base.spans import SpanSet
from tandemkv.kv.coverage import ClaimPlan, read_from
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.kv.tree import Found, Node, Run


class PageCopy(msgspec.Struct, frozen=True):
    """Copy a whole page of one group before the sequence's first pass."""

    group: GroupId
    src: PageId
    dst: PageId


class OwnBlock(msgspec.Struct):
    """A block of the match whose pages will be the sequence's own; source: run to copy from."""

    block: int
    source: Run | None
    count: int


class GroupIntent(msgspec.Struct):
    """What a claim does in one layer group.

    first_block: first block kept. shares: run (or None) for each block from there to the end of
    the match. own: blocks with pages of its own. base: table length over the match; length: with
    the reservation. planned: slots before the end of
    the match that will be written.
    """

    group: GroupId
    first_block: int
    shares: list[Run | None]
    own: list[OwnBlock]
    base: int
    length: int
    planned: SpanSet
    covered: SpanSet

    @property
    def new_pages(self) -> int:
        return sum(own.count for own in self.own) + max(0, self.length - self.base)

    @property
    def sources(self) -> list[Run]:
        return [own.source for own in self.own if own.source is not None]

    def need(self) -> int:
        """Pages that stop being free or cached if this is taken."""
        cached = sum([run.size for run in self.shares if run is not None and not run.refs])
        cached += sum(run.size for run in self.sources if not run.refs)
        return self.new_pages + cached


class Intent(msgspec.Struct):
    """A claim ready to be taken."""

    found: Found
    plan: ClaimPlan
    rows: int
    groups: list[GroupIntent]

    @property
    def copies(self) -> bool:
        return any(group.sources for group in self.groups)

    def tip(self, root: Node, block: int) -> Node:
        """The last whole block of the match before plan.end."""
        whole = self.plan.end // block
        return self.found.nodes[whole - 1] if whole else root


def intend(
    layout: Layout,
    found: Found,
    coverage: Seq[SpanSet],
    plan: ClaimPlan,
    rows: int,
    *,
    full_only: bool = False,
    opens_at: int | None = None,
) -> Intent:
    """Work out the pages of a claim; rows: target rows to make room for (at least plan.end).

    opens_at: n rows arrive from elsewhere, and a windowed group of them its last window alone.
    """
    groups = [
        _group_intent(layout, GroupId(g), found, coverage[g], plan, rows, full_only, opens_at)
        for g in range(len(layout.groups))
    ]
    return Intent(found, plan, max(rows, plan.end), groups)


def windowed_rows(layout: Layout, group: LayerGroup, end: int, rows: int) -> int:
    """Rows a claim that ends at `end` makes room for: a windowed group's window, at most.

    What lies behind the window is not held, so past the first window one block ahead is enough.
    """
    if group.window is None:
        return max(rows, end)
    return max(end, min(rows, max(end, group.window) + layout.block_size))


def _lowest_slot(layout: Layout, g: GroupId, plan: ClaimPlan) -> int:
    """First slot that the plan's passes, or drafting after them, read in group g."""
    group = layout.groups[g]
    if group.domain is Domain.TARGET:
        starts = [start for start, _ in plan.compute]
        return min(read_from(group, p) for p in [*starts, max(0, plan.end - layout.lookahead)])
    low = group.first_needed(plan.end)
    if not group.pointwise:
        for start, _ in (*plan.holes, *plan.draft_compute[g]):
            if start + group.lookahead >= low:
                return min(low, group.first_needed(start + group.lookahead))
    return low


def _opening(layout: Layout, group: LayerGroup, n: int) -> int:
    """First slot of windowed `group` that a sequence reads whose n rows come from elsewhere."""
    if group.domain is Domain.TARGET:
        return read_from(group, max(0, n - layout.lookahead))
    return group.first_needed(n)


def _planned_writes(
    group: LayerGroup, g: GroupId, covered: SpanSet, plan: ClaimPlan, low: int
) -> SpanSet:
    """Slots before the end of the match that the plan's passes will write in group g.

    Those of the holes, and what the tail, which starts early for the group that looks furthest
    ahead, writes on its way in the others.
    """
    planned, ahead = SpanSet(), group.lookahead
    early = (plan.tail[0], min(plan.tail[1], plan.end - ahead))
    for start, stop in (*plan.holes, *plan.draft_compute[g], early):
        for a, b in covered.missing(max(start + ahead, low), stop + ahead):
            planned.add(a, b)
    return planned


def _group_intent(
    layout: Layout,
    g: GroupId,
    found: Found,
    covered: SpanSet,
    plan: ClaimPlan,
    rows: int,
    full_only: bool,
    opens_at: int | None,
) -> GroupIntent:
    group, block = layout.groups[g], layout.block_size
    per_block = block // group.page_size
    blocks = -(-plan.end // block)
    first = min(_lowest_slot(layout, g, plan) // block, blocks)
    room = windowed_rows(layout, group, plan.end, rows)
    if opens_at is not None and group.window is not None:
        first = max(first, _opening(layout, group, opens_at) // block)
        blocks, room = max(blocks, first), rows
    planned = _planned_writes(group, g, covered, plan, first * block)
    out = GroupIntent(g, first, [], [], blocks * per_block, 0, planned, covered)
    low = max(first * block, group.lookahead)
    if covered.covers(low, blocks * block) and blocks <= len(found.nodes):
        out.shares = [node.runs[g] for node in found.nodes[first:blocks]]
    else:
        for b in range(first, blocks):
            _place_block(layout, out, found, plan, b, full_only)
        if out.own and out.own[-1].block == blocks - 1:
            out.base = (blocks - 1) * per_block + out.own[-1].count
    out.length = max(out.base, -(-(room + group.lookahead) // group.page_size))
    return out


def _place_block(
    layout: Layout, out: GroupIntent, found: Found, plan: ClaimPlan, b: int, full_only: bool
) -> None:
    """Share block b's run, or take pages of one's own where the plan writes in it."""
    group, block = layout.groups[out.group], layout.block_size
    start, stop = b * block, (b + 1) * block
    partial = b >= len(found.nodes)
    node = found.partial if partial else found.nodes[b]
    run = node.runs[out.group] if node is not None and out.covered else None
    if run is not None and full_only and not run.full:
        run = None
    if run is not None and run.full and not partial:
        out.shares.append(run)
        return
    tail = plan.tail[0] + group.lookahead, plan.tail[1] + group.lookahead
    writes = out.planned.within(start, stop)
    if plan.tail[0] < plan.tail[1]:
        low = max(start, tail[0], group.lookahead)
        writes += out.covered.missing(low, min(stop, tail[1]))
    if not writes and not partial:
        out.shares.append(run)
        return
    out.shares.append(None)
    if run is not None and not out.covered.within(start, stop):
        run = None
    used = min(stop, plan.end) - start
    out.own.append(OwnBlock(b, run, -(-used // group.page_size)))
