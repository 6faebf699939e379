"""Every law of the KV manager, recomputed from scratch.

Law: this module trusts no counter: it rebuilds who holds what from the page tables and the tree
and compares. It changes nothing. It is slow on purpose; production runs it when idle.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tandemkv.base.errors import InvariantError
from tandemkv.base.ids import NO_PAGE, PageId
from tandemkv.kv.tree import Node, Run

if TYPE_CHECKING:
    from tandemkv.kv.manager import KVManager


def check_manager(manager: KVManager) -> None:
    """Raise InvariantError naming the first law that is broken."""
    manager.tree.check()
    for seq in manager.sequences.values():
        seq.check()
    for pool in manager.pools:
        pool.check()
    nodes = manager.tree.nodes()
    _check_pins(manager, nodes)
    _check_reachable(manager, nodes)
    for g in range(len(manager.pools)):
        _check_group(manager, g, nodes)


def _check_pins(manager: KVManager, nodes: list[Node]) -> None:
    tips = Counter(id(seq.tip) for seq in manager.sequences.values())
    for node in [*manager.tree.roots.values(), *nodes]:
        if node.pins != tips.pop(id(node), 0):
            raise InvariantError(f"block [{node.start}, {node.stop}) has {node.pins} pins, not so")
    if tips:
        raise InvariantError("a sequence's path leads out of the tree")
    for seq in manager.sequences.values():
        if seq.tip.stop != seq.published:
            raise InvariantError(f"sequence {seq.id}: published {seq.published} is not its path")


def _check_reachable(manager: KVManager, nodes: list[Node]) -> None:
    """A block stands only with all its unwindowed target rows; whoever holds it holds those."""
    layout = manager.layout
    whole = [g for g in layout.target_groups if layout.groups[g].window is None]
    for node in nodes:
        for g in whole:
            run = node.runs[g]
            if run is None or run.spans != ((node.start, node.stop),):
                raise InvariantError(
                    f"block [{node.start}, {node.stop}) lacks rows of {layout.groups[g].name}"
                )
    for seq in manager.sequences.values():
        node = seq.tip
        while node.parent is not None:
            for g in whole:
                if seq.run_at(g, node.start // layout.block_size) is not node.runs[g]:
                    raise InvariantError(f"sequence {seq.id} does not hold its own path")
            node = node.parent


def _check_group(manager: KVManager, g: int, nodes: list[Node]) -> None:
    pool, per = manager.pools[g], manager.layout.block_size // manager.layout.groups[g].page_size
    holders: Counter[Run] = Counter()
    owned: list[PageId] = []
    for seq in manager.sequences.values():
        for b, run in enumerate(seq.runs[g]):
            if run is not None:
                holders[run] += 1
            else:
                owned.extend(seq.pages[g][b * per : (b + 1) * per])
        owned.extend(seq.pages[g][len(seq.runs[g]) * per :])
        holders.update(run for run in seq.sources if run.group == g)
    in_tree = [run for node in nodes for run in [node.runs[g]] if run is not None]
    for run in {*in_tree, *holders}:
        if run.refs != holders[run]:
            raise InvariantError(f"{pool.name}: {run.refs} holders counted, {holders[run]} found")
    cached = {run for run in in_tree if not run.refs}
    if cached != {*pool.left, *pool.lru}:
        raise InvariantError(f"{pool.name}: the eviction order is not the cached runs")
    _check_order(manager, g)
    pages = list(pool.free) + [p for p in owned if p != NO_PAGE]
    pages += [p for run in {*in_tree, *holders} for p in run.pages if p != NO_PAGE]
    if sorted(pages) != list(range(pool.total)):
        raise InvariantError(
            f"{pool.name}: {len(pages)} pages accounted for, {len(set(pages))} distinct,"
            f" of {pool.total}"
        )


def _check_order(manager: KVManager, g: int) -> None:
    """Leaf before parent, where the loss of a parent makes its children unreachable."""
    group = manager.layout.groups[g]
    if not group.required or group.window is not None:
        return
    gone: set[Node] = set()
    for run in (*manager.pools[g].left, *manager.pools[g].lru):
        left = [c for c in run.node.children() if c not in gone]
        if left:
            raise InvariantError(f"{group.name}: a block would be evicted before its children")
        gone.add(run.node)
