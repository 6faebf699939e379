"""What every data plane promises, and how the loopback breaks when it is told to."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.base.errors import ConfigError, InvariantError, PeerError
from tandemkv.transfer.loopback import Faults, Loopback, Network
from tandemkv.transfer.transport import (
    Batch,
    Blob,
    DataEvent,
    Disconnected,
    Done,
    Failed,
    Fenced,
    Memory,
    Notified,
    Over,
    Transport,
    check_batches,
    pack_blob,
    unpack_blob,
)

PAGE = 64
SIZES = (16 * PAGE, 10 * PAGE)
HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl", "nixl_cu12"))


class End:
    """One side: a data plane, and two pools of random bytes. Events pile up."""

    def __init__(self, plane: Transport, seed: int) -> None:
        rng = random.Random(seed)
        self.plane = plane
        self.pools = [bytearray(rng.randbytes(size)) for size in SIZES]
        self.blob = plane.register([Memory.of(pool, PAGE) for pool in self.pools])
        self.name = plane.name
        self.events: list[DataEvent] = []

    def poll(self) -> None:
        self.events += self.plane.poll()
        self.plane.check()


def settle(*ends: End, until: Callable[[], bool], polls: int = 20_000) -> None:
    for _ in range(polls):
        if until():
            return
        for end in ends:
            end.poll()
    raise TimeoutError([end.events for end in ends])


Pair = tuple[End, End]


def connected(a: End, b: End) -> Pair:
    assert a.plane.connect(b.blob) == b.name
    assert b.plane.connect(a.blob) == a.name
    return a, b


def loopbacks(faults: Faults | None = None) -> Pair:
    network = Network()
    ends = [End(Loopback(network, name, faults), seed) for seed, name in enumerate("ab")]
    return connected(*ends)


@pytest.fixture(params=["loopback", "nixl"])
def ends(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two connected data planes of each kind, in this process."""
    if request.param == "loopback":
        yield loopbacks()
        return
    if not HAS_NIXL:
        pytest.skip("NIXL is not installed: pip install 'tandemkv[nixl]'")
    from tandemkv.transfer.nixl import Nixl

    pair = connected(End(Nixl("a"), 0), End(Nixl("b"), 1))
    yield pair
    for end in pair:
        end.plane.close()


# -- every data plane ------------------------------------------------------------------------------


def batches_of(rng: random.Random) -> list[Batch]:
    """Regions that do not overlap at the destination; whole pages, or anything."""
    out: list[Batch] = []
    whole = rng.random() < 0.5
    for dst in (0, 1):
        src = dst if whole else rng.choice((0, 1))
        regions = []
        at = 0
        while at < SIZES[dst]:
            if whole:
                gap, size = PAGE * rng.randint(0, 3), PAGE
                x = PAGE * rng.randrange(SIZES[src] // PAGE)
            else:
                gap, size = rng.randint(0, 200), rng.randint(1, 300)
                x = rng.randint(0, SIZES[src] - 300)
            if at + gap + size <= SIZES[dst]:
                regions.append((x, at + gap, size))
            at += gap + size
        out.append(Batch(src, dst, regions))
    return out


@pytest.mark.parametrize("reading", [False, True], ids=["write", "read"])
def test_exactly_the_named_bytes_are_copied_and_the_notice_comes_last(ends, reading):
    a, b = ends
    for seed in range(8):
        batches = batches_of(random.Random(seed))
        source, target = (b, a) if reading else (a, b)
        expected = [bytearray(pool) for pool in target.pools]
        for batch in batches:
            for x, y, size in batch.regions:
                expected[batch.dst][y : y + size] = source.pools[batch.src][x : x + size]
        notice = b"notice %d" % seed
        move = a.plane.read if reading else a.plane.write
        handle = move(b.name, batches, notice)
        settle(
            a,
            b,
            until=lambda handle=handle, notice=notice: (
                Done(handle) in a.events and Notified(a.name, notice) in b.events
            ),
        )
        assert target.pools == expected
        for pool in source.pools:  # other values for the next round
            pool[:] = random.Random(seed + 100).randbytes(len(pool))
    assert sum(isinstance(e, Notified) for e in b.events) == 8
    assert sum(isinstance(e, Done) for e in a.events) == 8
    assert not any(isinstance(e, Failed | Over | Disconnected) for e in a.events + b.events)


def test_without_regions_a_write_is_its_notice(ends):
    a, b = ends
    handle = a.plane.write(b.name, [Batch(0, 0, [])], b"hello")
    quiet = a.plane.write(b.name, [])
    settle(a, b, until=lambda: Notified(a.name, b"hello") in b.events)
    settle(a, b, until=lambda: {Done(handle), Done(quiet)} <= set(a.events))


def test_what_is_not_registered_cannot_be_touched(ends):
    a, b = ends
    before = [bytes(pool) for pool in b.pools]
    for region in [(0, SIZES[1] - 1, 2), (0, -1, 1)]:
        with pytest.raises(PeerError, match="outside the peer's memory"):
            a.plane.write(b.name, [Batch(0, 1, [region])])
    for batch in [Batch(0, 0, [(SIZES[0], 0, 1)]), Batch(2, 0, [(0, 0, 1)])]:
        with pytest.raises(InvariantError, match="outside our own memory"):
            a.plane.write(b.name, [batch])
    with pytest.raises(PeerError, match="outside the peer's memory"):
        a.plane.read(b.name, [Batch(0, 0, [(SIZES[0], 0, 1)])])
    with pytest.raises(InvariantError, match="a region of 0 bytes"):
        a.plane.write(b.name, [Batch(0, 0, [(0, 0, 0)])])
    assert [bytes(pool) for pool in b.pools] == before


def test_a_peers_pools_are_known_when_it_is_connected(ends):
    a, b = ends
    assert [(m.num_bytes, m.page_bytes) for m in a.plane.memories(b.name)] == [
        (size, PAGE) for size in SIZES
    ]
    with pytest.raises(PeerError, match="not connected to nobody"):
        a.plane.memories("nobody")


def test_a_fence_closes_both_ways_until_somebody_connects_again(ends):
    a, b = ends
    b.plane.fence(a.name)
    settle(b, until=lambda: Fenced(a.name) in b.events)
    with pytest.raises(PeerError, match="not connected"):
        b.plane.write(a.name, [], b"x")
    a.plane.fence(b.name)
    connected(a, b)
    handle = a.plane.write(b.name, [Batch(0, 0, [(0, PAGE, PAGE)])], b"again")
    settle(a, b, until=lambda: Done(handle) in a.events)
    settle(a, b, until=lambda: Notified(a.name, b"again") in b.events)
    assert b.pools[0][PAGE : 2 * PAGE] == a.pools[0][:PAGE]


def test_a_stranger_can_be_fenced(ends):
    a, _ = ends
    a.plane.fence("nobody")
    settle(a, until=lambda: Fenced("nobody") in a.events)


def test_a_plane_is_registered_once_and_closed_any_number_of_times(ends):
    a, b = ends
    with pytest.raises(ConfigError, match="register once"):
        a.plane.register([Memory.of(bytearray(PAGE), PAGE)])
    a.plane.close()
    a.plane.close()
    with pytest.raises(PeerError):
        a.plane.write(b.name, [], b"x")


def test_a_blob_of_another_kind_or_a_damaged_one_is_refused(ends):
    a, b = ends
    for i in range(0, len(b.blob), 7):
        with pytest.raises(PeerError, match="is damaged"):
            a.plane.connect(b.blob[:i] + bytes([b.blob[i] ^ 1]) + b.blob[i + 1 :])
    other = pack_blob(Blob(kind="pigeon", name="c", memories=()))
    with pytest.raises(PeerError, match="the peer's data plane is 'pigeon'"):
        a.plane.connect(other)
    assert a.plane.connect(b.blob) == b.name


@given(st.binary(max_size=80))
@settings(max_examples=60, deadline=None)
def test_no_blob_does_more_than_raise_a_peer_error(data):
    from hashlib import sha256

    for blob in (data, sha256(data).digest() + data):
        with pytest.raises(PeerError):
            unpack_blob(blob, "loopback")


# -- the loopback's faults -------------------------------------------------------------------------

ALL = [Batch(0, 0, [(i * PAGE, i * PAGE, PAGE) for i in range(16)])]


def test_bytes_arrive_region_by_region_after_the_delay():
    a, b = loopbacks(Faults(delay=(2, 2), regions_per_poll=5))
    before = bytes(b.pools[0])
    a.plane.write(b.name, ALL)
    arrived = []
    for _ in range(7):
        a.poll()
        arrived.append(
            sum(
                b.pools[0][i * PAGE : (i + 1) * PAGE] != before[i * PAGE : (i + 1) * PAGE]
                for i in range(16)
            )
        )
    assert arrived == [0, 0, 5, 10, 15, 16, 16]


def test_an_error_that_is_reported_proves_nothing():
    a, b = loopbacks(Faults(fail=1.0, regions_per_poll=1))
    handle = a.plane.write(b.name, ALL, b"done all the same")
    a.poll()
    assert a.events == [Failed(handle, "injected")]
    settle(a, b, until=lambda: Notified(a.name, b"done all the same") in b.events)
    assert a.events[-1] == Done(handle)
    assert b.pools[0] == a.pools[0]


def test_a_cancelled_write_is_over_with_some_of_its_bytes_there():
    a, b = loopbacks(Faults(regions_per_poll=3))
    before = bytes(b.pools[0])
    handle = a.plane.write(b.name, ALL, b"never")
    a.poll()
    a.plane.cancel(handle)
    a.poll()
    assert a.events == [Over(handle, True)]
    a.poll()
    b.poll()
    assert b.pools[0] == a.pools[0][: 3 * PAGE] + before[3 * PAGE :]
    assert not b.events


def test_notices_are_lost_or_come_twice_but_bytes_do_not_care():
    for faults, times in ((Faults(lose=1.0), 0), (Faults(repeat=1.0), 2)):
        a, b = loopbacks(faults)
        a.plane.write(b.name, ALL, b"x")
        a.poll()
        b.poll()
        assert b.events == [Notified(a.name, b"x")] * times
        assert b.pools[0] == a.pools[0]


def test_a_killed_peer_ends_what_is_written_to_it():
    a, b = loopbacks(Faults(delay=(3, 3)))
    handle = a.plane.write(b.name, ALL, b"x")
    a.plane.network.kill(b.name)
    a.poll()
    assert a.events == [
        Failed(handle, "b is gone"),
        Over(handle, True),
        Disconnected(b.name, "b is gone"),
    ]
    with pytest.raises(PeerError, match="not connected to b"):
        a.plane.write(b.name, ALL)
    with pytest.raises(PeerError, match="b cannot be reached"):
        a.plane.connect(b.blob)


def test_a_probe_finds_a_killed_peer():
    a, b = loopbacks()
    a.plane.probe(b.name)
    a.poll()
    assert not a.events
    a.plane.network.kill(b.name)
    a.plane.probe(b.name)
    a.poll()
    assert a.events == [Disconnected(b.name, "b is gone")]


def test_a_dead_writers_bytes_land_until_they_are_fenced():
    a, b = loopbacks(Faults(regions_per_poll=4))
    before, source = bytes(b.pools[0]), bytes(a.pools[0])
    a.plane.write(b.name, ALL, b"x")
    a.plane.network.kill(a.name)
    a.pools[0][:] = bytes(SIZES[0])  # what has left does not change with a dead worker's memory
    b.poll()
    assert b.pools[0] == source[: 4 * PAGE] + before[4 * PAGE :]
    b.plane.fence(a.name)
    for _ in range(5):
        b.poll()
    assert b.pools[0] == source[: 4 * PAGE] + before[4 * PAGE :]
    assert b.events == [Fenced(a.name)]


def test_a_fence_ends_a_living_writers_copies_and_tells_it():
    a, b = loopbacks(Faults(regions_per_poll=4))
    handle = a.plane.write(b.name, ALL, b"x")
    b.plane.fence(a.name)
    a.poll()
    reason = "b closed the data plane"
    assert a.events == [Failed(handle, reason), Over(handle, True), Disconnected(b.name, reason)]


def test_a_name_is_taken_once():
    network = Network()
    Loopback(network, "a")
    with pytest.raises(ConfigError, match="a worker is called 'a' already"):
        Loopback(network, "a")


def test_only_memory_of_the_cpu_is_reached():
    with pytest.raises(ConfigError, match="memory of the CPU alone"):
        Loopback(Network(), "a").register(
            [Memory(address=1, num_bytes=PAGE, page_bytes=PAGE, device=0)]
        )


def test_what_lies_outside_is_named_in_bytes():
    pools = [Memory(address=0, num_bytes=10, page_bytes=5)]
    check_batches([Batch(0, 0, [(0, 5, 5)])], pools, pools)
    with pytest.raises(PeerError, match=r"bytes \[5, 11\) of 10 in pool 0"):
        check_batches([Batch(0, 0, [(0, 5, 6)])], pools, pools)
