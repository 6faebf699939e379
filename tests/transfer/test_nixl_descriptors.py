"""What NIXL is handed: the fewest regions that carry the bytes, with the right device ids."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemkv.base.spans import SpanSet
from tandemkv.kv.layout import Domain, LayerGroup
from tandemkv.kv.pool import PagePool
from tandemkv.transfer import nixl
from tandemkv.transfer.nixl import merged
from tandemkv.transfer.plan import regions, routes
from tandemkv.transfer.shards import group_offer
from tandemkv.transfer.transport import CPU, Batch, Memory

PAGE = 64


def copied(found: list[tuple[int, int, int]]) -> dict[int, int]:
    """Destination byte -> source byte."""
    out: dict[int, int] = {}
    for x, y, size in found:
        for i in range(size):
            assert y + i not in out, "a byte is written twice"
            out[y + i] = x + i
    return out


@st.composite
def page_moves(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Regions of one to three pages, in any order, some of them neighbours."""
    src = draw(st.permutations(range(12)))
    dst = draw(st.permutations(range(12)))
    if draw(st.booleans()):  # both sides gave out their pages in the same order
        dst = src
    size = draw(st.integers(1, 3))
    pairs = list(zip(src, dst, strict=True))[: draw(st.integers(0, 12))]
    return [(3 * x, 3 * y, size) for x, y in pairs]


@given(page_moves())
def test_merging_changes_no_byte_and_leaves_no_neighbours(found):
    out = merged(found)
    assert copied(out) == copied(found)
    assert not any(
        (a[0] + a[2], a[1] + a[2]) == (b[0], b[1]) for a in out for b in out if a is not b
    )


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ([], []),
        ([(0, 64, 64), (64, 128, 64)], [(0, 64, 128)]),
        ([(64, 128, 64), (0, 64, 64)], [(0, 64, 128)]),
        ([(0, 64, 64), (64, 192, 64)], [(0, 64, 64), (64, 192, 64)]),
        ([(0, 0, 64), (128, 64, 64)], [(0, 0, 64), (128, 64, 64)]),
        ([(0, 0, 10), (0, 64, 10), (10, 10, 5)], [(0, 0, 10), (0, 64, 10), (10, 10, 5)]),
    ],
    ids=["none", "ascending", "descending", "apart there", "apart here", "one source twice"],
)
def test_regions_become_one_where_both_sides_go_on(found, wanted):
    assert merged(found) == wanted


def pool_in_use(rounds: int) -> list[int]:
    """The pages that a prompt of 16 pages gets after others of its size came and went."""
    pool = PagePool("target", 64)
    for _ in range(rounds):
        pool.give(pool.take(16))
    return [int(page) for page in pool.take(16)]


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
def test_a_pool_that_gives_its_pages_out_backwards_costs_one_descriptor_all_the_same(rounds):
    pages = pool_in_use(rounds)
    assert sorted(pages) == list(range(16))
    group = LayerGroup(
        name="target", domain=Domain.TARGET, layers=(0, 1), num_kv_heads=2, head_dim=4,
        dtype="bfloat16", page_size=4,
    )  # fmt: skip
    offer = group_offer(group, 64)
    found = regions(routes(offer, offer)[0], SpanSet([(0, 64)]), pages, pages)
    assert len(found) == (1 if rounds % 2 == 0 else 16)
    assert merged(found) == [(0, 0, 16 * group.page_bytes)]


def memories(device: int, *, pages: int = 8) -> list[Memory]:
    return [
        Memory(address=4096, num_bytes=pages * PAGE, page_bytes=PAGE, device=device),
        Memory(address=65536, num_bytes=pages * PAGE, page_bytes=PAGE, device=device),
    ]


def test_rows_name_each_sides_own_address_and_device():
    batches = [Batch(0, 1, [(0, 64, 64)]), Batch(1, 0, [(32, 128, 10)])]
    assert nixl._rows(batches, 0, memories(1)) == [(4096, 64, 1), (65568, 10, 1)]
    assert nixl._rows(batches, 1, memories(0)) == [(65600, 64, 0), (4224, 10, 0)]
    assert nixl._rows(batches, 1, memories(CPU)) == [(65600, 64, 0), (4224, 10, 0)]
    assert [nixl._kind(memories(device)) for device in (CPU, 0, 3)] == ["DRAM", "VRAM", "VRAM"]


def test_whole_pages_go_by_index_only_where_no_two_of_them_adjoin():
    rng = random.Random(7)
    pools = memories(0, pages=64)
    order = rng.sample(range(0, 64, 2), 20)
    apart = merged([(x * PAGE, (63 - x) * PAGE, PAGE) for x in order])
    found = nixl._page_indices([Batch(1, 0, apart)], pools, pools)
    assert found is not None
    assert [list(side) for side in found] == [
        [64 + x for x in sorted(order)],
        [63 - x for x in sorted(order)],
    ]
    beside = merged([(x * PAGE, x * PAGE, PAGE) for x in (5, 3, 4)])
    assert nixl._page_indices([Batch(0, 0, beside)], pools, pools) is None
    assert len(nixl._rows([Batch(0, 0, beside)], 0, pools)) == 1
