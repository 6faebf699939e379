"""Half-open integer intervals and sorted sets of them: how coverage is written down.

Law: a SpanSet's spans are sorted, non-empty, and neither overlap nor touch. Operations are pure
interval arithmetic, O(number of spans); nothing here knows what the integers mean.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise

from tandemkv.base.errors import InvariantError

Span = tuple[int, int]
"""(start, stop), half-open; empty when stop <= start."""


class SpanSet:
    """A mutable set of integers held as sorted, disjoint, non-touching half-open spans."""

    __slots__ = ("_starts", "_stops")

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in spans:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Put [start, stop) in the set; touching spans merge. An empty span changes nothing."""
        if stop <= start:
            return
        starts, stops = self._starts, self._stops
        if not starts or start > stops[-1]:  # the common case: growth at the end
            starts.append(start)
            stops.append(stop)
            return
        if start >= starts[-1]:
            if stop > stops[-1]:
                stops[-1] = stop
            return
        lo = bisect_left(stops, start)
        hi = bisect_right(starts, stop)
        if lo < hi:
            start, stop = min(start, starts[lo]), max(stop, stops[hi - 1])
        starts[lo:hi] = [start]
        stops[lo:hi] = [stop]

    def remove(self, start: int, stop: int) -> None:
        """Take [start, stop) out of the set. An empty span changes nothing."""
        if stop <= start:
            return
        starts, stops = self._starts, self._stops
        lo = bisect_right(stops, start)
        hi = bisect_left(starts, stop)
        if lo >= hi:
            return
        new_starts: list[int] = []
        new_stops: list[int] = []
        if starts[lo] < start:
            new_starts.append(starts[lo])
            new_stops.append(start)
        if stops[hi - 1] > stop:
            new_starts.append(stop)
            new_stops.append(stops[hi - 1])
        starts[lo:hi] = new_starts
        stops[lo:hi] = new_stops

    def covers(self, start: int, stop: int) -> bool:
        """Whether every integer of [start, stop) is in the set. True for an empty span."""
        if stop <= start:
            return True
        i = bisect_right(self._starts, start) - 1
        return i >= 0 and self._stops[i] >= stop

    def missing(self, start: int, stop: int) -> list[Span]:
        """The parts of [start, stop) that are not in the set, in order."""
        out: list[Span] = []
        i = bisect_right(self._stops, start)
        while start < stop:
            if i == len(self._starts) or self._starts[i] >= stop:
                out.append((start, stop))
                break
            if self._starts[i] > start:
                out.append((start, self._starts[i]))
            start = self._stops[i]
            i += 1
        return out

    def within(self, start: int, stop: int) -> list[Span]:
        """The parts of [start, stop) that are in the set, in order."""
        out: list[Span] = []
        i = bisect_right(self._stops, start)
        while i < len(self._starts) and self._starts[i] < stop:
            out.append((max(start, self._starts[i]), min(stop, self._stops[i])))
            i += 1
        return out

    def start_of_run(self, stop: int) -> int:
        """The smallest start such that [start, stop) is covered; `stop` itself if stop-1 is not."""
        i = bisect_left(self._starts, stop) - 1
        return self._starts[i] if i >= 0 and self._stops[i] >= stop else stop

    def copy(self) -> SpanSet:
        new = SpanSet()
        new._starts = self._starts.copy()
        new._stops = self._stops.copy()
        return new

    @property
    def start(self) -> int:
        """Smallest member, or 0 when empty."""
        return self._starts[0] if self._starts else 0

    @property
    def stop(self) -> int:
        """One past the largest member, or 0 when empty."""
        return self._stops[-1] if self._stops else 0

    def count(self) -> int:
        """How many integers the set holds."""
        return sum(self._stops) - sum(self._starts)

    def check(self) -> None:
        """Raise InvariantError unless the spans are sorted, non-empty and do not touch."""
        flat = [x for pair in zip(self._starts, self._stops, strict=True) for x in pair]
        if any(b <= a for a, b in pairwise(flat)):
            raise InvariantError(f"spans are not sorted and disjoint: {list(self)}")

    def __iter__(self) -> Iterator[Span]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def __len__(self) -> int:
        """The number of spans (not of integers)."""
        return len(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __contains__(self, value: int) -> bool:
        return self.covers(value, value + 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SpanSet):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "SpanSet(" + ", ".join(f"[{a}, {b})" for a, b in self) + ")"
