"""ByteKV: a store whose every cell holds the token prefix that it is a function of.

Law: a read asserts the cell's content, a write asserts that the page is the writer's alone; a freed
page is poisoned, a copy copies cells. It trusts the page tables and the tree it is shown, and
nothing that the manager counts. It stands for the tensors of a real engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tandemkv.base.ids import NO_PAGE
from tandemkv.base.spans import Span
from tandemkv.kv.intent import PageCopy
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.kv.manager import KVManager
from tandemkv.kv.sequence import Sequence as Seq

POISON = "poison"
SCRATCH = "scratch"
Cell = Any  # POISON, SCRATCH, or (namespace, tokens of the prefix, whether canonical)


def content(seq: Seq, tokens: Sequence[int], slot: int, canonical: bool = True) -> Cell:
    return (seq.namespace, tuple(tokens[: slot + 1]), canonical)


class ByteKV:
    """Cells of every page of every group."""

    def __init__(self, layout: Layout, num_pages: Sequence[int]) -> None:
        self.layout = layout
        self.cells: list[list[list[Cell]]] = [
            [[POISON] * group.page_size for _ in range(total)]
            for group, total in zip(layout.groups, num_pages, strict=True)
        ]

    def poison(self, freed: Sequence[Iterable[int]]) -> None:
        for pages, cells in zip(freed, self.cells, strict=True):
            for page in pages:
                cells[page] = [POISON] * len(cells[page])

    def copy(self, copies: Iterable[PageCopy]) -> None:
        for copy in copies:
            assert copy.src != copy.dst
            self.cells[copy.group][copy.dst] = list(self.cells[copy.group][copy.src])

    def _page(self, seq: Seq, g: int, slot: int) -> tuple[int, int]:
        size = self.layout.groups[g].page_size
        assert slot // size < len(seq.pages[g]), f"group {g} slot {slot} has no room"
        page = seq.pages[g][slot // size]
        assert page != NO_PAGE, f"group {g} slot {slot} is on no page"
        return page, slot % size

    def read(self, seq: Seq, g: int, slot: int) -> Cell:
        page, offset = self._page(seq, g, slot)
        return self.cells[g][page][offset]

    def write(self, manager: KVManager, seq: Seq, g: int, slot: int, cell: Cell) -> None:
        page, offset = self._page(seq, g, slot)
        users = [other.id for other in manager.sequences.values() if page in other.pages[g]]
        assert users == [seq.id], f"page {page} of group {g} is written while held by {users}"
        runs = [node.runs[g] for node in manager.tree.nodes()]
        assert not any(run and page in run.pages for run in runs), f"page {page} is in the tree"
        assert not any(
            page in run.pages for other in manager.sequences.values() for run in other.sources
            if run.group == g
        ), f"page {page} is a copy source"  # fmt: skip
        self.cells[g][page][offset] = cell

    # -- passes ---------------------------------------------------------------------------

    def run_pass(
        self,
        manager: KVManager,
        seq: Seq,
        tokens: Sequence[int],
        start: int,
        stop: int,
        writes: Sequence[Sequence[Span]],
    ) -> None:
        """The target over positions [start, stop), then the draft rows that `writes` asks for."""
        todo = [{s for a, b in spans for s in range(a, b)} for spans in writes]
        for p in range(start, stop):
            for g in self.layout.target_groups:
                if p in todo[g]:
                    self.write(manager, seq, g, p, content(seq, tokens, p))
            for g in self.layout.target_groups:
                self._read_target(seq, tokens, g, p, todo[g])
        for g in self.layout.draft_groups:
            self.run_draft(manager, seq, tokens, g, todo[g])

    def _read_target(
        self, seq: Seq, tokens: Sequence[int], g: int, p: int, fresh: set[int]
    ) -> None:
        window = self.layout.groups[g].window
        for s in range(0 if window is None else max(0, p - window + 1), p + 1):
            assert s in seq.coverage[g] or s in fresh, (
                f"position {p} reads target slot {s}, uncovered"
            )
            cell = self.read(seq, g, s)
            assert cell == content(seq, tokens, s), f"target slot {s} reads {cell}"

    def run_draft(
        self, manager: KVManager, seq: Seq, tokens: Sequence[int], g: int, todo: set[int]
    ) -> None:
        """Write the draft rows of slots `todo`; a drafter that is not pointwise reads its own."""
        group = self.layout.groups[g]
        for s in sorted(todo):
            canonical = group.pointwise or self._context_is_whole(seq, tokens, g, s, todo)
            assert s < len(tokens), f"draft slot {s} needs a token that is not known"
            self.write(manager, seq, g, s, content(seq, tokens, s, canonical))

    def _context_is_whole(
        self, seq: Seq, tokens: Sequence[int], g: int, slot: int, fresh: set[int]
    ) -> bool:
        cells = []
        for s in range(self.layout.groups[g].first_needed(slot), slot):
            if s not in fresh and s not in seq.coverage[g]:
                return False
            cells.append(self.read(seq, g, s))
            assert cells[-1][:2] == content(seq, tokens, s)[:2], f"draft slot {s} is foreign"
        return all(cell[2] for cell in cells)

    def draft(self, manager: KVManager, seq: Seq, num_drafts: int) -> int:
        """Propose after n rows: read what is readable, scribble beyond. Returns slots read."""
        n, read = seq.committed, 0
        for g in self.layout.draft_groups:
            group = self.layout.groups[g]
            for s in range(group.first_needed(n), len(seq.tokens)):
                if s in seq.coverage[g]:
                    self.check_row(seq, g, s)
                    read += 1
            for s in range(n + group.lookahead, n + group.lookahead + num_drafts):
                if s not in seq.coverage[g] and seq.owns(g, s):
                    self.write(manager, seq, g, s, SCRATCH)
        return read

    def check_row(self, seq: Seq, g: int, s: int) -> None:
        cell = self.read(seq, g, s)
        want = content(seq, seq.tokens, s, s not in seq.tainted[g])
        if self.layout.groups[g].window is not None and cell[2] and not want[2]:
            return  # a windowed drafter's rows may be better than the manager dares to say
        assert cell == want, f"group {g} slot {s} holds {cell}, expected {want}"

    # -- audits ---------------------------------------------------------------------------

    def audit(self, manager: KVManager) -> None:
        """Whatever coverage names, in the tree or in a sequence, is what it should be."""
        self.audit_tree(manager)
        for seq in manager.sequences.values():
            if seq.sources:
                continue  # its copies are not made yet
            for g, group in enumerate(self.layout.groups):
                for a, b in seq.coverage[g]:
                    for s in range(a, b):
                        if group.domain is Domain.TARGET:
                            assert self.read(seq, g, s) == content(seq, seq.tokens, s)
                        else:
                            self.check_row(seq, g, s)

    def audit_tree(self, manager: KVManager) -> None:
        for namespace, root in manager.tree.roots.items():
            walk = [(child, ()) for child in root.children()]
            while walk:
                node, before = walk.pop()
                size = len(node.tokens) // 4
                mine = [
                    int.from_bytes(node.tokens[4 * i : 4 * i + 4], "little") for i in range(size)
                ]
                path = (*before, *mine)
                walk.extend((child, path) for child in node.children())
                for g, run in enumerate(node.runs):
                    for a, b in run.spans if run else ():
                        for s in range(a, b):
                            self._published(namespace, path, node.start, g, run.pages, s)

    def _published(
        self, namespace: Any, path: tuple[int, ...], start: int, g: int, pages: list[int], s: int
    ) -> None:
        size = self.layout.groups[g].page_size
        page = pages[(s - start) // size]
        assert page != NO_PAGE, f"slot {s} of group {g} is published on no page"
        cell = self.cells[g][page][s % size]
        want = (namespace, path[: s + 1], True)
        assert cell == want, f"slot {s} of group {g} is published as {cell}, expected {want}"


def group(name: str, domain: Domain, page: int, window: int | None = None, **more: Any):
    """A layer group with geometry that does not matter here."""
    return LayerGroup(
        name=name,
        domain=domain,
        layers=(0,),
        num_kv_heads=1,
        head_dim=2,
        page_size=page,
        window=window,
        **more,
    )
