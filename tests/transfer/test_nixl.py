"""NIXL between real processes over CPU memory: real bytes, real notices, real deaths."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Iterator

import pytest
from nixl_worker import Worker, pattern

from tandemkv.base.errors import InvariantError, PeerError
from tandemkv.transfer.nixl import prefer
from tandemkv.transfer.transport import (
    Batch,
    DataEvent,
    Disconnected,
    Done,
    Failed,
    Fenced,
    Handle,
    Notified,
    Over,
)

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl", "nixl_cu12")),
    reason="NIXL is not installed: pip install 'tandemkv[nixl]'",
)

PAGE = 4096
POOLS = [(64, PAGE), (32, 512)]
BIG = [(2048, 16384)]  # more than a socket holds, so that a write stays in flight
ALL = 2048 * 16384
Start = Callable[..., Worker]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start(name, pools, seed, tls) -> a worker process; tls chooses how UCX moves bytes."""
    workers: list[Worker] = []

    def worker(
        name: str, pools: list[tuple[int, int]] = POOLS, seed: int = 0, tls: str = ""
    ) -> Worker:
        monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
        if tls:
            monkeypatch.setenv("UCX_TLS", tls)
        else:
            monkeypatch.delenv("UCX_TLS", raising=False)
        workers.append(Worker(name, pools, seed))
        return workers[-1]

    yield worker
    for one in workers:
        one.end()


def pair(
    start: Start, pools: list[tuple[int, int]] = POOLS, tls: str = ""
) -> tuple[Worker, Worker]:
    """A prefill and a decode worker that know each other."""
    prefill, decode = start("p", pools, 1, tls), start("d", pools, 2, tls)
    assert prefill.call("connect", decode.blob) == decode.name
    assert decode.call("connect", prefill.blob) == prefill.name
    return prefill, decode


def over(handle: Handle) -> Callable[[list[DataEvent]], bool]:
    return lambda events: any(isinstance(e, Over) and e.handle == handle for e in events)


def test_an_operators_own_ucx_setting_wins():
    ours: dict[str, str] = {}
    prefer(ours)
    assert ours == {"UCX_CMA_SEG_SIZE": "2m"}
    theirs = {"UCX_CMA_SEG_SIZE": "64k"}
    prefer(theirs)
    assert theirs == {"UCX_CMA_SEG_SIZE": "64k"}


WAYS = {
    "whole pages, by index": [
        Batch(0, 0, [(3 * PAGE, 60 * PAGE, PAGE), (9 * PAGE, 0, PAGE)]),
        Batch(1, 1, [(512, 1024, 512)]),
    ],
    "merged pages, as regions": [Batch(0, 0, [(2 * PAGE, 5 * PAGE, 7 * PAGE)])],
    "parts of pages, between pools": [
        Batch(0, 1, [(100, 7, 333), (PAGE - 1, 2000, 2)]),
        Batch(1, 0, [(0, 64 * PAGE - 512, 512)]),
    ],
}


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["default", "tcp"])
def test_every_byte_arrives_where_it_should_no_other_changes_and_notices_follow(start, tls):
    prefill, decode = pair(start, tls=tls)
    source = [pattern(number * size, 1 + i) for i, (number, size) in enumerate(POOLS)]
    expected = [bytearray(pattern(number * size, 2 + i)) for i, (number, size) in enumerate(POOLS)]
    for count, (name, batches) in enumerate(WAYS.items()):
        notice = name.encode()
        handle = prefill.call("write", decode.name, batches, notice)
        decode.wait_for(Notified(prefill.name, notice))
        for batch in batches:
            for x, y, size in batch.regions:
                expected[batch.dst][y : y + size] = source[batch.src][x : x + size]
        for i in range(len(POOLS)):
            assert decode.call("bytes_of", i) == expected[i], name
        prefill.wait_for(Done(handle))
        assert len([e for e in decode.events if isinstance(e, Notified)]) == count + 1
    for i in range(len(POOLS)):
        assert prefill.call("bytes_of", i) == source[i]


def test_a_worker_reads_from_one_that_does_nothing_but_poll(start):
    prefill, decode = pair(start)
    batch = Batch(0, 0, [(4 * PAGE, PAGE, 2 * PAGE), (0, 9 * PAGE + 5, 10)])
    handle = decode.call("read", prefill.name, [batch], b"read it")
    decode.wait_for(Done(handle))
    prefill.wait_for(Notified(decode.name, b"read it"))
    source, got = pattern(64 * PAGE, 1), decode.call("bytes_of", 0)
    assert got[PAGE : 3 * PAGE] == source[4 * PAGE : 6 * PAGE]
    assert got[9 * PAGE + 5 : 9 * PAGE + 15] == source[:10]


def test_a_notice_travels_alone_and_a_probe_is_not_one(start):
    prefill, decode = pair(start)
    prefill.call("probe", decode.name)
    handle = prefill.call("write", decode.name, [], b"hello")
    prefill.wait_for(Done(handle))
    assert decode.wait_for(Notified(prefill.name, b"hello")) == [Notified(prefill.name, b"hello")]


def test_a_killed_peer_is_noticed_by_a_probe_and_nothing_more_is_written_to_it(start):
    prefill, decode = pair(start)
    decode.kill()

    def gone(events: list[DataEvent]) -> bool:
        prefill.call("probe", decode.name)
        return any(isinstance(e, Disconnected) and e.peer == decode.name for e in events)

    prefill.wait(gone)
    with pytest.raises(PeerError, match="not connected to d-"):
        prefill.call("write", decode.name, WAYS["merged pages, as regions"], b"")


def test_a_write_to_a_killed_peer_fails_and_is_over_but_not_clean(start):
    prefill, decode = pair(start)
    handle = prefill.call("write", decode.name, WAYS["whole pages, by index"], b"first")
    prefill.wait_for(Done(handle))
    decode.kill()
    handle = prefill.call("write", decode.name, WAYS["whole pages, by index"], b"second")
    events = prefill.wait(over(handle))
    assert [type(e) for e in events[1:]][:2] == [Failed, Over]
    assert any(isinstance(e, Disconnected) for e in events)
    assert Done(handle) not in events


def test_a_peer_that_dies_with_a_write_in_flight_ends_it(start):
    prefill, decode = pair(start, BIG, tls="tcp")
    decode.signal(signal.SIGSTOP)
    handle = prefill.call("write", decode.name, [Batch(0, 0, [(0, 0, ALL)])], b"x")
    prefill.call("cancel", handle)
    assert prefill.call("news") == []  # cancelling proves nothing, and a stopped peer is not dead
    decode.signal(signal.SIGKILL)
    events = prefill.wait(over(handle))
    assert Over(handle, False) in events
    assert any(isinstance(e, Disconnected) for e in events)


def test_a_peer_that_only_stopped_gets_its_bytes_when_it_goes_on(start):
    prefill, decode = pair(start, BIG, tls="tcp")
    decode.signal(signal.SIGSTOP)
    handle = prefill.call("write", decode.name, [Batch(0, 0, [(0, 0, ALL)])], b"x")
    prefill.call("cancel", handle)
    decode.signal(signal.SIGCONT)
    decode.wait_for(Notified(prefill.name, b"x"))
    prefill.wait_for(Done(handle))
    assert decode.call("bytes_of", 0) == pattern(ALL, 1)


def test_a_fence_ends_what_a_stopped_peer_holds_up(start):
    prefill, decode = pair(start, BIG, tls="tcp")
    decode.signal(signal.SIGSTOP)
    handle = prefill.call("write", decode.name, [Batch(0, 0, [(0, 0, ALL)])], b"x")
    prefill.call("fence", decode.name)
    events = prefill.wait_for(Fenced(decode.name))
    assert events[-3:] == [Failed(handle, "fenced"), Over(handle, False), Fenced(decode.name)]
    with pytest.raises(PeerError, match="not connected"):
        prefill.call("write", decode.name, [], b"y")


def test_nothing_of_a_dead_writer_lands_after_the_fence(start):
    prefill, decode = pair(start, BIG, tls="tcp")
    decode.signal(signal.SIGSTOP)
    prefill.call("write", decode.name, [Batch(0, 0, [(0, 0, ALL)])], b"x")
    prefill.kill()
    decode.signal(signal.SIGCONT)
    decode.call("fence", prefill.name)
    decode.wait_for(Fenced(prefill.name))
    then = decode.call("bytes_of", 0)
    assert then != pattern(ALL, 1)
    for _ in range(300):
        decode.call("poll")
    assert decode.call("bytes_of", 0) == then
    assert decode.call("news") == []


def test_nothing_lands_after_a_fence_and_a_new_connection_works(start):
    prefill, decode = pair(start, tls="tcp")
    decode.call("fence", prefill.name)
    decode.wait_for(Fenced(prefill.name))
    assert decode.call("connect", prefill.blob) == prefill.name
    prefill.call("fence", decode.name)
    prefill.wait_for(Fenced(decode.name))
    assert prefill.call("connect", decode.blob) == decode.name
    handle = prefill.call("write", decode.name, [Batch(0, 0, [(0, PAGE, PAGE)])], b"again")
    decode.wait_for(Notified(prefill.name, b"again"))
    prefill.wait_for(Done(handle))
    assert decode.call("bytes_of", 0)[PAGE : 2 * PAGE] == pattern(64 * PAGE, 1)[:PAGE]


def test_a_worker_that_comes_back_is_another_peer(start):
    prefill, decode = pair(start)
    decode.kill()
    again = start("d", POOLS, 3)
    assert again.name != decode.name
    assert prefill.call("connect", again.blob) == again.name
    again.call("connect", prefill.blob)
    prefill.call("write", again.name, [Batch(0, 0, [(0, 0, PAGE)])], b"new")
    again.wait_for(Notified(prefill.name, b"new"))
    assert again.call("bytes_of", 0)[:PAGE] == pattern(64 * PAGE, 1)[:PAGE]


def test_what_is_no_blob_of_a_peer_is_refused_and_hurts_nobody(start):
    prefill, decode = start("p"), start("d")
    for bad in (b"", b"x" * 400, decode.blob[:-5], decode.blob[:60] + bytes(len(decode.blob) - 60)):
        with pytest.raises(PeerError, match="blob is damaged"):
            prefill.call("connect", bad)
    with pytest.raises(PeerError, match="is this worker"):
        prefill.call("connect", prefill.blob)
    assert prefill.call("connect", decode.blob) == decode.name
    assert prefill.call("connect", decode.blob) == decode.name


def test_memory_that_was_not_registered_is_out_of_reach(start):
    prefill, decode = pair(start)
    for region in [(0, 63 * PAGE + 1, PAGE), (0, -1, 10)]:
        with pytest.raises(PeerError, match="outside the peer's memory"):
            prefill.call("write", decode.name, [Batch(0, 0, [region])], b"")
    for batch in [Batch(0, 0, [(64 * PAGE, 0, 1)]), Batch(2, 0, [(0, 0, 1)])]:
        with pytest.raises(InvariantError, match="outside our own memory"):
            prefill.call("write", decode.name, [batch], b"")
    assert decode.call("bytes_of", 0) == pattern(64 * PAGE, 2)


def test_a_closed_door_gives_everything_back_and_the_other_side_lives_on(start):
    prefill, decode = pair(start)
    prefill.call("write", decode.name, [Batch(0, 0, [(0, 0, PAGE)])], b"last")
    decode.wait_for(Notified(prefill.name, b"last"))
    prefill.call("close")
    prefill.call("close")
    prefill.call("check")

    def gone(events: list[DataEvent]) -> bool:
        decode.call("probe", prefill.name)
        return any(isinstance(e, Disconnected) for e in events)

    decode.wait(gone)
    other = start("p2")
    assert decode.call("connect", other.blob) == other.name
