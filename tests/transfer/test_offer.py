"""Who fits whom: pairs, refusals that name both values, and drafters left out with a reason."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from byte_pools import Transfer, group, table
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tandemkv.base.errors import ConfigError
from tandemkv.kv.layout import Domain, Layout, Role
from tandemkv.transfer.offer import (
    MALFORMED,
    NO_COUNTERPART,
    NO_DRAFTER,
    OTHER_DRAFTER,
    SWITCHED_OFF,
    GroupOffer,
    Offer,
    PeerPlan,
    Refusal,
    Shard,
    WorkerRole,
    group_offer,
    group_offers,
    match,
    shards_of,
)

TARGET = group(2, 16, name="target")
WINDOWED = group(2, 16, name="sliding", window=8, layers=(2, 3))
DRAFT = group(1, 4, name="draft", domain=Domain.DRAFT, layers=(0,), lookahead=1, pointwise=True)


def offer(*groups: Any, **changes: Any) -> Offer:
    layout = Layout(block_size=16, groups=groups or (TARGET, WINDOWED, DRAFT))
    known = {
        "engine_id": "e",
        "role": WorkerRole.PREFILL,
        "model_fingerprint": "model",
        "drafter_fingerprint": "drafter",
        "num_draft_tokens": 4,
        "block_size": 16,
        "groups": group_offers(layout, [8] * len(layout.groups)),
    }
    return Offer(**{**known, **changes})


def fitting(mine: Offer, theirs: Offer) -> PeerPlan:
    """Their plan, which is the same from both sides."""
    found, back = match(mine, theirs), match(theirs, mine)
    assert isinstance(found, PeerPlan), found
    assert isinstance(back, PeerPlan), back
    there = {(p.peer_index, p.index, p.theirs, p.mine, p.ahead) for p in back.pairs}
    assert {(p.index, p.peer_index, p.mine, p.theirs, p.ahead) for p in found.pairs} == there
    return found


def refused(mine: Offer, theirs: Offer) -> Refusal:
    found, back = match(mine, theirs), match(theirs, mine)
    assert isinstance(found, Refusal), found
    assert back == Refusal(found.field, found.theirs, found.mine)
    return found


def changed(base: Offer, index: int, **changes: Any) -> Offer:
    groups = list(base.groups)
    groups[index] = replace(groups[index], **changes)
    return replace(base, groups=tuple(groups))


# -- who fits ------------------------------------------------------------------------------------


def test_equal_workers_ship_all_their_groups():
    found = fitting(offer(), offer())
    assert [(p.index, p.peer_index, p.group.name) for p in found.pairs] == [
        (0, 0, "target"),
        (1, 1, "sliding"),
        (2, 2, "draft"),
    ]
    assert not found.left_out
    assert [pair.ahead for pair in found.pairs] == [1, 1, 1]
    assert found.pair(found.pairs[1].index) is found.pairs[1]


def test_page_sizes_order_names_k_and_ranks_may_differ():
    theirs = offer(
        replace(DRAFT, name="other", page_size=16),
        replace(WINDOWED, page_size=2),
        replace(TARGET, page_size=8),
        num_draft_tokens=7,
        engine_id="f",
        role=WorkerRole.DECODE,
    )
    theirs = changed(theirs, 2, shards=shards_of(TARGET, 2))
    found = fitting(offer(), theirs)
    assert [(p.index, p.peer_index) for p in found.pairs] == [(0, 2), (1, 1), (2, 0)]


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (48, 16), (128, 16)])
def test_blocks_may_differ_if_one_divides_the_other(sizes):
    fitting(offer(block_size=sizes[0]), offer(block_size=sizes[1]))


@pytest.mark.parametrize(("mine", "theirs"), [(16, 16), (8, None), (None, 12)])
def test_the_narrower_window_of_a_draft_group_is_shipped(mine, theirs):
    found = fitting(
        offer(TARGET, replace(DRAFT, window=mine)), offer(TARGET, replace(DRAFT, window=theirs))
    )
    assert found.pairs[1].group.window == min(w for w in (mine, theirs) if w)


def test_an_offer_survives_the_wire():
    sent = changed(offer(transport_blob=b"\x00\xff"), 0, shards=shards_of(TARGET, 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Offer) == sent


# -- who does not --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "theirs"),
    [
        ({"model_fingerprint": "another"}, "another"),
        ({"version": 9}, "9"),
        ({"transport": "nixl"}, "nixl"),
        ({"block_size": 24}, "24"),
    ],
)
def test_workers_that_differ_are_refused_by_field_and_both_values(changes, theirs):
    found = refused(offer(), offer(**changes))
    (field,) = changes
    assert (found.field, found.mine, found.theirs) == (field, str(getattr(offer(), field)), theirs)
    assert str(found) == f"{field}: {found.mine} here, {theirs} there"


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("head_dim", 0, 2),
        ("dtype", 0, "bfloat16"),
        ("num_kv_heads", 0, 4),
        ("window", 1, 16),
        ("window", 1, None),
    ],
)
def test_target_groups_that_differ_are_refused_by_field_and_both_values(field, index, value):
    chosen = [TARGET, WINDOWED, DRAFT]
    known = getattr(chosen[index], field)
    chosen[index] = replace(chosen[index], **{field: value})
    found = refused(offer(), offer(*chosen))
    assert found == Refusal(f"{chosen[index].name}.{field}", str(known), str(value))


def test_a_target_group_without_a_counterpart_is_refused():
    here = "layers 0-1 as key, value; layers 2-3 as key, value"
    found = refused(offer(), offer(TARGET, DRAFT))
    assert found == Refusal("target groups", here, "layers 0-1 as key, value")
    found = refused(offer(), offer(replace(TARGET, roles=(Role.LATENT,)), WINDOWED, DRAFT))
    assert found == Refusal("target groups", here, here.replace("key, value", "latent", 1))


def test_workers_that_do_not_know_their_model_are_refused():
    assert match(offer(model_fingerprint=""), offer(model_fingerprint="")) == Refusal(
        "model_fingerprint", "unknown", "unknown"
    )


def test_a_worker_without_a_target_group_is_refused():
    drafts_only = offer(groups=offer().groups[2:])
    assert refused(drafts_only, drafts_only).field == "groups"
    assert refused(offer(), drafts_only).field == "target groups"


# -- drafters that are left out ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "reason", "values"),
    [
        (offer(TARGET, WINDOWED, drafter_fingerprint=""), NO_DRAFTER, ("drafter", "none")),
        (offer(drafter_fingerprint="x"), OTHER_DRAFTER, ("drafter", "x")),
        (offer(draft_transfer=False), SWITCHED_OFF, ("on", "off")),
        (offer(TARGET, WINDOWED), NO_COUNTERPART, ("0", "none")),
        (offer(TARGET, WINDOWED, replace(DRAFT, head_dim=2)), "head_dim", ("1", "2")),
        (offer(TARGET, WINDOWED, replace(DRAFT, dtype="bfloat16")), "dtype", None),
        (offer(TARGET, WINDOWED, replace(DRAFT, num_kv_heads=2)), "num_kv_heads", ("1", "2")),
        (offer(TARGET, WINDOWED, replace(DRAFT, lookahead=2)), "lookahead", ("1", "2")),
        (offer(TARGET, WINDOWED, replace(DRAFT, layers=(0, 1))), NO_COUNTERPART, None),
        (changed(offer(), 2, page_size=3), MALFORMED, None),
    ],
)
def test_a_drafter_that_does_not_fit_is_left_out_and_never_refuses_a_peer(theirs, reason, values):
    found = fitting(offer(), theirs)
    assert [pair.group.name for pair in found.pairs] == ["target", "sliding"]
    (left,) = found.left_out
    assert (left.index, left.name, left.reason) == (2, "draft", reason)
    assert values is None or (left.mine, left.theirs) == values


def test_another_window_makes_other_rows_where_a_row_sees_others():
    models = [
        offer(TARGET, replace(DRAFT, pointwise=False, lookahead=0, window=w)) for w in (8, 16)
    ]
    (left,) = fitting(*models).left_out
    assert (left.reason, left.mine, left.theirs) == ("window", "8", "16")
    assert not fitting(models[0], models[0]).left_out


def test_a_pair_without_drafters_misses_nothing():
    found = fitting(offer(TARGET, drafter_fingerprint=""), offer(TARGET, drafter_fingerprint=""))
    assert not found.left_out


@pytest.mark.parametrize("drafters", list(itertools.product(["", "a", "b"], repeat=2)))
@pytest.mark.parametrize("switches", list(itertools.product([True, False], repeat=2)))
def test_every_configuration_is_decided_before_memory_is_touched(drafters, switches):
    mine, theirs = (
        offer(
            *((TARGET, DRAFT) if drafter else (TARGET,)),
            drafter_fingerprint=drafter,
            draft_transfer=on,
        )
        for drafter, on in zip(drafters, switches, strict=True)
    )
    found = fitting(mine, theirs)
    ships = drafters[0] == drafters[1] != "" and all(switches)
    assert len(found.pairs) == 1 + ships
    assert len(found.left_out) == (0 if ships else bool(drafters[0]))


# -- offers that make no sense -------------------------------------------------------------------


def rectangle(rank: int, heads: tuple[int, int], layers: tuple[int, int] = (0, 2)) -> Shard:
    return Shard(
        rank=rank,
        first_head=heads[0],
        num_heads=heads[1] - heads[0],
        first_layer=layers[0],
        num_layers=layers[1] - layers[0],
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 3}, "power of two"),
        ({"page_size": 32}, "does not divide block_size 16"),
        ({"num_pages": 0}, "num_pages"),
        ({"roles": ()}, "roles"),
        ({"layers": (0, 0)}, "twice"),
        ({"dtype": "int3"}, "int3"),
        ({"shards": ()}, "0 shards"),
        ({"shards": (rectangle(0, (0, 1)), rectangle(0, (1, 2)))}, "two shards"),
        ({"shards": (rectangle(0, (0, 1)),)}, "2 of 4 heads x layers"),
        ({"shards": (rectangle(0, (0, 2)), rectangle(1, (1, 2)))}, "share some rows"),
        ({"shards": (rectangle(0, (0, 3)),)}, "heads [0, 3) of 2"),
        ({"shards": (rectangle(0, (0, 2), (1, 3)),)}, "layers [1, 3) of 2"),
        ({"shards": (replace(rectangle(0, (0, 2)), address=-8),)}, "negative"),
        ({"shards": (replace(rectangle(0, (0, 2)), strides=(8,)),)}, "1 strides"),
        ({"shards": (replace(rectangle(0, (0, 2)), strides=(256, 128, 64, 2, 2)),)}, "overlap"),
        ({"shards": (replace(rectangle(0, (0, 2)), strides=(0, 0, 0, 0, 0)),)}, "overlap"),
        ({"shards": tuple(rectangle(r, (0, 2)) for r in range(257))}, "257 shards"),
    ],
)
def test_a_malformed_target_group_is_refused_by_what_is_wrong(changes, says):
    theirs = changed(offer(TARGET), 0, **changes)
    found = match(offer(TARGET), theirs)
    if "roles" in changes or "layers" in changes:  # their keys are other keys
        assert isinstance(found, Refusal)
        found = match(theirs, theirs)
        assert isinstance(found, Refusal)
        assert says in found.theirs
        return
    assert isinstance(found, Refusal)
    assert says in found.theirs
    assert (found.field, found.mine) == ("target", "well-formed")


def test_two_groups_of_the_same_layers_are_refused():
    twice = offer(TARGET, replace(TARGET, name="again"))
    assert refused(offer(TARGET), twice).theirs == "two groups of the same layers"


@pytest.mark.parametrize(("heads", "ranks"), [(3, 2), (2, 3), (4, 6), (2, 0)])
def test_heads_that_cannot_be_shared_out_are_refused_by_both_numbers(heads, ranks):
    with pytest.raises(ConfigError, match=f"{heads} KV heads.* {ranks} ranks"):
        shards_of(group(heads), ranks)


@pytest.mark.parametrize(("heads", "ranks"), [(1, 1), (3, 3), (8, 2), (1, 4), (2, 8)])
def test_ranks_share_out_the_heads_or_hold_replicas(heads, ranks):
    held = [list(range(*shard.heads)) for shard in shards_of(group(heads), ranks)]
    copies = max(1, ranks // heads)
    assert sorted(itertools.chain(*held)) == sorted(list(range(heads)) * copies)
    assert len({len(h) for h in held}) == 1


numbers = st.one_of(st.integers(-2, 9), st.sampled_from([16, 2**40, -(2**40)]))
odd_shards = st.builds(
    Shard,
    rank=numbers,
    first_head=numbers,
    num_heads=numbers,
    first_layer=numbers,
    num_layers=numbers,
    address=numbers,
    strides=st.one_of(st.just(()), st.lists(numbers, max_size=6).map(tuple)),
)
odd_fields = {
    "layers": st.sampled_from([(2, 3), (0,), (1, 1), ()]),
    "num_kv_heads": numbers,
    "head_dim": numbers,
    "dtype": st.sampled_from(["float32", "int3"]),
    "roles": st.sampled_from([(), (Role.LATENT,)]),
    "page_size": st.sampled_from([1, 2, 8]) | numbers,
    "window": st.none() | numbers,
    "lookahead": numbers,
    "num_pages": numbers,
    "shards": st.lists(odd_shards, max_size=3).map(tuple)
    | st.sampled_from([shards_of(group(heads), ranks) for heads in (1, 2) for ranks in (1, 2)]),
}


def perhaps_odd(chosen: Any) -> st.SearchStrategy[GroupOffer]:
    odd = st.sampled_from(list(odd_fields)).flatmap(
        lambda field: st.fixed_dictionaries({field: odd_fields[field]})
    )
    changes = st.one_of(
        st.just({}), st.just({}), odd, st.fixed_dictionaries({}, optional=odd_fields)
    )
    return changes.map(lambda change: replace(group_offer(chosen, 8), **change))


offers = st.tuples(*(perhaps_odd(g) for g in (TARGET, WINDOWED, DRAFT))).map(
    lambda groups: offer(groups=groups)
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(offers, offers)
def test_whatever_a_peer_offers_is_answered_and_what_is_accepted_ships_right(mine, theirs):
    found, back = match(mine, theirs), match(theirs, mine)
    assert type(found) is type(back)
    if isinstance(found, Refusal):
        assert found.mine
        assert found.theirs
        return
    for pair in found.pairs:
        sides = pair.mine, pair.theirs
        room = min(side.num_pages * side.page_size for side in sides)
        if max(side.num_pages * side.page_size * side.row_bytes for side in sides) < 2**10:
            tables = [table(side.num_pages, spare=0) for side in sides]
            Transfer(pair.mine, pair.theirs, [(room // 3, room)], *tables).check()


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ([rectangle(0, (0, 2))], [rectangle(5, (0, 1)), rectangle(6, (1, 2))]),
        (
            [rectangle(0, (0, 2), (0, 1)), rectangle(1, (0, 2), (1, 2))],
            [rectangle(0, (0, 1)), rectangle(1, (1, 2))],
        ),
        ([rectangle(r, (0, 2)) for r in range(3)], [rectangle(r, (0, 2)) for r in range(2)]),
    ],
)
def test_any_two_well_formed_shardings_carry_every_byte(here, there):
    mine = changed(offer(TARGET), 0, shards=tuple(here))
    theirs = changed(offer(TARGET), 0, shards=tuple(there))
    (pair,) = fitting(mine, theirs).pairs
    for src, dst in ((pair.mine, pair.theirs), (pair.theirs, pair.mine)):
        Transfer(src, dst, [(3, 50)], table(4), table(4, seed=1)).check()
