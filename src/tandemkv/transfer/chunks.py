"""The life of one chunk: rows that become final together and are written together.

    OFFERED --accept--> ACCEPTED --post--> POSTED --------deliver-------> DELIVERED
       |                   |                  |                              ^
       +------abort--------+                doubt                            |
                  v                           v                              |
               ABORTED                     IN_DOUBT -----------deliver-------+
                                              +----------------drain-------> DRAINED

    OFFERED    rows are final, nobody has asked for them yet
    ACCEPTED   the other side's grant covers them, the write has not begun
    POSTED     some rank may be writing; IN_DOUBT: it may still be, though nobody waits for it
    DELIVERED  all bytes are there; DRAINED: some may not be, and no more will be written

Law: a chunk may be written to exactly while it is POSTED or IN_DOUBT, and it leaves those states
by proof alone: every part (a pair of ranks that the bytes go between) was done, or was over. An
error, a time-out, a cancellation prove nothing. Done is the intersection over parts, failed and
cancelled are the union. This module knows neither peers nor time.
"""

from __future__ import annotations

from enum import StrEnum

from tandemkv.base.errors import InvariantError
from tandemkv.transfer.wire import ChunkNote, GroupSpans


class ChunkState(StrEnum):
    OFFERED = "offered"
    ACCEPTED = "accepted"
    POSTED = "posted"
    IN_DOUBT = "in_doubt"
    DELIVERED = "delivered"
    ABORTED = "aborted"
    DRAINED = "drained"


class ChunkEvent(StrEnum):
    ACCEPT = "accept"
    POST = "post"
    DOUBT = "doubt"
    DELIVER = "deliver"
    DRAIN = "drain"
    ABORT = "abort"


TRANSITIONS: dict[tuple[ChunkState, ChunkEvent], ChunkState] = {
    (ChunkState.OFFERED, ChunkEvent.ACCEPT): ChunkState.ACCEPTED,
    (ChunkState.OFFERED, ChunkEvent.ABORT): ChunkState.ABORTED,
    (ChunkState.ACCEPTED, ChunkEvent.POST): ChunkState.POSTED,
    (ChunkState.ACCEPTED, ChunkEvent.ABORT): ChunkState.ABORTED,
    (ChunkState.POSTED, ChunkEvent.DELIVER): ChunkState.DELIVERED,
    (ChunkState.POSTED, ChunkEvent.DOUBT): ChunkState.IN_DOUBT,
    (ChunkState.IN_DOUBT, ChunkEvent.DELIVER): ChunkState.DELIVERED,
    (ChunkState.IN_DOUBT, ChunkEvent.DRAIN): ChunkState.DRAINED,
}

UNPOSTED = frozenset({ChunkState.OFFERED, ChunkState.ACCEPTED})
IN_FLIGHT = frozenset({ChunkState.POSTED, ChunkState.IN_DOUBT})
SETTLED = frozenset({ChunkState.DELIVERED, ChunkState.ABORTED, ChunkState.DRAINED})


class Chunk:
    """groups: what it carries. required: a draft chunk's loss fails nobody. done, over: parts that
    arrived, and parts that ended without; unclean: of those, what may land later all the same.
    why: the first bad news."""

    __slots__ = (
        "done",
        "groups",
        "index",
        "num_parts",
        "over",
        "required",
        "state",
        "unclean",
        "why",
    )

    def __init__(
        self,
        index: int,
        groups: tuple[GroupSpans, ...],
        *,
        required: bool = True,
        num_parts: int = 1,
        state: ChunkState = ChunkState.OFFERED,
    ) -> None:
        self.index = index
        self.groups = groups
        self.required = required
        self.num_parts = num_parts
        self.state = state
        self.done: set[int] = set()
        self.over: set[int] = set()
        self.unclean: set[int] = set()
        self.why = ""

    def handle(self, event: ChunkEvent) -> None:
        """Move along TRANSITIONS; an illegal event raises InvariantError and changes nothing."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise InvariantError(f"chunk {self.index}: {event} is illegal when {self.state}")
        self.state = after

    def doubt(self, why: str) -> None:
        """Bad news of a write in flight; what is in doubt already stays so."""
        self.why = self.why or why
        if self.state is ChunkState.POSTED:
            self.handle(ChunkEvent.DOUBT)

    def part_done(self, part: int) -> None:
        """All bytes of one part are there."""
        self._expect(part)
        self.done.add(part)
        self._settle()

    def part_over(self, part: int, *, clean: bool) -> None:
        """A part has ended without being done. clean: nothing of it will land any more."""
        self._expect(part)
        self.doubt("a write ended early")
        self.over.add(part)
        if not clean:
            self.unclean.add(part)
        self._settle()

    def part_failed(self, part: int, why: str) -> None:
        """An error was reported for a part; it is not over by that."""
        self._expect(part)
        self.doubt(why)

    def expects(self, part: int) -> bool:
        """Whether news of this part can still come."""
        known = 0 <= part < self.num_parts and part not in self.done and part not in self.over
        return known and self.state in IN_FLIGHT

    def _expect(self, part: int) -> None:
        if not self.expects(part):
            raise InvariantError(f"news of part {part} of {self}")

    @property
    def missing(self) -> list[int]:
        """Parts that there is no end of yet."""
        return [p for p in range(self.num_parts) if p not in self.done and p not in self.over]

    def _settle(self) -> None:
        if len(self.done) == self.num_parts:
            self.handle(ChunkEvent.DELIVER)
        elif len(self.done) + len(self.over) == self.num_parts:
            self.handle(ChunkEvent.DRAIN)

    @property
    def note(self) -> ChunkNote:
        return ChunkNote(self.index, self.groups)

    def check(self) -> None:
        """Raise InvariantError unless state and parts tell the same story."""
        all_done = len(self.done) == self.num_parts
        ended = len(self.done) + len(self.over) == self.num_parts
        good = {
            ChunkState.DELIVERED: all_done,
            ChunkState.DRAINED: ended and not all_done,
            ChunkState.POSTED: not ended and not self.over,
            ChunkState.IN_DOUBT: not ended,
        }.get(self.state, not self.done and not self.over)
        if not good or self.done & self.over or not self.unclean <= self.over:
            raise InvariantError(str(self))

    def __repr__(self) -> str:
        parts = f"parts {sorted(self.done)} done and {sorted(self.over)} over"
        return f"chunk {self.index}, {self.state}, {parts} of {self.num_parts}"
