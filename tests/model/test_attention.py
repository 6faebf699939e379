"""Attention over pages against softmax attention written out slot by slot, in NaN-filled pools."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from tandemkv.base.errors import ConfigError, InvariantError
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.layout import Domain, LayerGroup, Role
from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 8, 2
NUM_PAGES = 256
TOLERANCE = 1e-5


def group(page_size: int = 4, window: int | None = None) -> LayerGroup:
    return LayerGroup(
        name="g",
        domain=Domain.TARGET,
        layers=tuple(range(LAYERS)),
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        page_size=page_size,
        window=window,
    )


@dataclass
class Case:
    """One sequence: what its rows are, what its pages hold, and the answer by brute force."""

    segment: AttentionSegment
    q: torch.Tensor  # [Tq, H, hd]
    k: torch.Tensor  # [layers, slots, Hkv, hd], every slot of the sequence
    v: torch.Tensor

    def rows(self) -> slice:
        return slice(self.segment.slot, self.segment.slot + len(self.q))

    def answer(self, layer: int, window: int | None, **kinds) -> torch.Tensor:
        covered = SpanSet([*self.segment.readable, *self.segment.writes])
        return torch.stack(
            [
                by_hand(
                    query,
                    self.k[layer],
                    self.v[layer],
                    visible(covered, self.segment.slot + i, window, self.segment.causal),
                    **kinds,
                )
                for i, query in enumerate(self.q)
            ]
        )


def visible(covered: SpanSet, slot: int, window: int | None, causal: bool) -> list[int]:
    low = 0 if window is None else slot - window + 1
    return [s for a, b in covered for s in range(a, b) if s >= low and (s <= slot or not causal)]


def by_hand(query, k, v, slots: list[int], *, scale=None, softcap=None, sinks=None):
    """One query [H, hd] over the named slots: softmax attention, nothing clever."""
    if not slots:
        return torch.zeros_like(query)
    k, v = (x[slots].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", query, k) * (scale or DIM**-0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None]), 1)
    weights = scores.softmax(-1)[:, : len(slots)]
    return torch.einsum("ht,thd->hd", weights, v)


class World:
    """A poisoned pool and sequences with shuffled pages in it."""

    def __init__(self, shape: LayerGroup, seed: int = 0) -> None:
        self.pool = KVPool(shape, NUM_PAGES, poison=True)
        self.free = list(range(NUM_PAGES))
        self.random = random.Random(seed)
        self.random.shuffle(self.free)
        self.torch = torch.Generator().manual_seed(seed)
        self.cases: list[Case] = []

    def add(
        self, slot: int, num_rows: int, readable: list[Span], writes: list[Span], causal=True
    ) -> Case:
        """A sequence whose readable slots are in its pages; all else there stays NaN."""
        size = self.pool.group.page_size
        slots = max([slot + num_rows, *(stop for _, stop in readable)])
        pages = [self.free.pop() for _ in range(-(-slots // size))]
        k, v = self.draw(LAYERS, slots, KV_HEADS, DIM), self.draw(LAYERS, slots, KV_HEADS, DIM)
        for start, stop in readable:
            for s in range(start, stop):
                self.pool.data[pages[s // size], :, 0, s % size] = k[:, s]
                self.pool.data[pages[s // size], :, 1, s % size] = v[:, s]
        row = self.cases[-1].segment.row_stop if self.cases else 0
        segment = AttentionSegment(row, row + num_rows, slot, pages, readable, writes, causal)
        self.cases.append(Case(segment, self.draw(num_rows, HEADS, DIM), k, v))
        return self.cases[-1]

    def add_any(self) -> Case:
        """A decode, verify, chunk or query-only segment, holes in half of them."""
        n, num_rows = self.random.randint(0, 30), self.random.randint(1, 8)
        slot = max(0, n - self.random.randint(0, 2))
        readable = SpanSet([(0, n)])
        if n > 3 and self.random.random() < 0.5:
            start = self.random.randrange(n)
            readable.remove(start, self.random.randint(start, n))
        writes = [(n, slot + num_rows)] if n < slot + num_rows else []
        return self.add(slot, num_rows, list(readable), writes, self.random.random() < 0.8)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.torch)

    def run(self, layer: int, rows: GroupRows | None = None, **kinds) -> torch.Tensor:
        rows = rows or GroupRows(self.pool, [case.segment for case in self.cases])
        q = torch.cat([case.q for case in self.cases])
        k = torch.cat([case.k[layer, case.rows()] for case in self.cases])
        v = torch.cat([case.v[layer, case.rows()] for case in self.cases])
        return rows.attend(layer, q, k, v, **kinds)

    def answer(self, layer: int, **kinds) -> torch.Tensor:
        window = self.pool.group.window
        return torch.cat([case.answer(layer, window, **kinds) for case in self.cases])

    def gap(self, layer: int = 0, **kinds) -> float:
        return float((self.run(layer, **kinds) - self.answer(layer, **kinds)).abs().max())


@pytest.mark.parametrize("window", [None, 1, 3, 7, 20])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_any_batch_equals_attention_by_hand(page_size, window):
    for seed in range(12):
        world = World(group(page_size, window), seed)
        for _ in range(world.random.randint(1, 4)):
            world.add_any()
        rows = GroupRows(world.pool, [case.segment for case in world.cases])
        for layer in range(LAYERS):
            out = world.run(layer, rows)
            torch.testing.assert_close(out, world.answer(layer), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 40])
def test_many_rows_and_few_rows_take_different_kernels_to_one_answer(num_rows):
    for start in (0, 3, 33):
        world = World(group())
        world.add(start, num_rows, [(0, start)], [(start, start + num_rows)])
        assert world.gap() < TOLERANCE


@pytest.mark.parametrize("kinds", [{"scale": 0.5}, {"softcap": 1.5}, {"sinks": "draw"}])
@pytest.mark.parametrize("window", [None, 5])
def test_scale_softcap_and_sinks_are_applied(kinds, window):
    world = World(group(window=window))
    world.add(0, 9, [], [(0, 9)])
    world.add(12, 3, [(0, 5), (9, 12)], [(12, 15)])
    world.add(20, 1, [(0, 20)], [(20, 21)])
    kinds = {name: world.draw(HEADS) if x == "draw" else x for name, x in kinds.items()}
    assert world.gap(**kinds) < TOLERANCE
    plain = (world.run(0) - world.answer(0, **kinds)).abs().max()
    assert plain > 1e-3  # without them the answer is another one


def test_a_query_only_row_sees_held_slots_and_writes_nothing():
    world = World(group())
    case = world.add(9, 4, [(0, 10)], [(10, 13)])
    before = world.pool.read(case.segment.pages, range(10))
    assert world.gap() < TOLERANCE
    assert torch.equal(world.pool.read(case.segment.pages, range(10)), before)
    written = world.pool.read(case.segment.pages, range(10, 13))
    assert torch.equal(written[:, 0, 0], case.k[0, 10:13])
    assert torch.equal(written[:, 0, 1], case.v[0, 10:13])
    assert written[:, 1].isnan().all()  # the other layer was not asked for


def test_a_write_touches_its_own_slots_and_no_others():
    world = World(group())
    case = world.add(6, 5, [(0, 6)], [(7, 9)])
    before = world.pool.data.clone()
    rows = GroupRows(world.pool, [case.segment])
    rows.write(0, case.k[0, 6:11], case.v[0, 6:11])
    changed = (world.pool.data != before) & ~(world.pool.data.isnan() & before.isnan())
    size = world.pool.group.page_size
    where = {(case.segment.pages[s // size], 0, kv, s % size) for s in (7, 8) for kv in (0, 1)}
    assert {tuple(index) for index in changed.flatten(4).any(-1).nonzero().tolist()} == where


def test_writes_outside_the_rows_are_not_read():
    world = World(group())
    world.add(4, 2, [(0, 4)], [(4, 12)])  # slots 6..11 are promised to a later pass
    world.cases[0].segment.pages.extend([world.free.pop(), world.free.pop()])
    case = world.cases[0]
    answer = replace(case, segment=replace(case.segment, writes=[(4, 6)])).answer(0, None)
    torch.testing.assert_close(world.run(0), answer, atol=TOLERANCE, rtol=0)


def test_a_row_that_sees_nothing_gets_zeros():
    world = World(group())
    world.add(2, 3, [(3, 4)], [(4, 5)])  # the first row's only slots are its own and older
    world.add(0, 2, [], [])
    out = world.run(0)
    assert torch.equal(out[0], torch.zeros(HEADS, DIM))
    assert torch.equal(out[3:], torch.zeros(2, HEADS, DIM))
    torch.testing.assert_close(out, world.answer(0), atol=TOLERANCE, rtol=0)


def test_rows_of_a_batch_need_no_segment():
    world = World(group())
    world.add(3, 1, [(0, 3)], [(3, 4)])
    segment = replace(world.cases[0].segment, row_start=2, row_stop=3)
    rows = GroupRows(world.pool, [segment])
    case = world.cases[0]
    q, k, v = (x.repeat(3, 1, 1) for x in (case.q, case.k[0, 3:4], case.v[0, 3:4]))
    out = rows.attend(0, q, k, v)
    torch.testing.assert_close(out[2:], world.answer(0), atol=TOLERANCE, rtol=0)
    assert torch.equal(out[:2], torch.zeros(2, HEADS, DIM))


@pytest.mark.parametrize("window", [None, 6])
def test_a_read_copies_the_pages_that_hold_readable_slots_and_no_others(window):
    size = 4
    for seed in range(20):
        world = World(group(size, window), seed)
        for _ in range(3):
            world.add_any()
        wanted = 0
        for case in world.cases:
            segment, last = case.segment, case.segment.slot + len(case.q) - 1
            covered = SpanSet([*segment.readable, *segment.writes])
            low = 0 if window is None else max(0, segment.slot - window + 1)
            seen = covered.within(low, last + 1 if segment.causal else covered.stop)
            wanted += len({s // size for a, b in seen for s in range(a, b)})
        rows = GroupRows(world.pool, [case.segment for case in world.cases])
        assert rows.pages_read == wanted
        world.run(0, rows)
        assert rows.bytes_gathered == wanted * world.pool.group.page_bytes // LAYERS
        world.run(1, rows)
        assert rows.bytes_gathered == wanted * world.pool.group.page_bytes


def test_a_decode_row_in_a_window_reads_the_window_alone():
    world = World(group(4, window=8))
    world.add(200, 1, [(0, 200)], [(200, 201)])
    rows = GroupRows(world.pool, [world.cases[0].segment])
    assert rows.pages_read == 3  # slots 193..200 lie in pages 48, 49 and 50


def test_a_slot_on_a_page_that_is_not_held_is_a_broken_law():
    world = World(group())
    segment = world.add(8, 1, [(0, 8)], [(8, 9)]).segment
    lost = replace(segment, pages=[segment.pages[0], -1, segment.pages[2]])
    with pytest.raises(InvariantError, match="page 1"):
        GroupRows(world.pool, [lost])
    short = replace(segment, pages=segment.pages[:2])
    with pytest.raises(InvariantError, match="page 2"):
        GroupRows(world.pool, [short])


def test_a_page_not_held_before_the_window_is_not_missed():
    world = World(group(4, window=3))
    segment = world.add(8, 1, [(0, 8)], [(8, 9)]).segment
    rows = GroupRows(world.pool, [replace(segment, pages=[-1, *segment.pages[1:]])])
    torch.testing.assert_close(world.run(0, rows), world.answer(0), atol=TOLERANCE, rtol=0)


# -- seeded faults: what the comparison above must catch ------------------------------------------


def test_a_window_off_by_one_is_caught():
    world = World(group(window=5))
    world.add(12, 3, [(0, 12)], [(12, 15)])
    assert world.gap() < TOLERANCE
    world.pool.group = group(window=6)
    out = world.run(0)
    world.pool.group = group(window=5)
    assert (out - world.answer(0)).abs().max() > 1e-3


def test_a_row_written_to_the_wrong_slot_is_caught():
    world = World(group())
    case = world.add(6, 1, [(0, 6)], [])
    assert world.gap() < TOLERANCE
    wrong = GroupRows(world.pool, [replace(case.segment, slot=5, writes=[(5, 6)])])
    wrong.write(0, case.k[0, 6:7], case.v[0, 6:7])
    assert world.gap() > 1e-3


def test_a_zero_filled_hole_is_not_a_masked_one():
    world = World(group())
    case = world.add(12, 1, [(0, 3), (9, 12)], [(12, 13)])
    assert world.gap() < TOLERANCE
    for slot in range(3, 9):
        world.pool.data[case.segment.pages[slot // 4], :, :, slot % 4] = 0.0
    assert world.gap() < TOLERANCE  # still masked, whatever the page holds
    answer = world.answer(0)
    case.segment.readable = [(0, 12)]  # the fault: coverage claims the zeros
    assert (world.run(0) - answer).abs().max() > 1e-3


def test_foreign_bytes_in_uncovered_slots_change_nothing():
    world = World(group())
    world.add(9, 6, [(0, 2), (5, 9)], [(9, 15)])
    clean = world.run(0)
    world.pool.data[world.pool.data.isnan()] = 1e9
    assert torch.equal(world.run(0), clean)


# -- the pool ------------------------------------------------------------------------------------


def test_a_copied_page_holds_the_same_rows_in_every_layer():
    pool = KVPool(group(), 3)
    pool.data.copy_(torch.randn(pool.data.shape))
    pool.copy(0, 2)
    assert torch.equal(pool.data[2], pool.data[0])
    assert not torch.equal(pool.data[1], pool.data[0])


def test_poison_marks_the_named_pages_alone():
    pool = KVPool(group(), 3)
    pool.poison([1])
    assert pool.data[1].isnan().all()
    assert not pool.data[[0, 2]].isnan().any()


def test_a_pool_takes_the_bytes_its_group_declares():
    pool = KVPool(group(), 5)
    assert pool.data.nbytes == 5 * pool.group.page_bytes


def test_rows_other_than_key_and_value_are_refused_by_name():
    latent = LayerGroup(
        name="mla",
        domain=Domain.TARGET,
        layers=(0,),
        num_kv_heads=1,
        head_dim=8,
        roles=(Role.LATENT,),
    )
    with pytest.raises(ConfigError, match="'mla' holds latent"):
        KVPool(latent, 1)


def test_a_pool_that_does_not_fit_in_memory_says_how_large_it_was():
    with pytest.raises(ConfigError, match=r"no memory for .* pages \(.* MiB\)"):
        KVPool(group(), 2**48)
