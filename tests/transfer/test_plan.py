"""What is shipped against brute force, and every byte of it against an oracle."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from byte_pools import DIMS, PAGE_SIZES, BytePools, any_transfer, group, strides, transfer
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.base.errors import InvariantError
from tandemkv.base.ids import NO_PAGE
from tandemkv.base.spans import SpanSet
from tandemkv.kv.layout import Domain
from tandemkv.model.attention import KVPool
from tandemkv.transfer import plan
from tandemkv.transfer.shards import Shard, group_offer

# -- which slots ---------------------------------------------------------------------------------


def members(spans) -> set[int]:
    return {slot for a, b in spans for slot in range(a, b)}


def sets(limit: int):
    return st.sets(st.integers(0, limit - 1)).map(lambda s: SpanSet((i, i + 1) for i in s))


def draft(window=None, lookahead=0, **changes):
    return group(name="d", domain=Domain.DRAFT, window=window, lookahead=lookahead, **changes)


def check_ship(n, window, ahead, is_draft, held: SpanSet, covered: SpanSet) -> None:
    """What ships, slot by slot."""
    if is_draft:
        chosen = draft(window, ahead)
        needed = {s for s in range(ahead, n) if window is None or s > n - window}
    else:  # a pass over [n - ahead, n) reads W slots back, its own included
        chosen = group(window=window)
        start = max(0, n - ahead)
        needed = {s for s in range(n) if window is None or s > start - window}
    lacked = needed - members(held)
    assert members(plan.wanted(chosen, n, held, ahead=ahead)) == lacked
    assert members(plan.ship(chosen, n, held, covered, ahead=ahead)) == lacked & members(covered)


def check_chunks(asked: SpanSet, chunks: list[SpanSet], grain: int) -> None:
    """Chunk by chunk, all that is covered is sent in the end and no slot is sent twice."""
    covered, sent = SpanSet(), SpanSet()
    for i, chunk in enumerate([*chunks, SpanSet()]):
        for a, b in chunk:
            covered.add(a, b)
        out = plan.due(asked, covered, sent, 1 if i == len(chunks) else grain)
        assert not members(out) & members(sent)
        for a, b in out:
            sent.add(a, b)
    assert members(sent) == members(asked) & members(covered)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.tuples(
        st.integers(0, 12),
        st.sampled_from([None, 1, 3, 5]),
        st.integers(0, 2),
        st.booleans(),
        sets(16),
        sets(16),
    )
)
def test_what_ships_is_needed_and_lacked_by_one_side_and_had_by_the_other(case):
    check_ship(*case)


def test_reused_rows_of_the_prefill_side_ship_like_computed_ones():
    reused_and_computed = SpanSet([(0, 48), (48, 56)])
    assert plan.ship(draft(window=16), 56, SpanSet(), reused_and_computed) == [(41, 56)]


def test_a_second_turn_ships_its_suffix_alone():
    held, covered = SpanSet([(0, 2048)]), SpanSet([(0, 2200)])
    assert plan.ship(group(), 2176, held, covered) == [(2048, 2176)]
    assert plan.ship(draft(lookahead=1), 2176, SpanSet([(1, 2048)]), covered) == [(2048, 2176)]


@pytest.mark.parametrize("n", [15, 16, 17])
def test_scratch_and_lookahead_rows_never_ship(n):
    everything_written = SpanSet([(0, n + 5)])  # K drafts and the first draft step's own rows
    assert plan.ship(group(page_size=16), n, SpanSet(), everything_written) == [(0, n)]
    assert plan.ship(draft(lookahead=1), n, SpanSet(), everything_written) == [(1, n)]


@pytest.mark.parametrize("length", [64, 512, 8192])
def test_a_windowed_draft_group_ships_at_most_its_window(length):
    shipped = plan.ship(draft(window=32), length, SpanSet(), SpanSet([(0, length)]))
    assert shipped == [(length - 31, length)]


def test_a_windowed_target_ships_what_the_early_start_of_the_pass_reads():
    everything = SpanSet([(0, 100)])
    assert plan.ship(group(window=8), 100, SpanSet(), everything) == [(93, 100)]
    assert plan.ship(group(window=8), 100, SpanSet(), everything, ahead=1) == [(92, 100)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sets(40), st.lists(sets(40), max_size=4), st.sampled_from([1, 2, 4, 16]))
def test_chunks_ship_every_slot_once_and_all_that_is_covered_in_the_end(asked, chunks, grain):
    check_chunks(asked, chunks, grain)


def test_a_page_that_is_not_complete_waits_for_its_rest():
    asked, sent = SpanSet([(0, 40)]), SpanSet()
    assert plan.due(asked, SpanSet([(0, 21)]), sent, 16) == [(0, 16)]
    sent.add(0, 16)
    assert plan.due(asked, SpanSet([(0, 31)]), sent, 16) == []
    assert plan.due(asked, SpanSet([(0, 40)]), sent, 16) == [(16, 40)]
    assert plan.due(asked, SpanSet([(0, 31)]), sent) == [(16, 31)]


# -- which bytes ---------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_every_byte_that_should_arrive_arrives_once_from_the_right_byte(data):
    any_transfer(lambda options: data.draw(st.sampled_from(options))).check()


@pytest.mark.parametrize("sizes", list(itertools.product(PAGE_SIZES, repeat=2)))
def test_any_page_size_ships_to_any_other(sizes):
    for spans in ([(0, 256)], [(3, 130), (131, 140), (200, 257)]):
        for order in ("in order", "shuffled"):
            src, dst = (group(page_size=size) for size in sizes)
            transfer(src, dst, spans, order=order).check()


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", list(itertools.product((1, 2, 4), repeat=2)))
def test_any_parallelism_ships_to_any_other_the_drafters_heads_apart(ranks, heads):
    """Heads are mapped per group: the drafter has half the target's heads, and pages of its own."""
    of_draft = {"heads": max(1, heads // 2), "layers": (0,)}
    transfer(group(heads, 8), group(heads, 4), [(0, 21)], ranks=ranks).check()
    transfer(
        draft(**of_draft, page_size=2), draft(**of_draft, page_size=16), [(1, 21)], ranks=ranks
    ).check()


@pytest.mark.parametrize(("here", "there"), [((0, 1), (0,)), ((0,), (0, 1)), ((0, 1), (0, 1))])
def test_a_drafter_that_is_whole_on_every_rank_ships_beside_a_target_that_is_shared_out(
    here, there
):
    def whole(ranks):
        return [
            Shard(rank=r, first_head=0, num_heads=2, first_layer=0, num_layers=2) for r in ranks
        ]

    moved = transfer(draft(), draft(), [(0, 21)])
    moved.src = msgspec.structs.replace(moved.src, shards=tuple(whole(here)))
    moved.dst = msgspec.structs.replace(moved.dst, shards=tuple(whole(there)))
    moved.check()
    owners = {route.dst_rank: route.src_rank for route in moved.routes()}
    assert len(owners) == len(moved.routes()) == len(there)
    assert set(owners.values()) == set(here[: len(there)])  # replicas share the work


@pytest.mark.parametrize("stages", [1, 2])
def test_pipeline_stages_ship_to_other_stages_a_draft_layer_on_the_last_too(stages):
    def staged(offer, num):
        each = len(offer.layers) // num
        shards = [
            Shard(rank=r, first_head=0, num_heads=2, first_layer=r * each, num_layers=each)
            for r in range(num)
        ]
        return msgspec.structs.replace(offer, shards=tuple(shards))

    moved = transfer(group(layers=(0, 1, 2, 3)), group(layers=(0, 1, 2, 3), page_size=8), [(2, 21)])
    moved.src, moved.dst = staged(moved.src, 4 // stages), staged(moved.dst, stages)
    moved.check()
    last = msgspec.structs.replace(
        moved.src.shards[0], rank=7, first_layer=0, num_layers=1, first_head=0
    )
    one = transfer(draft(layers=(0,)), draft(layers=(0,)), [(2, 21)])
    one.src = msgspec.structs.replace(one.src, shards=(last,))
    one.check()
    assert [(r.src_rank, r.dst_rank) for r in one.routes()] == [(7, 0)]


def test_the_strides_of_a_view_are_used_and_not_guessed_from_its_shape():
    for order in (DIMS, ("layer", "role", "page", "slot", "head"), (*DIMS[:3], "head", "slot")):
        moved = transfer(group(4), group(4), [(1, 33)])
        shard = moved.src.shards[0]
        view = msgspec.structs.replace(shard, strides=strides(moved.src, shard, order, gap=5))
        moved.src = msgspec.structs.replace(moved.src, shards=(view,))
        moved.check()


def test_a_packed_pool_is_laid_out_as_attention_lays_it_out():
    chosen = group(4, 8, head_dim=16, layers=(0, 1, 2), dtype="float32")
    offer = group_offer(chosen, 5)
    data = KVPool(chosen, 5).data
    assert offer.strides(offer.shards[0]) == tuple(4 * s for s in data.stride()[:-1])
    assert offer.page_bytes(offer.shards[0]) == chosen.page_bytes == data[0].nbytes


# -- how many regions ----------------------------------------------------------------------------


def regions_of(moved) -> list[plan.Region]:
    (out,) = moved.check()
    return out


def test_neighbouring_whole_pages_are_one_region():
    assert len(regions_of(transfer(group(), group(), [(0, 64)], order="in order"))) == 1
    assert len(regions_of(transfer(group(), group(), [(0, 64)], order="backwards"))) == 16
    moved = transfer(group(), group(), [(0, 24)])
    moved.src_pages, moved.dst_pages = [0, 1, 2, 5, 6, 7], [4, 5, 0, 1, 2, 6]
    assert [
        size // moved.src.page_bytes(moved.src.shards[0]) for *_, size in regions_of(moved)
    ] == [
        2,
        1,
        2,
        1,
    ]


def test_pages_of_a_layer_major_pool_are_merged_layer_by_layer():
    moved = transfer(group(), group(page_size=16), [(3, 61)], order="in order")
    for side in ("src", "dst"):
        offer = getattr(moved, side)
        shard = offer.shards[0]
        order = ("layer", "role", "page", "slot", "head")
        laid = msgspec.structs.replace(shard, strides=strides(offer, shard, order))
        setattr(moved, side, msgspec.structs.replace(offer, shards=(laid,)))
    assert len(regions_of(moved)) == 2 * 2


def test_a_partial_page_is_a_region_for_each_layer_and_role():
    layers, roles = 2, 2
    moved = transfer(group(), group(), [(1, 7)], order="backwards")
    assert len(regions_of(moved)) == 2 * layers * roles
    moved = transfer(group(), group(), [(1, 9)], order="backwards")
    assert len(regions_of(moved)) == 1 + 2 * layers * roles


def test_what_touches_on_both_sides_is_merged_across_the_end_of_a_partial_page():
    # the last layer's values of page 0 end where page 1 begins
    assert len(regions_of(transfer(group(), group(), [(1, 9)], order="in order"))) == 4 + 3


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_in_packed_pools_no_region_touches_the_one_before_it_on_both_sides(data):
    moved = any_transfer(lambda options: data.draw(st.sampled_from(options)))
    packed = [
        msgspec.structs.replace(
            offer, shards=tuple(msgspec.structs.replace(s, strides=()) for s in offer.shards)
        )
        for offer in (moved.src, moved.dst)
    ]
    moved.src, moved.dst = packed
    for route in moved.routes():
        found = moved.regions(route)
        for (s, d, size), (x, y, _) in itertools.pairwise(found):
            assert (s + size, d + size) != (x, y)


def test_a_long_prompt_on_a_large_model_is_a_region_for_each_page():
    shape = {"heads": 8, "head_dim": 128, "dtype": "bfloat16", "layers": tuple(range(32))}
    target = group(page_size=128, **shape)
    offer = group_offer(target, 80)
    (route,) = plan.routes(offer, offer)
    backwards, forwards = list(range(63, -1, -1)), list(range(64))
    scattered = plan.cost(plan.regions(route, [(0, 8192)], backwards, forwards))
    assert scattered == plan.Cost(64, 8192 * target.slot_bytes)
    assert plan.cost(plan.regions(route, [(0, 8192)], forwards, forwards)).num_regions == 1
    (recut,) = plan.routes(offer, group_offer(group(page_size=32, **shape), 300))
    cut = plan.cost(plan.regions(recut, [(0, 8192)], forwards, list(range(255, -1, -1))))
    assert cut == plan.Cost(256 * 32 * 2, 8192 * target.slot_bytes)


def test_bytes_are_counted_for_every_replica_that_is_made():
    moved = transfer(group(1), group(1), [(0, 10)], ranks=(1, 4))
    (route, *_) = routes = moved.routes()
    assert plan.expected_bytes(routes, moved.spans) == 4 * 10 * route.slot_bytes
    assert plan.cost(r for x in routes for r in moved.regions(x)).num_bytes == 40 * route.slot_bytes


# -- re-cut through a buffer ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "sizes"), [((1, 2), (8, 8)), ((1, 1), (16, 4)), ((2, 1), (4, 8))]
)
def test_a_buffer_recuts_pages_and_heads_and_ships_the_same_bytes(ranks, sizes):
    moved = transfer(group(4, sizes[0]), group(4, sizes[1]), [(3, 9), (16, 64)], ranks=ranks)
    source, target = moved.source(), BytePools(moved.dst)
    buffer_pages = plan.staging_pages(moved.spans, sizes[1])
    num = max(buffer_pages) + 1
    assert sorted(set(buffer_pages) - {NO_PAGE}) == list(range(num))
    for route in moved.routes():
        into, out = plan.staged(route, num)
        shard = Shard(
            rank=route.dst_rank,
            first_head=0,
            num_heads=route.num_heads,
            first_layer=0,
            num_layers=2,
        )
        part = msgspec.structs.replace(
            moved.dst, num_kv_heads=route.num_heads, num_pages=num, shards=(shard,)
        )
        buffer = BytePools(part)
        buffer.receive(source, into, plan.regions(into, moved.spans, moved.src_pages, buffer_pages))
        buffer.flat = {route.src_rank: buffer.flat[route.dst_rank]}
        written = plan.regions(out, moved.spans, buffer_pages, moved.dst_pages)
        target.receive(buffer, out, written)
        if ranks[0] <= ranks[1]:  # all of a destination page comes through this buffer
            assert len(written) <= 48 // sizes[1] + 2 * 2 * 2 * 2
    moved.compare(target)


# -- what is refused -----------------------------------------------------------------------------


def broken(change) -> str:
    moved = transfer(group(), group(page_size=2), [(0, 6), (9, 16)], order="in order")
    change(moved)
    with pytest.raises(InvariantError) as error:
        moved.regions(*moved.routes())
    return str(error.value)


def test_a_page_that_is_not_held_is_never_an_address():
    assert "source" in broken(lambda m: m.src_pages.__setitem__(1, NO_PAGE))
    assert "target" in broken(lambda m: m.dst_pages.__setitem__(7, NO_PAGE))
    assert "not held" in broken(lambda m: m.dst_pages.__setitem__(0, NO_PAGE))


def test_slots_outside_the_tables_or_the_pools_are_refused():
    assert "page 99" in broken(lambda m: m.dst_pages.__setitem__(0, 99))
    assert "page 10" in broken(lambda m: m.dst_pages.__setitem__(0, m.dst.num_pages))
    assert "not on 3 pages" in broken(lambda m: m.src_pages.pop())
    assert "[-1, 6)" in broken(lambda m: m.spans.append((-1, 2)))


def test_a_page_that_would_be_written_for_two_runs_of_slots_is_refused():
    assert "two runs" in broken(lambda m: m.dst_pages.__setitem__(0, m.dst_pages[7]))


def test_pages_that_no_slot_needs_may_be_missing():
    moved = transfer(group(), group(page_size=2), [(9, 16)], order="in order")
    moved.src_pages[:2] = [NO_PAGE] * 2
    moved.dst_pages[:4] = [NO_PAGE] * 4
    moved.check()
