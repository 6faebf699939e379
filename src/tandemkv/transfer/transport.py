"""One-sided data planes: what loopback and NIXL have in common, and what they promise.

A worker registers its pools, hands a blob to its peers, and writes regions of its memory into
theirs (or reads theirs into its own) without their doing. Nothing happens outside calls: progress,
completions, notices and disconnects are all had from `poll`, on both sides.

Law: Done means that all bytes are in the other memory, and the notice comes after them. Failed
proves nothing: bytes may be missing, and may still land. Over comes for each handle that is not
Done, when our memory is no longer touched by it; its `clean` says that the other's is not either.
`cancel` hurries that and says nothing about bytes. After Fenced nothing that a peer has begun
lands here any more. No peer's bytes are unpickled, and a damaged blob reaches no vendor's parser.
This module moves nothing itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, NewType, Protocol

import msgspec
from msgspec import Meta

from tandemkv.base.errors import InvariantError, PeerError
from tandemkv.transfer.plan import Region

Handle = NewType("Handle", int)
"""A write or read, of one data plane."""
PeerName = NewType("PeerName", str)
"""What a data plane calls another worker; new with each incarnation."""

CPU = -1
_DIGEST_BYTES = 32

Address = Annotated[int, Meta(ge=0)]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: num_bytes from `address` on, in pages of page_bytes. device: CPU, or of a GPU."""

    address: Address
    num_bytes: Annotated[int, Meta(ge=1)]
    page_bytes: Annotated[int, Meta(ge=1)]
    device: int = CPU

    @property
    def num_pages(self) -> int:
        """Whole pages."""
        return self.num_bytes // self.page_bytes

    @staticmethod
    def of(buffer: bytearray | memoryview, page_bytes: int) -> Memory:
        """A writable buffer of this process. Who registers it must keep it alive."""
        view = memoryview(buffer).cast("B")
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return Memory(address=address, num_bytes=view.nbytes, page_bytes=page_bytes)


class Batch(msgspec.Struct, frozen=True):
    """Regions between two memories, by their index in what was registered.

    src: where bytes come from, dst: where they go; which of the two is ours says the call.
    regions: (offset in src, offset in dst, bytes), as plan.regions makes them.
    """

    src: int
    dst: int
    regions: Sequence[Region]


# -- events ----------------------------------------------------------------------------------------


class Done(msgspec.Struct, frozen=True):
    """All bytes have arrived."""

    handle: Handle


class Failed(msgspec.Struct, frozen=True):
    """Something went wrong; Over will follow."""

    handle: Handle
    reason: str


class Over(msgspec.Struct, frozen=True):
    """Not done, and over: our memory is no longer touched. clean: nor is the other's."""

    handle: Handle
    clean: bool


class Notified(msgspec.Struct, frozen=True):
    """A peer's write that carried this notice has arrived here."""

    peer: PeerName
    message: bytes


class Disconnected(msgspec.Struct, frozen=True):
    """A peer cannot be reached over this data plane. It may be dead, or not."""

    peer: PeerName
    reason: str


class Fenced(msgspec.Struct, frozen=True):
    """Nothing that this peer has begun will land here. Writing to it needs a new connect."""

    peer: PeerName


DataEvent = Done | Failed | Over | Notified | Disconnected | Fenced


class Transport(Protocol):
    """A data plane of one rank of a worker. Not for use by several threads at once."""

    kind: str
    name: PeerName

    def register(self, memories: Sequence[Memory]) -> bytes:
        """Open these pools to peers, once; the blob goes into the offer. The order is kept."""
        ...

    def connect(self, blob: bytes) -> PeerName:
        """Get ready to reach a peer's pools. PeerError if its blob is of no use; twice is once."""
        ...

    def memories(self, peer: PeerName) -> tuple[Memory, ...]:
        """The pools that a connected peer has registered."""
        ...

    def write(self, peer: PeerName, batches: Sequence[Batch], notice: bytes = b"") -> Handle:
        """Copy regions of our pools into the peer's; then give it the notice, if there is one.

        Without regions it is the notice alone. PeerError if the peer is not connected or a region
        is not in its pools, InvariantError if one is not in ours; nothing has begun then.
        """
        ...

    def read(self, peer: PeerName, batches: Sequence[Batch], notice: bytes = b"") -> Handle:
        """Copy regions of the peer's pools into ours; as `write` in all else."""
        ...

    def probe(self, peer: PeerName) -> None:
        """Find out by the next polls whether a connected peer can be reached: Disconnected."""
        ...

    def poll(self) -> list[DataEvent]:
        """Make progress, and say what has happened since the last time. Call it often."""
        ...

    def cancel(self, handle: Handle) -> None:
        """Nobody waits for this; Done or Over follows all the same. Unknown handles are ignored."""
        ...

    def fence(self, peer: PeerName) -> None:
        """Close everything with this peer, both ways. Fenced follows, also for a stranger."""
        ...

    def close(self) -> None:
        """Give everything back; nothing may be called afterwards. Twice is once."""
        ...

    def check(self) -> None:
        """Raise InvariantError unless the books agree."""
        ...


# -- blobs -----------------------------------------------------------------------------------------


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer needs to reach us: bases, sizes and strides; metadata is the vendor's own."""

    kind: str
    name: PeerName
    memories: tuple[Memory, ...]
    metadata: bytes = b""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Blob)


def pack_blob(blob: Blob) -> bytes:
    """With a digest before it: a damaged blob must not reach a parser that trusts it."""
    body = _ENCODER.encode(blob)
    return sha256(body).digest() + body


def unpack_blob(data: bytes, kind: str) -> Blob:
    """PeerError says what is wrong with it."""
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if sha256(body).digest() != digest:
        raise PeerError(f"{kind}: the peer's transport blob is damaged ({len(data)} bytes)")
    try:
        blob = _DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PeerError(f"{kind}: the peer's transport blob is malformed: {error}") from None
    if blob.kind != kind:
        raise PeerError(f"{kind}: the peer's data plane is {blob.kind!r}")
    return blob


# -- what may be touched ---------------------------------------------------------------------------


def check_batches(
    batches: Sequence[Batch],
    ours: Sequence[Memory],
    theirs: Sequence[Memory],
    *,
    reading: bool = False,
) -> None:
    """InvariantError for a region outside our pools, PeerError for one outside the peer's."""
    for batch in batches:
        if not batch.regions:
            continue
        columns = zip(*batch.regions, strict=True)
        src, dst, sizes = (list(column) for column in columns)
        if min(sizes) < 1:
            raise InvariantError(f"a region of {min(sizes)} bytes")
        here, there = (batch.dst, batch.src) if reading else (batch.src, batch.dst)
        at, to = (dst, src) if reading else (src, dst)
        if why := _outside(here, at, sizes, ours):
            raise InvariantError(f"regions outside our own memory: {why}")
        if why := _outside(there, to, sizes, theirs):
            raise PeerError(f"regions outside the peer's memory: {why}")


def _outside(index: int, offsets: list[int], sizes: list[int], pools: Sequence[Memory]) -> str:
    if not 0 <= index < len(pools):
        return f"pool {index} of {len(pools)}"
    stop = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
    if min(offsets) < 0 or stop > pools[index].num_bytes:
        return f"bytes [{min(offsets)}, {stop}) of {pools[index].num_bytes} in pool {index}"
    return ""
