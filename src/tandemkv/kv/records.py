"""What the KV manager hands out: a match, a claim, its counters. And the names of its faults.

Law: records carry values; none of them acts. A counter only grows.
"""

from __future__ import annotations

import msgspec

from tandemkv.base.spans import Span
from tandemkv.kv.coverage import ClaimPlan
from tandemkv.kv.intent import PageCopy
from tandemkv.kv.sequence import Sequence

WITHHOLD_DRAFT_ROWS = "withhold_draft_rows"
FAULTS = frozenset({WITHHOLD_DRAFT_ROWS})
"""Faults that can be injected by name, to show that a check is able to fail."""

NOT_WRITTEN = "not_written"
"""Reason of a gap that a claim planned to fill and no pass did (the context pass was off)."""


class Match(msgspec.Struct, frozen=True):
    """What the tree holds of a prompt. end: tokens matched; coverage: per group, its slots."""

    num_tokens: int
    end: int
    coverage: tuple[tuple[Span, ...], ...]
    tier: str = "device"


class Claim(msgspec.Struct):
    """A new sequence, what it must compute, and the pages to copy before its first pass."""

    seq: Sequence
    plan: ClaimPlan
    copies: tuple[PageCopy, ...]


class DraftUse(msgspec.Struct):
    """What one request's claims found, missed and recomputed for its drafter, in tokens.

    hits: draft rows taken from the tree. gaps: draft slots masked, by reason. recomputed:
    positions that the target ran for the drafter alone, by reason (see ClaimPlan.recomputed).
    """

    hits: int = 0
    gaps: dict[str, int] = {}
    recomputed: dict[str, int] = {}

    def add(self, other: DraftUse) -> None:
        """Add another request's counters to these."""
        self.hits += other.hits
        for mine, theirs in ((self.gaps, other.gaps), (self.recomputed, other.recomputed)):
            for why, count in theirs.items():
                tally(mine, why, count)


class Stats(msgspec.Struct):
    """Counters since the start; dictionaries are keyed by group name or by reason.

    draft_recomputed_tokens: draft rows filled again. target_recomputed_tokens: positions that the
    target ran for the drafter alone, by reason.
    """

    claims: int = 0
    resumptions: int = 0
    suspensions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hit_tokens: int = 0
    draft_hit_tokens: dict[str, int] = {}
    draft_gap_tokens: dict[str, int] = {}
    draft_recomputed_tokens: int = 0
    target_recomputed_tokens: dict[str, int] = {}
    evicted_pages: dict[str, int] = {}
    copied_pages: int = 0
    published_blocks: int = 0


def tally(counters: dict[str, int], name: str, amount: int) -> None:
    """Add to a named counter; a counter appears with its first unit."""
    if amount:
        counters[name] = counters.get(name, 0) + amount
