"""One held sequence: its tokens, its page tables, what it may read, and its watermarks.

Law: 0 <= published <= committed <= computed <= reserved and reused <= committed, in target rows; a
draft group's coverage may run its lookahead ahead, never past the known tokens. Coverage names
slots of held pages only. A sequence writes only pages that are its own (not in the tree). Only
the manager changes a sequence; everyone else reads it.

    0 ...... published ...... committed ...... computed ...... reserved
    |-- in the tree --|-- final rows --|-- in flight --|-- room ----|
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from tandemkv.base.errors import InvariantError
from tandemkv.base.ids import NO_PAGE, PageId, SeqId
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.keys import TOKEN_BYTES, Namespace, pack_tokens, token_bytes
from tandemkv.kv.layout import Layout

if TYPE_CHECKING:
    from tandemkv.kv.records import DraftUse
    from tandemkv.kv.tree import Node, Run


class Sequence:
    """Attributes others may read: id, namespace, tokens, the watermarks, pages, coverage.

    pages: per group, the page table (index = slot // page_size; NO_PAGE where nothing is held).
    coverage: per group, readable slots. tainted: those of them that are not canonical (computed
    past a gap by a drafter that is not pointwise): never published. pending: planned writes of
    holes. dirty: matched blocks with pages of its own; held_back: blocks that wait for the end,
    for their tainted rows are still read. runs: per group and block, the tree's run whose pages
    the table shares. first_block: per group, the first block it still keeps. sources: runs being
    copied from. taken, copied, written, masks: for explain. use: its request's draft counters.
    """

    __slots__ = (
        "committed",
        "computed",
        "copied",
        "coverage",
        "dirty",
        "dummy",
        "first_block",
        "held_back",
        "id",
        "layout",
        "masks",
        "namespace",
        "packed",
        "pages",
        "pending",
        "published",
        "received",
        "reserved",
        "reused",
        "runs",
        "sources",
        "tainted",
        "taken",
        "tip",
        "tokens",
        "use",
        "written",
    )

    def __init__(
        self,
        seq_id: SeqId,
        layout: Layout,
        namespace: Namespace,
        tokens: list[int],
        packed: array[int],
        tip: Node,
        use: DraftUse,
    ) -> None:
        groups = layout.groups
        self.id = seq_id
        self.layout = layout
        self.namespace = namespace
        self.tokens = list(tokens)
        self.packed = packed
        self.tip = tip
        self.committed = self.computed = self.published = self.reserved = self.reused = 0
        self.pages: list[list[PageId]] = [[] for _ in groups]
        self.runs: list[list[Run | None]] = [[] for _ in groups]
        self.coverage: list[SpanSet] = [SpanSet() for _ in groups]
        self.tainted: list[SpanSet] = [SpanSet() for _ in groups]
        self.pending: list[SpanSet] = [SpanSet() for _ in groups]
        self.first_block: list[int] = [0] * len(groups)
        self.dirty: list[int] = []
        self.held_back: list[int] = []
        self.sources: list[Run] = []
        self.taken: list[SpanSet] = [SpanSet() for _ in groups]
        self.copied: list[SpanSet] = [SpanSet() for _ in groups]
        self.written: list[SpanSet] = [SpanSet() for _ in groups]
        self.received: list[SpanSet] = [SpanSet() for _ in groups]
        self.masks: list[list[tuple[int, int, str]]] = [[] for _ in groups]
        self.dummy = False
        self.use = use

    def writes(self, start: int, stop: int) -> tuple[tuple[Span, ...], ...]:
        """Per group, the slots that a pass over positions [start, stop) must write.

        [start + D, stop + D) less what is covered already; never a slot below D, nor one of a
        block that the group has given up (behind its window).
        """
        block = self.layout.block_size
        out: list[tuple[Span, ...]] = []
        for g, group in enumerate(self.layout.groups):
            ahead = group.lookahead
            low = max(start + ahead, self.first_block[g] * block)
            out.append(tuple(self.coverage[g].missing(low, stop + ahead)) if start < stop else ())
        return tuple(out)

    @property
    def pending_any(self) -> bool:
        """Whether a planned hole is still to be filled."""
        return any(self.pending)

    def block_tokens(self, start: int, stop: int) -> bytes:
        """Packed tokens [start, stop)."""
        return token_bytes(self.packed[start:stop])

    def canonical(self, g: int, start: int, stop: int) -> tuple[Span, ...]:
        """Publishable slots of group g within [start, stop)."""
        spans = self.coverage[g].within(start, stop)
        if not self.tainted[g]:
            return tuple(spans)
        return tuple(part for a, b in spans for part in self.tainted[g].missing(a, b))

    def run_at(self, g: int, block: int) -> Run | None:
        runs = self.runs[g]
        return runs[block] if block < len(runs) else None

    def set_run(self, g: int, block: int, run: Run | None) -> None:
        runs = self.runs[g]
        if block >= len(runs):
            runs.extend([None] * (block + 1 - len(runs)))
        runs[block] = run

    def owns(self, g: int, slot: int) -> bool:
        """Whether `slot` lies in a page that is this sequence's alone (so it may be written)."""
        return self.owns_all(g, slot, slot + 1)

    def owns_all(self, g: int, start: int, stop: int) -> bool:
        """Whether every slot of [start, stop) may be written by this sequence."""
        size, block = self.layout.groups[g].page_size, self.layout.block_size
        table = self.pages[g][start // size : -(-stop // size)]
        if start < 0 or len(table) != -(-stop // size) - start // size or NO_PAGE in table:
            return False
        return not any(self.runs[g][start // block : -(-stop // block)])

    def check(self) -> None:
        """Raise InvariantError unless watermarks, tables and coverage obey the module's law."""
        marks = (0, self.published, self.committed, self.computed, self.reserved)
        if list(marks) != sorted(marks) or self.reused > self.committed:
            raise InvariantError(f"sequence {self.id}: watermarks {marks}, reused {self.reused}")
        if self.committed > len(self.tokens) or self.packed != pack_tokens(self.tokens):
            raise InvariantError(f"sequence {self.id}: rows without tokens")
        if len(self.packed.tobytes()) != len(self.tokens) * TOKEN_BYTES:
            raise InvariantError(f"sequence {self.id}: packed tokens out of step")
        for g in range(len(self.layout.groups)):
            self._check_group(g)

    def _check_group(self, g: int) -> None:
        group = self.layout.groups[g]
        where = f"sequence {self.id}, group {group.name}"
        size, block, table = group.page_size, self.layout.block_size, self.pages[g]
        low = self.first_block[g] * block
        for spans in (self.coverage[g], self.tainted[g], self.pending[g]):
            spans.check()
        covered = self.coverage[g]
        if len(table) * size < self.reserved + group.lookahead:
            raise InvariantError(f"{where}: {self.reserved} rows reserved, {len(table)} pages")
        if covered and (covered.start < max(low, group.lookahead)):
            raise InvariantError(f"{where}: coverage {covered} below its first slot")
        ahead = self.committed + group.lookahead
        if covered.stop > min(len(self.tokens), max(ahead, self.taken[g].stop)):
            raise InvariantError(f"{where}: coverage {covered} beyond the known tokens")
        for a, b in covered:
            if NO_PAGE in table[a // size : (b - 1) // size + 1] or b > len(table) * size:
                raise InvariantError(f"{where}: coverage {covered} on pages not held")
        for a, b in self.tainted[g]:
            if not covered.covers(a, b):
                raise InvariantError(f"{where}: tainted slots outside coverage")
        for a, b in self.pending[g]:
            if any(slot in covered or not self.owns(g, slot) for slot in range(a, b)):
                raise InvariantError(f"{where}: a planned write is covered or not owned")
        if any(page != NO_PAGE for page in table[: low // size]):
            raise InvariantError(f"{where}: pages held behind the window")
        if group.required:
            need = max(low, 0 if group.window is None else group.first_needed(self.committed))
            if not covered.covers(need, self.committed):
                raise InvariantError(f"{where}: committed rows lack coverage: {covered}")
        for b, run in enumerate(self.runs[g]):
            self._check_run(g, b, run, where)

    def _check_run(self, g: int, b: int, run: Run | None, where: str) -> None:
        if run is None:
            return
        per_block = self.layout.block_size // self.layout.groups[g].page_size
        shared = run.pages + [NO_PAGE] * (per_block - len(run.pages))
        if run.refs < 1 or self.pages[g][b * per_block : (b + 1) * per_block] != shared:
            raise InvariantError(f"{where}: block {b} does not hold the run it shares")
        known = SpanSet(run.spans)
        block = self.layout.block_size
        for a, c in self.coverage[g].within(b * block, (b + 1) * block):
            if not known.covers(a, c):
                raise InvariantError(f"{where}: block {b} reads slots its run does not cover")
