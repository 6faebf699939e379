"""The pages of one group: conservation, holders, the order of eviction."""

import pytest

from tandemkv.base.errors import InvariantError
from tandemkv.base.ids import NO_PAGE
from tandemkv.kv.pool import PagePool
from tandemkv.kv.tree import Node, Run


def published(pool: PagePool, count: int = 2) -> Run:
    """A run of `count` pages in a block of its own, with one holder."""
    node = Node(None, b"", b"", 0, 4, [None])
    run = Run(node, 0, pool.take(count), count, 0, None)
    node.runs[0] = run
    return run


def evicted_in_turn(pool: PagePool) -> list[Run]:
    out = []
    while (run := pool.oldest) is not None:
        out.append(run)
        pool.detach(run)
    return out


def test_pages_are_free_held_or_cached_and_add_up():
    pool = PagePool("t", 8)
    run = published(pool)
    assert (pool.usage().free, pool.held, pool.cached) == (6, 2, 0)
    pool.drop(run)
    assert (pool.usage().free, pool.held, pool.cached) == (6, 0, 2)
    pool.hold(run)
    assert (pool.available, pool.held, pool.peak_held) == (6, 2, 2)
    pool.detach(run)
    assert pool.held == 2
    pool.drop(run)
    assert pool.usage().free == 8
    pool.check()


def test_a_page_is_handed_out_once():
    pool = PagePool("t", 4)
    pages = pool.take(3)
    assert len(set(pages)) == 3
    with pytest.raises(InvariantError, match="2 pages taken of 1"):
        pool.take(2)


def test_the_run_dropped_last_is_evicted_last_unless_it_left_every_window():
    pool = PagePool("t", 8)
    first, second, third, fourth = (published(pool) for _ in range(4))
    pool.drop(first)
    pool.drop(second)
    pool.drop(third, first=True)
    pool.drop(fourth, first=True)
    pool.hold_all([first, None, fourth])
    pool.drop(first)
    pool.drop(fourth, first=True)
    pool.check()
    assert evicted_in_turn(pool) == [third, fourth, second, first]


def test_a_run_is_not_dropped_below_zero_nor_taken_from_the_tree_twice():
    pool = PagePool("t", 4)
    run = published(pool)
    pool.drop(run)
    with pytest.raises(InvariantError, match="without holders"):
        pool.drop(run)
    pool.detach(run)
    with pytest.raises(InvariantError, match="twice"):
        pool.detach(run)
    with pytest.raises(InvariantError, match="outside the tree"):
        pool.hold(run)


def test_debug_mode_reports_every_page_that_became_free_once():
    pool = PagePool("t", 4, debug=True)
    pages = pool.take(3)
    pool.give([*pages[:2], NO_PAGE])
    assert pool.drain_freed() == pages[:2]
    assert pool.drain_freed() == []
    assert PagePool("t", 4).drain_freed() == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool: pool.free.append(pool.free[0]),
        lambda pool: pool.free.append(99),
        lambda pool: setattr(pool, "cached", 1),
        lambda pool: pool.hold_all(list(pool.lru)) or pool.lru.update(dict.fromkeys([pool.kept])),
    ],
    ids=["free twice", "no such page", "miscounted", "held yet evictable"],
)
def test_the_check_finds(spoil):
    class Kept(PagePool):
        kept: Run

    pool = Kept("t", 4)
    pool.kept = published(pool)
    pool.drop(pool.kept)
    pool.check()
    spoil(pool)
    with pytest.raises(InvariantError):
        pool.check()
