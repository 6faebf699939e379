"""Slots of several layer groups at once, as messages name them and as machines keep them.

Law: pure interval arithmetic; a group that is not named has no slots. This module does not know
what the slots are wanted for: that is plan.py's.
"""

from __future__ import annotations

from tandemkv.base.spans import SpanSet
from tandemkv.transfer.wire import GroupSpans

Slots = dict[int, SpanSet]
"""Slots of several groups, by the index of the group."""


def slots_of(groups: tuple[GroupSpans, ...]) -> Slots:
    """Union of all named slots, by group."""
    out: Slots = {}
    for part in groups:
        held = out.setdefault(part.group, SpanSet())
        for start, stop in part.spans:
            held.add(start, stop)
    return out


def groups_of(slots: Slots) -> tuple[GroupSpans, ...]:
    """The non-empty ones, in order of group."""
    return tuple(GroupSpans(g, tuple(slots[g])) for g in sorted(slots) if slots[g])


def add(slots: Slots, groups: tuple[GroupSpans, ...]) -> None:
    """Put the named slots in."""
    for part in groups:
        held = slots.setdefault(part.group, SpanSet())
        for start, stop in part.spans:
            held.add(start, stop)


def within(groups: tuple[GroupSpans, ...], slots: Slots) -> tuple[GroupSpans, ...]:
    """What of `groups` is in `slots`."""
    out: Slots = {}
    for part in groups:
        known = slots.get(part.group)
        spans = [s for a, b in part.spans for s in known.within(a, b)] if known else []
        out[part.group] = SpanSet([*out.get(part.group, ()), *spans])
    return groups_of(out)


def lacking(wanted: Slots, have: Slots) -> Slots:
    """What is wanted and not had."""
    return {
        g: SpanSet(s for a, b in spans for s in have.get(g, SpanSet()).missing(a, b))
        for g, spans in wanted.items()
    }


def meets(groups: tuple[GroupSpans, ...], slots: Slots) -> bool:
    """Whether any of `groups` is in `slots` already."""
    return bool(within(groups, slots))


def covered_by(groups: tuple[GroupSpans, ...], slots: Slots) -> bool:
    """Whether all of `groups` is in `slots`, and there is something at all."""
    return bool(groups) and all(
        part.spans
        and part.group in slots
        and all(slots[part.group].covers(a, b) for a, b in part.spans)
        for part in groups
    )
