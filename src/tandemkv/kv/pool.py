"""The pages of one layer group: which are free, and which cached ones go first.

Law: every page is free, held or cached, and free + held + cached = total. A page handed out is
handed out once until it is given back. The order of eviction is that of the last drop, except for
runs that left every window: those go first, also in that order. This module knows no tokens and
touches no bytes.

    free  --take-->  held (a sequence's own)  --publish-->  held (in the tree, shared)
      ^                 | release                              | last holder drops
      +-----------------+<------------- evict ------------  cached (in the tree, no holder)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from tandemkv.base.errors import InvariantError
from tandemkv.base.ids import NO_PAGE, PageId

if TYPE_CHECKING:
    from tandemkv.kv.tree import Run


class Usage(msgspec.Struct, frozen=True):
    """Pages of one group by state; peak_held is the most that were held at once."""

    free: int
    held: int
    cached: int
    total: int
    peak_held: int


class PagePool:
    """Free pages and cached runs of one layer group.

    lru: cached runs by their last drop; left: those that left every window.
    """

    __slots__ = ("cached", "free", "freed", "left", "lru", "name", "peak_held", "total")

    def __init__(self, name: str, total: int, *, debug: bool = False) -> None:
        self.name = name
        self.total = total
        self.free: list[PageId] = [PageId(i) for i in range(total - 1, -1, -1)]
        self.lru: OrderedDict[Run, None] = OrderedDict()
        self.left: OrderedDict[Run, None] = OrderedDict()
        self.cached = 0
        self.peak_held = 0
        self.freed: list[PageId] | None = [] if debug else None

    @property
    def held(self) -> int:
        return self.total - len(self.free) - self.cached

    @property
    def available(self) -> int:
        """Pages that can be handed out now, evicting if need be."""
        return len(self.free) + self.cached

    def take(self, count: int) -> list[PageId]:
        """Hand out `count` free pages; the caller has made room."""
        free = self.free
        if count > len(free):
            raise InvariantError(f"{self.name}: {count} pages taken of {len(free)} free")
        if not count:
            return []
        pages = free[-count:]
        del free[-count:]
        pages.reverse()
        self.note_peak()
        return pages

    def note_peak(self) -> None:
        held = self.held
        if held > self.peak_held:
            self.peak_held = held

    def give(self, pages: Iterable[PageId]) -> None:
        """Pages that nobody holds and no block owns become free; NO_PAGE entries are skipped."""
        back = [page for page in pages if page != NO_PAGE]
        self.free.extend(back)
        if self.freed is not None:
            self.freed.extend(back)

    def drain_freed(self) -> list[PageId]:
        """Pages that became free since the last call (debug mode), for the storage to poison."""
        if self.freed is None:
            return []
        out, self.freed = self.freed, []
        return out

    # -- runs ------------------------------------------------------------------------------

    @property
    def oldest(self) -> Run | None:
        """The cached run that is evicted next."""
        return next(iter(self.left or self.lru), None)

    def _uncache(self, run: Run) -> None:
        del (self.left if run in self.left else self.lru)[run]
        self.cached -= run.size

    def hold(self, run: Run) -> None:
        """+1 holder; a cached run becomes held and leaves the eviction order."""
        if run.refs == 0:
            if not run.attached:
                raise InvariantError(f"{self.name}: a run outside the tree has no holder")
            self._uncache(run)
        run.refs += 1

    def hold_all(self, runs: Iterable[Run | None]) -> None:
        """hold() for each run of a long path."""
        lru, left, cached = self.lru, self.left, 0
        for run in runs:
            if run is None:
                continue
            if not run.refs:
                del (left if left and run in left else lru)[run]
                cached += run.size
            run.refs += 1
        self.cached -= cached

    def drop(self, run: Run, *, first: bool = False) -> None:
        """-1 holder; the last one makes the run cached (`first`: it goes before others) or free."""
        if run.refs < 1:
            raise InvariantError(f"{self.name}: a run without holders is dropped")
        run.refs -= 1
        if run.refs:
            return
        if not run.attached:
            self.give(run.pages)
            return
        (self.left if first else self.lru)[run] = None
        self.cached += run.size

    def detach(self, run: Run) -> None:
        """The run leaves the tree; its pages are free at once, or when the last holder drops."""
        if not run.attached:
            raise InvariantError(f"{self.name}: a run leaves the tree twice")
        run.attached = False
        run.node.runs[run.group] = None
        if run.refs == 0:
            self._uncache(run)
            self.give(run.pages)

    def usage(self) -> Usage:
        return Usage(len(self.free), self.held, self.cached, self.total, self.peak_held)

    def check(self) -> None:
        """Raise InvariantError unless free and cached pages are distinct and rightly counted."""
        pages = list(self.free)
        for run in (*self.left, *self.lru):
            if run.refs or not run.attached:
                raise InvariantError(f"{self.name}: the eviction order names a held or gone run")
            pages.extend(page for page in run.pages if page != NO_PAGE)
        if len(pages) - len(self.free) != self.cached:
            raise InvariantError(f"{self.name}: {self.cached} pages counted as cached, not so")
        if len(set(pages)) != len(pages) or any(not 0 <= p < self.total for p in pages):
            raise InvariantError(f"{self.name}: a page is free or cached twice, or does not exist")
