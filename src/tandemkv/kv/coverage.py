"""The claim rule: what a claim computes so that no layer group lacks a row it will read.

This is the one home of "what happens to the drafter's KV on a prefix hit?". Law: after the plan's
passes every target group holds all that later passes read, and every draft group holds
[first_needed(n), n) except for the slots the plan names as masked, each with its reason. No slot
that was found is written again. Pure interval arithmetic; no page, no tree, no tokens.

    slots    0 ........ a=====b ........ m-D .. m ........ n        n rows wanted, m of them found
    hole         [a-D, b-D) is run for hidden states: fills draft slots [a, b)
    tail                              [m-D, ............. n)        starts D early, writes from m
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandemkv.base.errors import RequestError
from tandemkv.base.ids import GroupId
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.layout import LayerGroup, Layout, RebuildFrom

POLICIES = ("exact", "fast", "auto")
GONE_WINDOW = "target_window"
GONE_CONTEXT = "draft_context"
BY_POLICY = "policy"

LOOKAHEAD = "lookahead"
"""Why the target recomputes: the last D positions of every hit."""
HOLES = "holes"
"""Why the target recomputes: draft rows that are gone, at a branch point for instance."""


class Masked(msgspec.Struct, frozen=True):
    """Draft slots [start, stop) that stay a gap, and why."""

    group: GroupId
    start: int
    stop: int
    reason: str


class ClaimPlan(msgspec.Struct, frozen=True):
    """What a claim takes and what it computes.

    end: m, the rows found (cached_tokens). compute: positions over which the target's pass runs,
    holes first, tail last. draft_compute: per group, positions over which a drafter that rebuilds
    from tokens runs alone. reused: per group, slots taken from the tree. filled: draft slots of
    holes that will be recomputed. masked: draft slots that stay a gap.
    """

    end: int
    compute: tuple[Span, ...]
    draft_compute: tuple[tuple[Span, ...], ...]
    reused: tuple[tuple[Span, ...], ...]
    filled: int
    masked: tuple[Masked, ...]
    tail: Span = (0, 0)

    @property
    def holes(self) -> tuple[Span, ...]:
        """The spans of `compute` that only fill holes."""
        return self.compute[:-1] if self.compute and self.compute[-1] == self.tail else self.compute

    @property
    def recomputed(self) -> dict[str, int]:
        """Positions below `end` that the target's pass runs for the drafter alone, and why."""
        ahead = self.end - self.tail[0] if self.tail[0] < self.tail[1] else 0
        return {LOOKAHEAD: ahead, HOLES: sum(stop - start for start, stop in self.holes)}


LOSS_WITH_LOOKAHEAD = 0.25
LOSS_WITHOUT_LOOKAHEAD = 0.55


class GroupCost(msgspec.Struct, frozen=True):
    """What a gap costs a drafter. acceptance_length: AL with a full context; loss: share of AL
    that is lost with none of it."""

    acceptance_length: float = 3.0
    loss: float = LOSS_WITH_LOOKAHEAD


class ClaimCost(msgspec.Struct, frozen=True):
    """The model behind `auto`, in units of one decode step.

    groups: measured numbers, by the name of the layer group. Without them a drafter that looks
    ahead is taken to lose 0.25 of its AL with its context (0.05 to 0.25 is reported for EAGLE-3:
    it still sees the target's newest state), one that does not 0.55 (above 0.5 is reported for
    block drafters: the context is all they see of the target). position_cost: one position of a
    prefill pass relative to a decode step.
    """

    groups: dict[str, GroupCost] = {}
    position_cost: float = 1 / 256

    def of(self, group: LayerGroup) -> GroupCost:
        """What is measured of the group, or the default for its kind."""
        loss = LOSS_WITH_LOOKAHEAD if group.lookahead else LOSS_WITHOUT_LOOKAHEAD
        return self.groups.get(group.name) or GroupCost(loss=loss)

    def pays(self, group: LayerGroup, needed: int, missing: int, span: int, tokens: int) -> bool:
        """Whether running `span` positions costs less than drafting with the gap.

        needed, missing: slots the group reads and those of them it lacks. tokens: expected output.
        A windowed group feels a gap for at most W tokens.
        """
        if not missing or not needed:
            return False
        if group.window is not None:
            tokens = min(tokens, group.window)
        gap = self.of(group)
        al = gap.acceptance_length
        al_gap = max(1.0, al * (1.0 - gap.loss * missing / needed))
        return tokens / al_gap - tokens / al > span * self.position_cost


def read_from(group: LayerGroup, position: int) -> int:
    """First target slot that a pass starting at `position` reads in `group`."""
    return 0 if group.window is None else max(0, position - group.window + 1)


def match_end(layout: Layout, found: Sequence[SpanSet], limit: int) -> int:
    """m: the largest position <= limit at which every target group holds what a pass that starts
    at m - D reads."""
    end, settled = limit, False
    while not settled:
        settled = True
        for g in layout.target_groups:
            low = read_from(layout.groups[g], max(0, end - layout.lookahead))
            missing = found[g].missing(low, end)
            if missing:
                end, settled = missing[0][0], False
    return end


def plan_claim(
    layout: Layout,
    found: Sequence[SpanSet],
    num_rows: int,
    *,
    matched: int | None = None,
    resume: bool = False,
    policy: str = "exact",
    expected_tokens: int = 0,
    cost: ClaimCost | None = None,
    withheld: str | None = None,
) -> ClaimPlan:
    """Plan a claim of num_rows rows when `found` (per group, in slots) is in the tree.

    matched: tokens found in the tree, where the match ends at the latest (default: no limit).
    resume: the token at num_rows is known, so all rows may be found and no logits are wanted.
    withheld: reason for which draft holes are neither filled nor weighed (fault injection).
    """
    if policy not in POLICIES:
        raise RequestError(
            f"claim_policy must be one of {', '.join(POLICIES)}, got {policy!r}",
            param="claim_policy",
        )
    limit = num_rows if resume else max(0, num_rows - 1)
    end = match_end(layout, found, limit if matched is None else min(limit, matched))
    tail = (max(0, end - layout.lookahead), num_rows)
    holes = _Holes(layout, found, num_rows, end, tail[0])
    for g in layout.draft_groups:
        reason = withheld or (BY_POLICY if policy == "fast" else None)
        price = (cost or ClaimCost()) if policy == "auto" else None
        holes.settle(g, reason, price, expected_tokens)
    compute = (*holes.spans, tail) if tail[0] < tail[1] else tuple(holes.spans)
    return ClaimPlan(
        end=end,
        compute=compute,
        draft_compute=tuple(tuple(spans) for spans in holes.draft_spans),
        reused=(),
        filled=holes.filled,
        masked=tuple(holes.masked),
        tail=tail,
    )


class _Holes:
    """Decides, group by group, which holes are filled and which are masked."""

    def __init__(
        self, layout: Layout, found: Sequence[SpanSet], num_rows: int, end: int, tail_start: int
    ) -> None:
        self.layout = layout
        self.found = found
        self.num_rows = num_rows
        self.end = end
        self.tail_start = tail_start
        self.spans = SpanSet()
        self.draft_spans: list[SpanSet] = [SpanSet() for _ in layout.groups]
        self.masked: list[Masked] = []
        self.filled = 0

    def settle(
        self, g: GroupId, reason: str | None, price: ClaimCost | None, expected: int
    ) -> None:
        group, found = self.layout.groups[g], self.found[g]
        stop = min(self.end, self.tail_start + group.lookahead)  # the tail writes from there on
        needed = group.first_needed(self.num_rows)
        lacking = found.missing(needed, stop)
        if not lacking:
            return
        holes = found.missing(group.first_needed(self.end), stop)
        if price is not None:
            size = sum(b - a for a, b in lacking)
            work = sum(b - a for a, b in holes)
            if not price.pays(group, self.num_rows - needed, size, work, expected):
                reason = BY_POLICY
        known = found if group.pointwise or reason else found.copy()
        for a, b in holes:
            why = reason or self._obstacle(g, known, a, b)
            if why:
                if b > needed:
                    self.masked.append(Masked(g, max(a, needed), b, why))
                continue
            self._fill(g, a, b)
            if not group.pointwise:
                known.add(a, b)

    def _obstacle(self, g: GroupId, known: SpanSet, a: int, b: int) -> str | None:
        """Why the hole [a, b) of group g cannot be filled with canonical rows, if it cannot."""
        group = self.layout.groups[g]
        if group.rebuild_from is RebuildFrom.HIDDEN:
            for t in self.layout.target_groups:
                low = read_from(self.layout.groups[t], a - group.lookahead)
                if not self.found[t].covers(low, b - group.lookahead):
                    return GONE_WINDOW
        if not group.pointwise and not known.covers(group.first_needed(a), a):
            return GONE_CONTEXT
        return None

    def _fill(self, g: GroupId, a: int, b: int) -> None:
        group = self.layout.groups[g]
        tokens_only = group.rebuild_from is RebuildFrom.TOKENS
        spans = self.draft_spans[g] if tokens_only else self.spans
        spans.add(a - group.lookahead, b - group.lookahead)
        self.filled += b - a
