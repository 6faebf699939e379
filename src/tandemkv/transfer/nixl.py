"""The one door to NIXL (UCX): one-sided writes and reads between processes and machines.

A Transport as transport.py promises it; what is NIXL's own:

- No progress thread: it burns most of a core. Both sides make progress in `poll`, and the target
  of a first transfer must poll too, or that never completes. Between processes of one machine
  `write` may copy before it returns (with the GIL released).
- A descriptor costs microseconds whatever its size, so regions that adjoin on both sides are made
  one (`merged`), in whatever order their pages were given out. Where none does and each is a whole
  page, they go by index arrays into descriptor lists of all pages, prepared once for us and once
  per peer from base, stride and count; anything else goes as a list of regions.
- Memory of a GPU is that of one GPU, by its index in this process: the peer's index is the peer's
  own. NIXL and the CUDA driver know nothing of streams: whoever writes or reads has waited for the
  device before, on the thread that computes on it, whose CUDA context NIXL uses.
- A transfer in flight is never released to cancel it: that would say nothing about its bytes. It
  is waited for until it is done, or the peer is gone, or fenced.
- A damaged peer description would leave NIXL's agent unable to reach that peer ever again: blobs
  carry a digest. Agents get a name of their own with each start: NIXL knows peers by name.

Law: each transfer handle and descriptor list that NIXL gave is given back once. This module knows
no pages, no groups and no sessions.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import secrets
import sys
from array import array
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from tandemkv.base.errors import ConfigError, InvariantError, PeerError
from tandemkv.transfer.plan import Region
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

KIND = "nixl"
_MODULES = ("nixl_cu13._api", "nixl._api", "nixl_cu12._api")
_BACKEND = "UCX"
_LOCAL = "NIXL_INIT_AGENT"
_PROBE = b"\0"
_HUGE = 2 * 2**20
_UCX_SETTINGS = {"UCX_CMA_SEG_SIZE": "2m"}
"""UCX cuts what it copies between processes into calls of 512 KiB unless told otherwise; calls of
2 MiB took about 6 % less time on a quiet machine, and larger ones hardly less than that."""
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_FENCE_POLLS = 4
"""Polls after a connection was closed until what the kernel still held is known to be gone."""


def find_nixl() -> Any:
    """NIXL's Python module. ConfigError if there is none."""
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)
        return module
    raise ConfigError("transport nixl: NIXL is not installed; pip install 'tandemkv[nixl]'")


def prefer(environ: MutableMapping[str, str]) -> None:
    """Our UCX settings, where the operator has none. UCX reads them when an agent is made."""
    for name, value in _UCX_SETTINGS.items():
        environ.setdefault(name, value)


class _Peer:
    """pages: descriptor list of all its pages; connected: until something says otherwise."""

    __slots__ = ("connected", "memories", "pages")

    def __init__(self, memories: tuple[Memory, ...], pages: Any) -> None:
        self.memories = memories
        self.pages = pages
        self.connected = True


class _Transfer:
    __slots__ = ("peer", "xfer")

    def __init__(self, peer: PeerName, xfer: Any) -> None:
        self.peer = peer
        self.xfer = xfer


class Nixl:
    """The data plane of one rank of a worker. A Transport. ConfigError without NIXL or UCX."""

    kind = KIND

    def __init__(self, name: str) -> None:
        self._api = find_nixl()
        prefer(os.environ)
        self._numpy: Any = importlib.import_module("numpy")  # NIXL's own dependency
        self._lost: Any = self._api.nixlBind.nixlRemoteDisconnectError
        self.name = PeerName(f"{name}-{secrets.token_hex(4)}")
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
        self._agent: Any = self._api.nixl_agent(self.name, config)
        if _BACKEND not in self._agent.backends:
            raise ConfigError(f"transport nixl: this NIXL has no {_BACKEND} backend")
        self.pools: tuple[Memory, ...] = ()
        self._registered: Any = None
        self._pages: Any = None
        self._peers: dict[PeerName, _Peer] = {}
        self._open: dict[Handle, _Transfer] = {}
        self._events: list[DataEvent] = []
        self._fences: list[tuple[int, list[DataEvent]]] = []
        self._num_handles = 0
        self.closed = False

    # -- memory and peers --------------------------------------------------------------------------

    def register(self, memories: Sequence[Memory]) -> bytes:
        if self.pools or len({m.device for m in memories}) != 1:
            raise ConfigError(
                "transport nixl: register once, and memory of one device: the CPU's or one GPU's"
            )
        rows = [(m.address, m.num_bytes, _device_id(m), "") for m in memories]
        for memory in memories:
            if memory.device == CPU:
                _use_huge_pages(memory)
        try:
            self._registered = self._agent.register_memory(rows, _kind(memories))
            self._pages = self._prepare(_LOCAL, memories)
        except Exception as error:
            size = sum(m.num_bytes for m in memories) / 2**20
            raise ConfigError(f"transport nixl: cannot register {size:.0f} MiB: {error}") from error
        self.pools = tuple(memories)
        metadata = self._agent.get_agent_metadata()
        blob = Blob(kind=KIND, name=self.name, memories=self.pools, metadata=metadata)
        return pack_blob(blob)

    def connect(self, blob: bytes) -> PeerName:
        other = unpack_blob(blob, KIND)
        known = self._peers.get(other.name)
        if known is not None and known.connected:
            return other.name
        if other.name == self.name or not other.memories:
            raise PeerError(f"nixl: {other.name} is this worker, or has no memory")
        self._forget(other.name)
        try:
            loaded = self._agent.add_remote_agent(other.metadata)
            name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
            if name != other.name:
                self._agent.remove_remote_agent(name)
                raise PeerError(f"nixl: the blob of {other.name} describes {name}")
            pages = self._prepare(other.name, other.memories)
        except PeerError:
            raise
        except Exception as error:
            raise PeerError(f"nixl: cannot reach {other.name}: {error}") from error
        self._peers[other.name] = _Peer(other.memories, pages)
        return other.name

    def memories(self, peer: PeerName) -> tuple[Memory, ...]:
        return self._connected(peer).memories

    def _prepare(self, name: str, memories: Sequence[Memory]) -> Any:
        rows = [
            (m.address, m.page_bytes, _device_id(m), m.page_bytes, m.num_pages)
            for m in memories
            if m.num_pages
        ]
        table = self._numpy.array(rows, dtype=self._numpy.uint64)
        return self._agent.prep_xfer_dlist(name, table, _kind(memories)) if rows else None

    def _connected(self, peer: PeerName) -> _Peer:
        known = self._peers.get(peer)
        if known is None or not known.connected:
            raise PeerError(f"nixl: not connected to {peer}")
        return known

    def _forget(self, peer: PeerName) -> None:
        """Give back what a peer was known by; closes the connection on our side."""
        known = self._peers.pop(peer, None)
        if known is None:
            return
        if known.pages is not None:
            self._agent.release_dlist_handle(known.pages)
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:
            logging.getLogger(__name__).warning("nixl: removing %s: %s", peer, error)

    # -- transfers ---------------------------------------------------------------------------------

    def write(self, peer: PeerName, batches: Sequence[Batch], notice: bytes = b"") -> Handle:
        check_batches(batches, self.pools, self._connected(peer).memories)
        return self._begin("WRITE", peer, batches, notice)

    def read(self, peer: PeerName, batches: Sequence[Batch], notice: bytes = b"") -> Handle:
        check_batches(batches, self.pools, self._connected(peer).memories, reading=True)
        swapped = [Batch(b.dst, b.src, [(y, x, n) for x, y, n in b.regions]) for b in batches]
        return self._begin("READ", peer, swapped, notice)

    def _begin(
        self, operation: str, peer: PeerName, batches: Sequence[Batch], notice: bytes
    ) -> Handle:
        """batches: from here to there, whichever way the bytes go."""
        handle = Handle(self._num_handles)
        self._num_handles += 1
        batches = [Batch(b.src, b.dst, merged(b.regions)) for b in batches if b.regions]
        try:
            if not batches:
                if notice:
                    self._agent.send_notif(peer, notice)
                self._events.append(Done(handle))
                return handle
            xfer = self._make(operation, peer, batches, notice)
        except Exception as error:  # nothing has been posted
            self._fail(handle, peer, error, clean=True)
            return handle
        self._open[handle] = _Transfer(peer, xfer)
        self._step(handle, post=True)
        return handle

    def _make(self, operation: str, peer: PeerName, batches: Sequence[Batch], notice: bytes) -> Any:
        there = self._peers[peer]
        pages = _page_indices(batches, self.pools, there.memories)
        if pages is not None:
            return self._agent.make_prepped_xfer(
                operation, self._pages, pages[0], there.pages, pages[1], notice
            )
        sides = (self.pools, there.memories)
        ours, theirs = (self._descriptors(batches, i, side) for i, side in enumerate(sides))
        return self._agent.initialize_xfer(operation, ours, theirs, peer, notice)

    def _descriptors(self, batches: Sequence[Batch], side: int, pools: Sequence[Memory]) -> Any:
        """side: 0 ours, 1 the peer's."""
        table = self._numpy.array(_rows(batches, side, pools), dtype=self._numpy.uint64)
        return self._agent.get_xfer_descs(table, _kind(pools))

    def _step(self, handle: Handle, *, post: bool = False) -> None:
        """Post a transfer or look at one, and note what has become of it."""
        transfer = self._open[handle]
        look = self._agent.transfer if post else self._agent.check_xfer_state
        try:
            state = look(transfer.xfer)
            if state == "PROC":
                return
            failure = None if state == "DONE" else PeerError(f"nixl: transfer state {state}")
        except Exception as error:
            failure = error
        if not self._release(handle):
            return
        if failure is None:
            self._events.append(Done(handle))
        else:
            self._fail(handle, transfer.peer, failure, clean=False)

    def _release(self, handle: Handle) -> bool:
        """Give a transfer back; False if NIXL still needs it: try again at the next poll."""
        try:
            self._agent.release_xfer_handle(self._open[handle].xfer)
        except Exception as error:
            logging.getLogger(__name__).warning("nixl: releasing a transfer: %s", error)
            return False
        del self._open[handle]
        return True

    def _fail(self, handle: Handle, peer: PeerName, error: Exception, *, clean: bool) -> None:
        self._events += [Failed(handle, _words(error)), Over(handle, clean)]
        if isinstance(error, self._lost):
            self._disconnect(peer, error)

    def _disconnect(self, peer: PeerName, error: Exception) -> None:
        known = self._peers.get(peer)
        if known is not None and known.connected:
            known.connected = False
            self._events.append(Disconnected(peer, _words(error)))

    def probe(self, peer: PeerName) -> None:
        try:
            self._agent.send_notif(peer, _PROBE)
        except Exception as error:
            self._disconnect(peer, error)

    def poll(self) -> list[DataEvent]:
        for name, messages in self._agent.get_new_notifs().items():
            if name in self._peers:
                peer = PeerName(name)
                self._events += [Notified(peer, m) for m in messages if m != _PROBE]
        for handle in list(self._open):
            self._step(handle)
        waiting = [(polls - 1, events) for polls, events in self._fences]
        self._fences = [fence for fence in waiting if fence[0] > 0]
        for polls, events in waiting:
            self._events += events if polls <= 0 else []
        events, self._events = self._events, []
        return events

    def cancel(self, handle: Handle) -> None:
        """Nothing: see the module."""

    def fence(self, peer: PeerName) -> None:
        """Closes our side of the connection. What the peer had under way over a network ends by
        that; what copies within one machine is over when its process has said so, or is gone."""
        events: list[DataEvent] = []
        for handle in [h for h, transfer in self._open.items() if transfer.peer == peer]:
            self._release(handle)
            self._open.pop(handle, None)
            events += [Failed(handle, "fenced"), Over(handle, False)]
        self._forget(peer)
        self._fences.append((_FENCE_POLLS, [*events, Fenced(peer)]))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for handle in list(self._open):
            self._release(handle)
        self._open.clear()
        for peer in list(self._peers):
            self._forget(peer)
        if self._pages is not None:
            self._agent.release_dlist_handle(self._pages)
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._pages = self._registered = self._agent = None

    def check(self) -> None:
        strangers = [t.peer for t in self._open.values() if t.peer not in self._peers]
        if strangers or any(handle >= self._num_handles for handle in self._open):
            raise InvariantError(f"nixl {self.name}: transfers with {strangers}: not peers of ours")
        if self.closed and (self._open or self._peers):
            raise InvariantError(f"nixl {self.name}: closed with something open")


def merged(regions: Iterable[Region]) -> list[Region]:
    """The same bytes in the fewest regions: those that adjoin on both sides become one.

    Sorted by their offset in the source. A descriptor costs 7 to 11 microseconds, in which NVLink
    carries about 3 MB: no gain from smaller pieces comes near that.
    """
    out: list[Region] = []
    at = to = size = 0
    for x, y, num_bytes in sorted(regions):
        if size and x == at + size and y == to + size:
            size += num_bytes
            out[-1] = (at, to, size)
        else:
            at, to, size = x, y, num_bytes
            out.append((at, to, size))
    return out


def _rows(
    batches: Sequence[Batch], side: int, pools: Sequence[Memory]
) -> list[tuple[int, int, int]]:
    """A list of regions as NIXL wants it: (address, bytes, device id). side: 0 ours, 1 theirs."""
    rows: list[tuple[int, int, int]] = []
    for batch in batches:
        pool = pools[batch.dst if side else batch.src]
        base, device = pool.address, _device_id(pool)
        rows += [(base + region[side], region[2], device) for region in batch.regions]
    return rows


def _page_indices(
    batches: Sequence[Batch], ours: Sequence[Memory], theirs: Sequence[Memory]
) -> tuple[array[int], array[int]] | None:
    """Index arrays into both descriptor lists, if every region is one whole page on both sides."""
    here, there = array("i"), array("i")
    for batch in batches:
        src, dst = ours[batch.src], theirs[batch.dst]
        size = src.page_bytes
        if dst.page_bytes != size:
            return None
        base = sum(pool.num_pages for pool in ours[: batch.src])
        goal = sum(pool.num_pages for pool in theirs[: batch.dst])
        for x, y, num_bytes in batch.regions:
            if num_bytes != size or x % size or y % size:
                return None
            here.append(base + x // size)
            there.append(goal + y // size)
    return here, there


def _use_huge_pages(memory: Memory) -> None:
    """Best effort: Linux copies between processes by pinning each page, and with pages of 2 MiB
    that was 2 to 3 times as fast as with pages of 4 KiB. What the memory holds does not change."""
    start = -(-memory.address // _HUGE) * _HUGE
    size = memory.address + memory.num_bytes - start
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if size >= _HUGE and madvise is not None and sys.platform == "linux":
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(size - size % _HUGE), advice)


def _device_id(memory: Memory) -> int:
    """NIXL's: a GPU's index in the process that registered it, 0 for the CPU's memory."""
    return 0 if memory.device == CPU else memory.device


def _kind(memories: Sequence[Memory]) -> str:
    return "DRAM" if memories[0].device == CPU else "VRAM"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
