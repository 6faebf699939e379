"""Putting a sequence's finished pages into the tree, and giving pages up.

Law: what enters the tree is canonical: committed rows, covered, not tainted, no planned write left
in the block. A block enters with every unwindowed target group complete. Of two runs for the
same block and group the better covered one stays; a sequence whose rows the tree already has
takes the tree's pages and gives back its own, so that whoever holds a block holds its ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tandemkv.base.errors import InvariantError
from tandemkv.base.ids import NO_PAGE
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.keys import TOKEN_BYTES
from tandemkv.kv.layout import Domain, Layout
from tandemkv.kv.pool import PagePool
from tandemkv.kv.sequence import Sequence
from tandemkv.kv.tree import Node, Run, Tree


def covers_all(spans: Seq[Span], wanted: Seq[Span]) -> bool:
    """Whether every slot of `wanted` is in `spans` (both sorted and disjoint)."""
    if not wanted:
        return True
    known = SpanSet(spans)
    return all(known.covers(a, b) for a, b in wanted)


class Publisher:
    """Moves pages between sequences and the tree; the manager's writing hand."""

    def __init__(self, layout: Layout, tree: Tree, pools: Seq[PagePool]) -> None:
        self.layout = layout
        self.tree = tree
        self.pools = pools
        self.block = layout.block_size
        self.per_block = [layout.block_size // g.page_size for g in layout.groups]

    # -- publish --------------------------------------------------------------------------

    def publish(self, seq: Sequence) -> int:
        """Whole blocks below `committed` enter the tree. Returns how many blocks."""
        if seq.dirty and not seq.pending_any:
            self._publish_dirty(seq)
        count = (seq.committed - seq.published) // self.block
        if count < 1:
            return 0
        node = seq.tip
        first = seq.published // self.block
        stop = (first + count) * self.block
        tokens = seq.block_tokens(seq.published, stop)
        step = self.block * TOKEN_BYTES
        parts = [tokens[at : at + step] for at in range(0, len(tokens), step)]
        at = 0
        while at < count:
            child = node.child(parts[at])
            if child is None and self._whole(seq, (first + at) * self.block, stop):
                node = self._grow(seq, node, first + at, parts[at:])
                break
            child = child or self.tree.add(node, parts[at])
            self._merge(seq, child, first + at)
            self._supersede(node, child)
            node = child
            at += 1
        self._move_tip(seq, node)
        seq.published = stop
        return count

    def _grow(self, seq: Sequence, parent: Node, first: int, parts: Seq[bytes]) -> Node:
        """Blocks new to the tree, whole in every group, one under the other. Returns the last.

        The common path of a long prompt, hence column by column: no search, no interval sets.
        """
        nodes = self.tree.chain(parent, parts)
        block, start = self.block, first * self.block
        stop = start + len(parts) * block
        lows = list(range(start, stop, block))
        columns: list[list[Run]] = []
        for g, group in enumerate(self.layout.groups):
            per = self.per_block[g]
            lows[0] = max(start, group.lookahead)
            table = seq.pages[g]
            pages = [table[at : at + per] for at in range(first * per, stop // block * per, per)]
            column = [
                Run(node, g, part, per, low, None)
                for node, part, low in zip(nodes, pages, lows, strict=True)
            ]
            columns.append(column)
            mine = seq.runs[g]
            del mine[first:]
            mine.extend([None] * (first - len(mine)))
            mine.extend(column)
        for node, runs in zip(nodes, map(list, zip(*columns, strict=True)), strict=True):
            node.runs = runs
        self._supersede(parent, nodes[0])
        return nodes[-1]

    def publish_partial(self, seq: Sequence) -> None:
        """The last, partly filled block enters under its own key, unless a longer block of the
        same tokens already says as much."""
        if seq.committed == seq.published:
            return
        b = seq.published // self.block
        shared = [run for g in range(len(self.pools)) if (run := seq.run_at(g, b)) is not None]
        if shared:  # the prompt ended with a block that the tree has whole
            if shared[0].attached:
                self._merge(seq, shared[0].node, b)
            return
        tokens = seq.block_tokens(seq.published, seq.committed)
        mine = [
            seq.canonical(g, max(seq.published, self._low(seq, g)), seq.committed)
            for g in range(len(self.pools))
        ]
        for node in self.tree.extensions(seq.tip, tokens):
            runs = node.runs
            if all(covers_all(r.spans if r else (), w) for r, w in zip(runs, mine, strict=True)):
                return
        if not any(mine):
            return
        node = seq.tip.child(tokens) or self.tree.add(seq.tip, tokens)
        self._merge(seq, node, b)
        self._supersede(seq.tip, node)
        self.tree.prune(node)

    def settle(self, seq: Sequence) -> None:
        """The sequence reads and writes no more: plans are off, rows that are not canonical go."""
        for spans in seq.pending:
            spans.remove(0, spans.stop)
        for covered, tainted in zip(seq.coverage, seq.tainted, strict=True):
            for a, b in tainted:
                covered.remove(a, b)
            tainted.remove(0, tainted.stop)
        seq.dirty = sorted({*seq.dirty, *seq.held_back})
        seq.held_back.clear()

    def _low(self, seq: Sequence, g: int) -> int:
        return seq.first_block[g] * self.block

    def _whole(self, seq: Sequence, start: int, stop: int) -> bool:
        """Whether blocks [start, stop) are canonical in every group, each page with rows."""
        for g, group in enumerate(self.layout.groups):
            low = max(start, group.lookahead)
            if (
                seq.tainted[g]
                or low - start >= group.page_size
                or seq.first_block[g] * self.block > start
                or any(seq.runs[g][start // self.block :])
                or not seq.coverage[g].covers(low, stop)
            ):
                return False
        return True

    def _merge(self, seq: Sequence, node: Node, b: int) -> None:
        """Bring block b of the sequence and `node` together, group by group."""
        for g in range(len(self.pools)):
            if b >= seq.first_block[g]:
                self._merge_group(seq, node, g, b)

    def _merge_group(self, seq: Sequence, node: Node, g: int, b: int) -> None:
        mine = seq.canonical(g, node.start, node.stop)
        theirs = node.runs[g]
        if not mine or seq.run_at(g, b) is not None:
            return
        if seq.tainted[g].within(node.start, node.stop):
            seq.held_back.append(b)  # its other rows are still read here; see settle()
            return
        if theirs is None:
            self._attach(seq, node, g, b, mine)
            return
        if covers_all(theirs.spans, seq.coverage[g].within(node.start, node.stop)):
            if node.stop - node.start == self.block:
                self._swap(seq, theirs, g, b)
        elif covers_all(mine, theirs.spans) and mine != theirs.spans:
            self.pools[g].detach(theirs)
            self._attach(seq, node, g, b, mine)

    def _attach(self, seq: Sequence, node: Node, g: int, b: int, mine: tuple[Span, ...]) -> None:
        """The sequence's own pages of block b become the node's run; rowless pages are freed."""
        group, per = self.layout.groups[g], self.per_block[g]
        table = seq.pages[g]
        known = SpanSet(mine)
        keep = [
            bool(
                known.within(
                    node.start + j * group.page_size, node.start + (j + 1) * group.page_size
                )
            )
            for j in range(per)
        ]
        end = (b + 1) * per
        table.extend([NO_PAGE] * (end - len(table)))
        for i in range(b * per, end):
            if not keep[i - b * per]:
                self.pools[g].give((table[i],))
                table[i] = NO_PAGE
        pages = table[b * per : end]
        low = max(node.start, group.lookahead)
        full = node.stop - node.start == self.block and mine == ((low, node.stop),)
        run = Run(node, g, pages, sum(keep), low, None if full else mine)
        node.runs[g] = run
        seq.set_run(g, b, run)
        seq.coverage[g].remove(node.stop, end * group.page_size)

    def _swap(self, seq: Sequence, run: Run, g: int, b: int) -> None:
        """The tree has these rows: share them and give back the sequence's own pages."""
        per = self.per_block[g]
        self.pools[g].hold(run)
        self.pools[g].give(seq.pages[g][b * per : (b + 1) * per])
        seq.pages[g][b * per : (b + 1) * per] = run.pages
        seq.set_run(g, b, run)

    def _supersede(self, parent: Node, node: Node) -> None:
        """Partial siblings that are a prefix of `node` and covered no better leave the tree."""
        for leaf in self.tree.prefixes(parent, node.tokens):
            pairs = list(zip(leaf.runs, node.runs, strict=True))
            if all(covers_all(new.spans if new else (), old.spans) for old, new in pairs if old):
                for g, run in enumerate(leaf.runs):
                    if run is not None:
                        self.pools[g].detach(run)
                self.tree.prune(leaf)

    def _publish_dirty(self, seq: Sequence) -> None:
        """Blocks claimed from the tree whose holes this sequence has filled in copies."""
        path: dict[int, Node] = {}
        node = seq.tip
        while node.parent is not None:
            path[node.start // self.block] = node
            node = node.parent
        for b in seq.dirty:
            self._merge(seq, path[b], b)
        seq.dirty.clear()

    def _move_tip(self, seq: Sequence, node: Node) -> None:
        old = seq.tip
        node.pins += 1
        old.pins -= 1
        seq.tip = node
        self.tree.prune(old)

    # -- give up --------------------------------------------------------------------------

    def slide(self, seq: Sequence, caching: bool) -> None:
        """Give back windowed groups' blocks that no later pass of the sequence reads.

        They go first when room is wanted, except where its claim ended: what is read there has
        been shared once, and the next request that branches off reads it again.
        """
        if seq.pending_any or seq.dirty:
            return
        settled = (seq.published if caching else seq.committed) // self.block
        for g, group in enumerate(self.layout.groups):
            if group.window is None:
                continue
            keep = min(self._lowest_block(g, seq.committed), settled)
            if keep > seq.first_block[g]:
                self._give_blocks(seq, g, seq.first_block[g], keep)
                seq.first_block[g] = keep

    def _lowest_block(self, g: int, rows: int) -> int:
        """First block of windowed group g that a pass after `rows` rows reads."""
        group = self.layout.groups[g]
        ahead = self.layout.lookahead if group.domain is Domain.TARGET else 0
        return max(0, group.first_needed(max(0, rows - ahead))) // self.block

    def _give_blocks(self, seq: Sequence, g: int, first: int, stop: int) -> None:
        per, table, pool = self.per_block[g], seq.pages[g], self.pools[g]
        branch = range(self._lowest_block(g, seq.reused), -(-seq.reused // self.block))
        for b in range(first, stop):
            run = seq.run_at(g, b)
            if run is None:
                pool.give(table[b * per : (b + 1) * per])
            else:
                seq.runs[g][b] = None
                pool.drop(run, first=b not in branch)
        table[first * per : stop * per] = [NO_PAGE] * ((stop - first) * per)
        seq.coverage[g].remove(0, stop * self.block)
        seq.tainted[g].remove(0, stop * self.block)

    def release(self, seq: Sequence) -> None:
        """Drop every page, children before parents, and the pin on the path."""
        self.unpin(seq)
        for g, pool in enumerate(self.pools):
            per, table, runs = self.per_block[g], seq.pages[g], seq.runs[g]
            pool.give(table[len(runs) * per :])
            for b in range(len(runs) - 1, -1, -1):
                run = runs[b]
                if run is None:
                    pool.give(table[b * per : (b + 1) * per])
                else:
                    pool.drop(run)
            table.clear()
            runs.clear()
        seq.tip.pins -= 1
        self.tree.prune(seq.tip)

    def unpin(self, seq: Sequence) -> None:
        """The copies are done (or no longer wanted): their sources are no longer held."""
        for run in seq.sources:
            self.pools[run.group].drop(run)
        seq.sources.clear()

    # -- evict ----------------------------------------------------------------------------

    def make_room(self, g: int, count: int) -> int:
        """Evict cached runs of group g until `count` pages are free. Returns pages evicted."""
        pool, evicted = self.pools[g], 0
        while len(pool.free) < count:
            run = pool.oldest
            if run is None:
                raise InvariantError(f"{pool.name}: {count} pages promised, nothing to evict")
            evicted += run.size
            self.evict(run)
        return evicted

    def evict(self, run: Run) -> None:
        """A cached run leaves the tree; a block without its target pages goes as a whole."""
        node, group = run.node, self.layout.groups[run.group]
        self.pools[run.group].detach(run)
        if group.required and group.window is None:
            if node.children() or node.pins:
                raise InvariantError(
                    f"block [{node.start}, {node.stop}) is evicted before its children"
                )
            for g, other in enumerate(node.runs):
                if other is not None:
                    if other.refs:
                        raise InvariantError(f"a held run of {self.pools[g].name} lost its block")
                    self.pools[g].detach(other)
        self.tree.prune(node)
