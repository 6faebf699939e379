"""A data plane within one process: the promises of transport.py, and faults on demand.

Law: bytes move in `poll` alone, region by region, so every half-done state can be seen. What
`Faults` does is what real data planes do: writes take time, fail and land all the same, notices
are lost or come twice. A killed worker's writes that have begun may land until they are fenced.
Safe between threads. This module knows no GPU memory and no other process.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from threading import RLock

import msgspec

from tandemkv.base.errors import ConfigError, InvariantError, PeerError
from tandemkv.transfer.transport import (
    CPU,
    Batch,
    Blob,
    DataEvent,
    Disconnected,
    Done,
    Failed,
    Fenced,
    Handle,
    Memory,
    Notified,
    Over,
    PeerName,
    check_batches,
    pack_blob,
    unpack_blob,
)

KIND = "loopback"


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """How badly a data plane behaves; by default it does not.

    delay: polls before a write begins, at least and at most. regions_per_poll: 0 for all at once.
    fail: probability that an error is reported of a write, which goes on. lose, repeat: of a
    notice.
    """

    seed: int = 0
    delay: tuple[int, int] = (0, 0)
    regions_per_poll: int = 0
    fail: float = 0.0
    lose: float = 0.0
    repeat: float = 0.0


class _Copy:
    """A write or read under way."""

    __slots__ = (
        "cancelled",
        "delay",
        "fails",
        "handle",
        "notice",
        "owner",
        "peer",
        "reading",
        "reported",
        "todo",
    )

    def __init__(
        self,
        handle: Handle,
        owner: Loopback,
        peer: PeerName,
        todo: Iterator[tuple[memoryview, memoryview]],
        notice: bytes,
        reading: bool,
    ) -> None:
        self.handle = handle
        self.owner = owner
        self.peer = peer
        self.todo = todo
        self.notice = notice
        self.reading = reading
        self.delay = owner.rng.randint(*owner.faults.delay)
        self.fails = owner.rng.random() < owner.faults.fail
        self.reported = False
        self.cancelled = False

    def keep_what_has_left(self) -> None:
        """The owner is gone: what its write carries does not depend on its memory any more."""
        self.todo = iter([(dst, memoryview(bytes(src))) for dst, src in self.todo])


class Network:
    """What connects the loopbacks of one process."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.workers: dict[PeerName, Loopback] = {}
        self.copies: list[_Copy] = []
        self.links: set[tuple[PeerName, PeerName]] = set()

    def kill(self, name: str) -> None:
        """The worker is gone at once, as a process that is killed."""
        with self.lock:
            gone = self.workers.pop(PeerName(name), None)
            if gone is None:
                return
            gone.dead = True
            self.copies = [c for c in self.copies if c.owner is not gone or not c.reading]
            for copy in list(self.copies):
                if copy.owner is gone:
                    copy.keep_what_has_left()
                elif copy.peer == gone.name:
                    self.break_off(copy, f"{gone.name} is gone")

    def break_off(self, copy: _Copy, reason: str) -> None:
        """A copy ends: its owner hears of it, and that the peer cannot be reached."""
        self.copies.remove(copy)
        if not copy.reported:
            copy.owner.events.append(Failed(copy.handle, reason))
        copy.owner.events.append(Over(copy.handle, True))
        self.unlink(copy.owner, copy.peer, reason)

    def unlink(self, owner: Loopback, peer: PeerName, reason: str) -> None:
        if (owner.name, peer) in self.links:
            self.links.discard((owner.name, peer))
            owner.events.append(Disconnected(peer, reason))

    def advance(self, copy: _Copy) -> None:
        """One poll's progress of a copy."""
        faults, rng = copy.owner.faults, copy.owner.rng
        if copy.cancelled:
            self.copies.remove(copy)
            copy.owner.events.append(Over(copy.handle, True))
            return
        if copy.delay > 0:
            copy.delay -= 1
            return
        if copy.fails and not copy.reported:
            copy.reported = True
            copy.owner.events.append(Failed(copy.handle, "injected"))
        for count, (dst, src) in enumerate(copy.todo, 1):
            dst[:] = src
            if count == faults.regions_per_poll:
                return
        self.copies.remove(copy)
        copy.owner.events.append(Done(copy.handle))
        target = self.workers.get(copy.peer)
        if target and copy.notice and rng.random() >= faults.lose:
            times = 2 if rng.random() < faults.repeat else 1
            target.events += [Notified(copy.owner.name, copy.notice)] * times


class Loopback:
    """The data plane of one worker. A Transport."""

    kind = KIND

    def __init__(self, network: Network, name: str, faults: Faults | None = None) -> None:
        self.network = network
        self.name = PeerName(name)
        self.faults = faults or Faults()
        self.rng = random.Random(self.faults.seed)
        self.events: list[DataEvent] = []
        self.pools: tuple[Memory, ...] = ()
        self.views: tuple[memoryview, ...] = ()
        self.dead = False
        self._num_handles = 0
        with network.lock:
            if self.name in network.workers:
                raise ConfigError(f"loopback: a worker is called {name!r} already")
            network.workers[self.name] = self

    def register(self, memories: Sequence[Memory]) -> bytes:
        if self.pools or any(memory.device != CPU for memory in memories):
            raise ConfigError("loopback: register once, and memory of the CPU alone")
        self.pools = tuple(memories)
        self.views = tuple(
            memoryview((ctypes.c_ubyte * m.num_bytes).from_address(m.address)).cast("B")
            for m in memories
        )
        return pack_blob(Blob(kind=KIND, name=self.name, memories=self.pools))

    def connect(self, blob: bytes) -> PeerName:
        peer = unpack_blob(blob, KIND).name
        with self.network.lock:
            if peer not in self.network.workers:
                raise PeerError(f"loopback: {peer} cannot be reached")
            self.network.links.add((self.name, peer))
        return peer

    def memories(self, peer: PeerName) -> tuple[Memory, ...]:
        return self._peer(peer).pools

    def write(self, peer: PeerName, batches: Sequence[Batch], notice: bytes = b"") -> Handle:
        with self.network.lock:
            there = self._peer(peer)
            check_batches(batches, self.pools, there.pools)
            pairs = [(b, self.views[b.src], there.views[b.dst]) for b in batches if b.regions]
            return self._begin(peer, pairs, notice, reading=False)

    def read(self, peer: PeerName, batches: Sequence[Batch], notice: bytes = b"") -> Handle:
        with self.network.lock:
            there = self._peer(peer)
            check_batches(batches, self.pools, there.pools, reading=True)
            pairs = [(b, there.views[b.src], self.views[b.dst]) for b in batches if b.regions]
            return self._begin(peer, pairs, notice, reading=True)

    def probe(self, peer: PeerName) -> None:
        with self.network.lock:
            if peer not in self.network.workers:
                self.network.unlink(self, peer, f"{peer} is gone")

    def poll(self) -> list[DataEvent]:
        with self.network.lock:
            for copy in list(self.network.copies):
                strays = copy.peer == self.name and copy.owner.dead
                if copy.owner is self or strays:
                    self.network.advance(copy)
            events, self.events = self.events, []
            return events

    def cancel(self, handle: Handle) -> None:
        with self.network.lock:
            for copy in self._mine():
                copy.cancelled = copy.cancelled or copy.handle == handle

    def fence(self, peer: PeerName) -> None:
        with self.network.lock:
            there = self.network.workers.get(peer)
            for copy in list(self.network.copies):
                if {copy.owner.name, copy.peer} == {self.name, peer}:
                    self.network.break_off(copy, f"{self.name} closed the data plane")
            if there is not None:
                self.network.unlink(there, self.name, f"{self.name} closed the data plane")
            self.network.links.discard((self.name, peer))
            self.events.append(Fenced(peer))

    def close(self) -> None:
        with self.network.lock:
            self.network.copies = [c for c in self.network.copies if c.owner is not self]
            self.network.links = {link for link in self.network.links if self.name not in link}
            self.network.kill(self.name)
            self.views = ()

    def check(self) -> None:
        with self.network.lock:
            handles = [copy.handle for copy in self._mine()]
            if len(set(handles)) < len(handles) or any(h >= self._num_handles for h in handles):
                raise InvariantError(f"loopback {self.name}: handles {handles}")
            if any((self.name, copy.peer) not in self.network.links for copy in self._mine()):
                raise InvariantError(f"loopback {self.name}: a copy without a connection")

    def _mine(self) -> list[_Copy]:
        return [copy for copy in self.network.copies if copy.owner is self]

    def _peer(self, peer: PeerName) -> Loopback:
        there = self.network.workers.get(peer)
        if there is None or (self.name, peer) not in self.network.links:
            raise PeerError(f"loopback: not connected to {peer}")
        return there

    def _begin(
        self,
        peer: PeerName,
        pairs: list[tuple[Batch, memoryview, memoryview]],
        notice: bytes,
        *,
        reading: bool,
    ) -> Handle:
        handle = Handle(self._num_handles)
        self._num_handles += 1
        todo = (
            (dst[y : y + size], src[x : x + size])
            for batch, src, dst in pairs
            for x, y, size in batch.regions
        )
        self.network.copies.append(_Copy(handle, self, peer, todo, notice, reading))
        return handle
