"""What two workers say to each other: tagged unions in versioned, optionally signed frames.

Law: `decode` never raises, whatever the bytes: it answers with an Envelope, all of whose values
have been checked, or with Undecodable and the reason. Nothing is unpickled. Every message about a
session carries its epoch, every envelope both engine ids: a word of an old attempt, or meant for
an earlier incarnation of a worker, is known as such. This module keeps no state and sends nothing.

    frame      b"TK" | version | kind | HMAC-SHA256 of all else, if kind is 1 | msgpack
    handshake  Hello(offer) -> Welcome(offer) | Refused
    session    decode worker                    prefill worker
               Ask, Renew, Cancel, Bye   ->
                                         <-     Accept, FirstToken, Delivered, Failed, Cancelled
                                         <=     Chunk: rides on a write, arrives when its bytes did

Groups are named by their index in the *prefill* worker's layout (GroupPair.peer_index where the
decode worker matched the offers).
"""

from __future__ import annotations

import hmac
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from tandemkv.base.errors import ConfigError, InvariantError
from tandemkv.base.ids import NO_PAGE, PageId
from tandemkv.base.logprobs import TokenLogprobs
from tandemkv.base.sampling import SamplingParams
from tandemkv.base.spans import Span
from tandemkv.kv.keys import Namespace
from tandemkv.transfer.offer import Offer

VERSION = 1
MAX_BYTES = 16 * 2**20
MIN_SECRET_BYTES = 16
_MAGIC = b"TK" + bytes([VERSION])
_PLAIN, _SIGNED = b"\0", b"\1"
_HEADER_BYTES = len(_MAGIC) + 1
_MAC_BYTES = 32

Count = Annotated[int, Meta(ge=0, lt=2**48)]
Epoch = Annotated[int, Meta(ge=1, lt=2**62)]
Token = Annotated[int, Meta(ge=0, lt=2**32)]
Part = Annotated[int, Meta(ge=0, lt=2**16)]
Name = Annotated[str, Meta(max_length=512)]


# -- pieces of messages ----------------------------------------------------------------------------


class GroupSpans(msgspec.Struct, frozen=True, array_like=True):
    """Slots of one layer group: sorted, disjoint, non-empty half-open spans."""

    group: Count
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        _check_spans(self.spans)


class GroupAsk(msgspec.Struct, frozen=True, array_like=True):
    """Slots wanted of one group, and the pages to write them to.

    pages: the asking side's page table from index `first_page` on, in its own page size; NO_PAGE
    where it holds nothing.
    """

    group: Count
    spans: tuple[Span, ...]
    first_page: Count
    pages: tuple[Annotated[int, Meta(ge=NO_PAGE, lt=2**32)], ...]

    def __post_init__(self) -> None:
        _check_spans(self.spans)

    @property
    def table(self) -> list[PageId]:
        """The page table from index 0 on."""
        return [NO_PAGE] * self.first_page + [PageId(page) for page in self.pages]


class ChunkNote(msgspec.Struct, frozen=True, array_like=True):
    """A chunk that was delivered on all ranks."""

    index: Count
    groups: tuple[GroupSpans, ...]


class Lost(msgspec.Struct, frozen=True, array_like=True):
    """Slots of draft groups that will not come, and why."""

    groups: tuple[GroupSpans, ...]
    reason: str


def _check_spans(spans: tuple[Span, ...]) -> None:
    if any(not 0 <= start < stop < 2**32 for start, stop in spans):
        raise ValueError("spans must be non-empty and not negative")
    if any(b[0] <= a[1] for a, b in pairwise(spans)):
        raise ValueError("spans must be sorted and must not touch")


# -- messages --------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of everything that is said."""


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """First contact: what I have. Answered by Welcome or Refused."""

    offer: Offer


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    offer: Offer


class Refused(Message, frozen=True, kw_only=True, tag=True):
    """We do not fit: the field, the speaker's value, the listener's value."""

    field: Name
    mine: str
    theirs: str


class SessionMessage(Message, frozen=True, kw_only=True, tag=True):
    """epoch: counted by the decode worker, one per attempt, never used twice by one engine id."""

    epoch: Epoch


class Ask(SessionMessage, frozen=True, kw_only=True, tag=True):
    """Compute this prompt and write these slots into my pages. Grants the pages until it is closed.

    oldest: the lowest epoch the asking side has open; lower ones are over and may be forgotten.
    tokens: all known tokens, the last num_output of them generated before. seed: of sampling.
    parked: id of a prefill that was done ahead and is held for this request, "" if none.
    """

    request_id: Name
    oldest: Epoch
    tokens: tuple[Token, ...]
    params: SamplingParams
    seed: int
    groups: tuple[GroupAsk, ...]
    namespace: Namespace = Namespace()
    num_output: Count = 0
    priority: int = 0
    parked: Name = ""

    def __post_init__(self) -> None:
        if len({g.group for g in self.groups}) < len(self.groups):
            raise ValueError("a group is asked for twice")
        if not self.num_output <= len(self.tokens) or not self.tokens:
            raise ValueError("tokens must not be empty, nor fewer than num_output")
        if self.oldest > self.epoch:
            raise ValueError("oldest is above epoch")
        n = len(self.tokens)
        for ask in self.groups:
            if max(ask.first_page, len(ask.pages), *(stop for _, stop in ask.spans)) > n:
                raise ValueError("slots or pages beyond the tokens")

    @property
    def wanted(self) -> tuple[GroupSpans, ...]:
        """The slots alone."""
        return tuple(GroupSpans(ask.group, ask.spans) for ask in self.groups)


class Renew(SessionMessage, frozen=True, kw_only=True, tag=True):
    """I still want this; answered by Delivered."""


class Cancel(SessionMessage, frozen=True, kw_only=True, tag=True):
    """Stop; say Cancelled when nothing is in flight any more. Repeated until answered."""

    reason: str = ""


class Bye(SessionMessage, frozen=True, kw_only=True, tag=True):
    """I need nothing more of this session."""


class Accept(SessionMessage, frozen=True, kw_only=True, tag=True):
    """I will do it. lease_s: a duration; without a word from you for so long I stop."""

    lease_s: Annotated[float, Meta(gt=0, le=86400)]


class Chunk(SessionMessage, frozen=True, kw_only=True, tag=True):
    """These slots have been written; one such notice comes for each of num_parts rank pairs.

    num_bytes: as written, of each of `groups`, for whoever counts; decides nothing.
    """

    index: Count
    groups: tuple[GroupSpans, ...]
    num_bytes: tuple[Count, ...] = ()
    part: Part = 0
    num_parts: Annotated[int, Meta(ge=1, le=2**16)] = 1


class FirstToken(SessionMessage, frozen=True, kw_only=True, tag=True):
    """The token after `num_rows` tokens: the anchor. cached_tokens: reused by the prefill side."""

    token: Token
    num_rows: Count
    seed: int
    cached_tokens: Count = 0
    logprobs: TokenLogprobs | None = None


class Delivered(SessionMessage, frozen=True, kw_only=True, tag=True):
    """What has been delivered so far, on all ranks. final: nothing more will be written.

    clean: (when final) nothing is in flight either; if not, what failed may still land until the
    listener closes the data plane to the speaker.
    """

    chunks: tuple[ChunkNote, ...] = ()
    lost: tuple[Lost, ...] = ()
    final: bool = False
    clean: bool = False


class Failed(SessionMessage, frozen=True, kw_only=True, tag=True):
    """I give up, and why. Says nothing about writes in flight: Cancelled will."""

    reason: str


class Cancelled(SessionMessage, frozen=True, kw_only=True, tag=True):
    """The last word of a session that did not end well: nothing more will be written.

    clean: as in Delivered. chunks: what was delivered all the same.
    """

    clean: bool
    reason: str = ""
    chunks: tuple[ChunkNote, ...] = ()


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | Ask
    | Renew
    | Cancel
    | Bye
    | Accept
    | Chunk
    | FirstToken
    | Delivered
    | Failed
    | Cancelled
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message with who says it to whom: engine ids, new with each incarnation of a worker."""

    source: Name
    target: Name
    message: AnyMessage


class Undecodable(msgspec.Struct, frozen=True):
    """Bytes that are no message; dropped and counted by `reason`."""

    reason: str


# -- frames ----------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


def check_secret(secret: bytes) -> None:
    """ConfigError for a shared secret that is too short to keep anyone out."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"transfer secret has {len(secret)} bytes; give at least {MIN_SECRET_BYTES}"
        )


def encode(message: AnyMessage, *, source: str, target: str, secret: bytes | None = None) -> bytes:
    """A frame. secret: the deployment's, None on loopback. InvariantError beyond MAX_BYTES."""
    body = _ENCODER.encode(Envelope(source, target, message))
    if secret is None:
        frame = _MAGIC + _PLAIN + body
    else:
        header = _MAGIC + _SIGNED
        frame = header + _mac(secret, header, body) + body
    if len(frame) > MAX_BYTES:
        raise InvariantError(
            f"a {type(message).__name__} of {len(frame)} bytes; frames have at most {MAX_BYTES}"
        )
    return frame


def decode(data: bytes, secret: bytes | None = None) -> Envelope | Undecodable:
    """The frame's message, or why there is none. Reasons are few and constant: metric labels."""
    if len(data) > MAX_BYTES:
        return Undecodable("too long")
    header = data[:_HEADER_BYTES]
    if len(header) < _HEADER_BYTES or header[:2] != _MAGIC[:2]:
        return Undecodable("not a frame")
    if header[:3] != _MAGIC:
        return Undecodable("other version")
    body = data[_HEADER_BYTES:]
    if secret is not None:
        mac, body = body[:_MAC_BYTES], body[_MAC_BYTES:]
        if header[3:] != _SIGNED or not hmac.compare_digest(mac, _mac(secret, header, body)):
            return Undecodable("not authentic")
    elif header[3:] != _PLAIN:
        return Undecodable("signed, but no secret is configured here")
    try:
        return _DECODER.decode(body)
    except Exception:  # a peer's bytes may break any validator; none of that may stop the worker
        return Undecodable("malformed")


def _mac(secret: bytes, header: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, header + body, "sha256")
