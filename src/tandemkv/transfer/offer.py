"""What a worker says it has, and who fits whom: negotiated once per peer, before memory is touched.

Law: `match` is pure and never raises, whatever a peer's offer holds. What the target needs must
agree, or the refusal names the field and both values; what only the drafter needs never refuses a
peer: its group is left out, with a reason. Swapping the sides swaps the answer. This module moves
no bytes and opens no connection; which bytes go where is plan.py's.

    offer   worker: fingerprints, block size, transport
            groups: geometry as in kv/layout.py, and on which rank which heads and layers live
            shard:  a rank's rectangle of heads x layers, the same for every page, with its strides
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from tandemkv.base.ids import GroupId
from tandemkv.kv.layout import Domain, LayerGroup, Role
from tandemkv.transfer.shards import GroupOffer, Shard, fault, group_offer, group_offers, shards_of

__all__ = [
    "GroupOffer",
    "GroupPair",
    "LeftOut",
    "Offer",
    "PeerPlan",
    "Refusal",
    "Shard",
    "WorkerRole",
    "group_offer",
    "group_offers",
    "match",
    "shards_of",
]

VERSION = 1

NO_DRAFTER = "no_drafter"
OTHER_DRAFTER = "other_drafter"
SWITCHED_OFF = "switched_off"
NO_COUNTERPART = "no_counterpart"
MALFORMED = "malformed"
"""Why a draft group is left out. A field's name is a reason too: its values differ."""


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has and how to reach its memory. Each attention-data-parallel rank, which has
    pools and requests of its own, makes an offer of its own.

    drafter_fingerprint: "" without a drafter. draft_transfer: False is the kill switch.
    transport_blob: what the data plane of that name needs to connect.
    """

    engine_id: str
    role: WorkerRole
    model_fingerprint: str
    drafter_fingerprint: str
    num_draft_tokens: int
    block_size: int
    groups: tuple[GroupOffer, ...]
    draft_transfer: bool = True
    transport: str = "loopback"
    transport_blob: bytes = b""
    version: int = VERSION


class Refusal(msgspec.Struct, frozen=True):
    """Two workers do not fit: the field, its value here and its value there."""

    field: str
    mine: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field}: {self.mine} here, {self.theirs} there"


class LeftOut(msgspec.Struct, frozen=True):
    """A draft group of mine that will not be shipped between these two, and why."""

    index: GroupId
    name: str
    reason: str
    mine: str
    theirs: str


class GroupPair(msgspec.Struct, frozen=True):
    """A group of mine and its counterpart: `index` in my layout, `peer_index` in theirs.

    group: the geometry both agree on, with the narrower of the two windows (its page_size is mine
    and concerns no one else). ahead: how many positions early a resumed pass may start on either
    side, so a windowed target group is read that much further back.
    """

    index: GroupId
    peer_index: GroupId
    mine: GroupOffer
    theirs: GroupOffer
    group: LayerGroup
    ahead: int


class PeerPlan(msgspec.Struct, frozen=True):
    """What two workers ship each other: all target groups, and the draft groups that fit."""

    pairs: tuple[GroupPair, ...]
    left_out: tuple[LeftOut, ...]

    def pair(self, index: GroupId) -> GroupPair | None:
        """The pair of my group `index`, None if it is left out."""
        return next((pair for pair in self.pairs if pair.index == index), None)


# -- who fits whom -------------------------------------------------------------------------------

_WORKER_FIELDS = ("version", "transport", "model_fingerprint")
_ROW_FIELDS = ("num_kv_heads", "head_dim", "dtype")
"""Without these in common, a row of one side is not a row of the other."""


def match(mine: Offer, theirs: Offer) -> PeerPlan | Refusal:
    """Who fits whom. Groups match by (domain, layers, roles); target groups must all match.

    Page sizes, shards, K and names may differ. Block sizes may differ if one divides the other:
    rows travel in slots, each side publishes blocks of its own, and the larger block is then a
    multiple of every page size on either side. Where windows of a draft group differ the narrower
    one is shipped, if its rows depend on their own position alone; else they are other rows.
    """
    for field in _WORKER_FIELDS:
        if getattr(mine, field) != getattr(theirs, field):
            return _differ(field, mine, theirs)
    if not mine.model_fingerprint:
        return Refusal("model_fingerprint", "unknown", "unknown")
    blocks = sorted((mine.block_size, theirs.block_size))
    if blocks[0] < 1 or blocks[1] % blocks[0]:
        return _differ("block_size", mine, theirs)
    return _match_groups(mine, theirs)


def _match_groups(mine: Offer, theirs: Offer) -> PeerPlan | Refusal:
    here, there = _by_key(mine), _by_key(theirs)
    if len(here) < len(mine.groups) or len(there) < len(theirs.groups):
        return Refusal("groups", _layers_twice(mine), _layers_twice(theirs))
    ahead = max((g.lookahead for offer in (mine, theirs) for g in offer.groups), default=0)
    pairs: list[GroupPair] = []
    left_out: list[LeftOut] = []
    for key in sorted({key for key in (*here, *there) if key[0] is Domain.TARGET}):
        refusal = _refuse_target(mine, theirs, here.get(key), there.get(key))
        if refusal is not None:
            return refusal
    for key, index in here.items():
        peer_index = there.get(key)
        if key[0] is Domain.DRAFT:
            why = _leave_out(mine, theirs, index, peer_index)
            if why is not None:
                left_out.append(why)
                continue
        if peer_index is not None:
            pairs.append(_pair(mine, theirs, index, peer_index, ahead))
    if not any(pair.group.required for pair in pairs):
        return Refusal("groups", "no target group", "no target group")
    return PeerPlan(tuple(pairs), tuple(left_out))


def _pair(mine: Offer, theirs: Offer, index: GroupId, peer: GroupId, ahead: int) -> GroupPair:
    a, b = mine.groups[index], theirs.groups[peer]
    windows = [w for w in (a.window, b.window) if w is not None]
    group = msgspec.structs.replace(a.layer_group(), window=min(windows, default=None))
    return GroupPair(index, peer, a, b, group, ahead)


def _refuse_target(
    mine: Offer, theirs: Offer, index: GroupId | None, peer: GroupId | None
) -> Refusal | None:
    if index is None or peer is None:
        return Refusal("target groups", _target_layers(mine), _target_layers(theirs))
    a, b = mine.groups[index], theirs.groups[peer]
    faults = fault(a, mine.block_size), fault(b, theirs.block_size)
    if any(faults):
        return Refusal(a.name, faults[0] or "well-formed", faults[1] or "well-formed")
    return next((_differ(f, a, b, a.name) for f in _unlike(a, b, "window")), None)


def _leave_out(
    mine: Offer, theirs: Offer, index: GroupId, peer_index: GroupId | None
) -> LeftOut | None:
    """Why a draft group is not shipped; None if it is."""
    a = mine.groups[index]
    b = None if peer_index is None else theirs.groups[peer_index]
    drafters = mine.drafter_fingerprint or "none", theirs.drafter_fingerprint or "none"
    faults = fault(a, mine.block_size), b and fault(b, theirs.block_size)
    if "none" in drafters:
        reason, values = NO_DRAFTER, drafters
    elif drafters[0] != drafters[1]:
        reason, values = OTHER_DRAFTER, drafters
    elif not (mine.draft_transfer and theirs.draft_transfer):
        reason = SWITCHED_OFF
        values = tuple("on" if o.draft_transfer else "off" for o in (mine, theirs))
    elif b is None:
        reason, values = NO_COUNTERPART, (_short(a.layers), "none")
    elif any(faults):
        reason, values = MALFORMED, (faults[0] or "well-formed", faults[1] or "well-formed")
    else:
        # rows that see others through a window are other rows when the window is another one
        more = () if a.pointwise else ("window",)
        reason = next(_unlike(a, b, "lookahead", "pointwise", *more), "")
        values = str(getattr(a, reason, "")), str(getattr(b, reason, ""))
    return LeftOut(index, a.name, reason, values[0], values[1]) if reason else None


_Key = tuple[Domain, tuple[int, ...], tuple[Role, ...]]


def _by_key(offer: Offer) -> dict[_Key, GroupId]:
    return {(g.domain, g.layers, g.roles): GroupId(i) for i, g in enumerate(offer.groups)}


def _target_layers(offer: Offer) -> str:
    groups = sorted((g.layers, g.roles) for g in offer.groups if g.domain is Domain.TARGET)
    return "; ".join(f"layers {_short(g)} as {', '.join(r)}" for g, r in groups) or "none"


def _layers_twice(offer: Offer) -> str:
    found = len(_by_key(offer)) < len(offer.groups)
    return "two groups of the same layers" if found else "well-formed"


def _unlike(a: GroupOffer, b: GroupOffer, *more: str) -> Iterator[str]:
    """The fields that must agree and do not."""
    return (field for field in (*_ROW_FIELDS, *more) if getattr(a, field) != getattr(b, field))


def _differ(field: str, mine: Any, theirs: Any, owner: str = "") -> Refusal:
    name = f"{owner}.{field}" if owner else field
    return Refusal(name, str(getattr(mine, field)), str(getattr(theirs, field)))


def _short(layers: Sequence[int]) -> str:
    """'0-29' for a run, else the indices, cut when there are many."""
    if len(layers) > 1 and list(layers) == list(range(layers[0], layers[0] + len(layers))):
        return f"{layers[0]}-{layers[-1]}"
    shown = ",".join(str(i) for i in layers[:8])
    return shown if len(layers) <= 8 else f"{shown},... ({len(layers)})"
