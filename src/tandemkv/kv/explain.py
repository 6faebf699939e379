"""Where every interval of a sequence's KV came from, per layer group.

Law: the intervals of a group tile [D, committed) without overlap; each slot that cannot be read is
named as masked with its reason. The same record feeds counters, metrics and the command line.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tandemkv.base.spans import SpanSet
from tandemkv.kv.sequence import Sequence


class Provenance(StrEnum):
    COMPUTED = "computed"
    RECEIVED = "received"
    REUSED = "reused"
    COPIED = "copied"
    MASKED = "masked"


class Interval(msgspec.Struct, frozen=True):
    """Slots [start, stop) of one group, all of one origin."""

    start: int
    stop: int
    provenance: Provenance
    reason: str = ""


LEFT_WINDOW = "left the window"
NOT_NEEDED = "not needed"


def explain_sequence(seq: Sequence) -> list[list[Interval]]:
    """Per group, the intervals of slots [D, committed), in order."""
    return [_explain_group(seq, g) for g in range(len(seq.layout.groups))]


def _explain_group(seq: Sequence, g: int) -> list[Interval]:
    group = seq.layout.groups[g]
    left = SpanSet([(group.lookahead, seq.committed)])
    behind = seq.first_block[g] * seq.layout.block_size
    out: list[Interval] = []

    def put(start: int, stop: int, what: Provenance, reason: str = "") -> None:
        for a, b in left.within(start, stop):
            left.remove(a, b)
            for lo, hi, gone in ((a, min(b, behind), True), (max(a, behind), b, False)):
                if lo < hi:
                    out.append(Interval(lo, hi, what, reason or (LEFT_WINDOW if gone else "")))

    origins = (
        (seq.written[g], Provenance.COMPUTED),
        (seq.received[g], Provenance.RECEIVED),
        (seq.copied[g], Provenance.COPIED),
        (seq.taken[g], Provenance.REUSED),
    )
    for spans, what in origins:
        for a, b in spans:
            put(a, b, what)
    for a, b, reason in seq.masks[g]:
        put(a, b, Provenance.MASKED, reason)
    for a, b in list(left):
        put(a, b, Provenance.MASKED, NOT_NEEDED)
    return sorted(out, key=lambda interval: interval.start)
