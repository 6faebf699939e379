"""Drafters side by side: acceptance lengths on the cold path, compared at equal K alone.

Law: a difference is one only where its 95 % interval, over prompts enough for one, leaves 0 out;
what was drafted at different K is not compared. This module reads rows and runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec

from tandemkv.lab import measures
from tandemkv.lab.rows import Row


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """AL of the first drafter less that of the second, on the prompts of both, at one K."""

    drafters: tuple[str, str]
    num_draft_tokens: int
    prompts: int
    als: tuple[float, float]
    difference: float
    interval: tuple[float, float]

    @property
    def differs(self) -> bool:
        """Whether the interval leaves 0 out, and is worth something."""
        low, high = self.interval
        return self.enough and not low <= 0.0 <= high

    @property
    def enough(self) -> bool:
        """Whether there are prompts enough to tell."""
        return self.prompts >= measures.MIN_PROMPTS


def differences(rows: Sequence[Row]) -> list[Difference]:
    """Every two drafters that ran cold at the same K and without a fault, in the rows' order."""
    return [
        _difference(a, b)
        for a, b in combinations(_cold(rows), 2)
        if a.num_draft_tokens == b.num_draft_tokens
    ]


def unequal(rows: Sequence[Row]) -> dict[str, int]:
    """K of each drafter that ran cold, if they are not the same; else nothing."""
    found = {row.drafter: row.num_draft_tokens for row in _cold(rows)}
    return found if len(set(found.values())) > 1 else {}


def _cold(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.path == "cold" and row.fault is None]


def _difference(a: Row, b: Row) -> Difference:
    theirs = {prompt.id: prompt.tally for prompt in b.by_prompt}
    pairs = [(p.tally, theirs[p.id]) for p in a.by_prompt if p.id in theirs]
    return Difference(
        drafters=(a.drafter, b.drafter),
        num_draft_tokens=a.num_draft_tokens,
        prompts=len(pairs),
        als=(a.al, b.al),
        difference=measures.difference(pairs),
        interval=measures.difference_interval(pairs),
    )
