"""What both session machines share: events in, actions out, and the story when a law breaks.

A session is one attempt at one hand-off, named by the decode worker's engine id and an epoch. Its
two machines, Sender (prefill worker) and Receiver (decode worker), have no threads, sockets or
clocks: `handle(event)` takes messages of the other side, news of the worker they run in, and
seconds that have passed, and answers with what the worker must do.

Law: what another worker says never raises: what does not fit is dropped and counted. An event of
our own worker that does not fit raises InvariantError with the story and changes nothing. Both
machines give their pages back exactly once, by a Release, and never while a write may touch them:

    the sender    reads its pages until each write it posted was done, or over
    the receiver  has its pages written by another worker, and gives them back on proof alone:
                    all that was asked for has landed; or
                    the sender's last word, with nothing left in flight ("clean"); or
                    that word unclean, or the sender's process is gone: and then the data plane
                    to that worker is closed ("fenced"), so that nothing can land any more

A time-out, an error, a disconnect or silence is none of these. What a request does next never
waits for its old pages: GiveUp comes at once, Release when it is safe.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

import msgspec

from tandemkv.base.errors import InvariantError
from tandemkv.base.logprobs import TokenLogprobs
from tandemkv.transfer.wire import (
    AnyMessage,
    Ask,
    FirstToken,
    GroupSpans,
    Lost,
    SessionMessage,
)

STORY_LENGTH = 24

LATE = "late"
"""Counted: a word that came after the end, or of a part that is over."""
UNFIT = "unfit"
"""Counted: a word that does not fit what was asked for; the session ends by it."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds, measured by ticks on the side that waits; no host's clock is compared.

    lease_s: a sender stops after so long without a word. resend_s: an unanswered message is sent
    again. patience_s: a receiver gives up after so long without a word, which must outlast a
    prefill step of the other side. draft_wait_s: a request that lacks only draft rows waits so
    long for them. linger_s: rows that are later than that are still taken for so long.
    """

    lease_s: float = 30.0
    resend_s: float = 1.0
    patience_s: float = 30.0
    draft_wait_s: float = 0.2
    linger_s: float = 10.0


# -- events: of our own worker ---------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True):
    """Base of what the own worker reports. Messages of the other side are events as they are."""


class Tick(Event, frozen=True):
    """So many seconds have passed since the last one."""

    elapsed_s: float


class Abort(Event, frozen=True):
    """Our own worker wants it to end: the client went, computing failed, we shut down."""

    reason: str


class PeerLost(Event, frozen=True):
    """The other worker cannot be reached, or its data plane broke. Proves nothing."""

    reason: str


class PeerDead(Event, frozen=True):
    """The other worker's process is known to be gone: it posts nothing any more."""

    reason: str


class Admit(Event, frozen=True):
    """Sender: the ask is taken on. num_parts: rank pairs that each chunk's bytes go between."""

    num_parts: int = 1


class Computed(Event, frozen=True):
    """Sender: these rows are final, of all ranks. last: no more will be."""

    groups: tuple[GroupSpans, ...]
    last: bool = False


class Sampled(Event, frozen=True):
    """Sender: the first token."""

    token: int
    num_rows: int
    seed: int
    cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None


class Withheld(Event, frozen=True):
    """Sender: draft slots that will not be shipped, and why."""

    groups: tuple[GroupSpans, ...]
    reason: str


class WriteDone(Event, frozen=True):
    """Sender: all bytes of a part of a chunk are in the receiver's memory."""

    index: int
    part: int = 0


class WriteFailed(Event, frozen=True):
    """Sender: an error was reported for a part. It may still be under way."""

    index: int
    reason: str
    part: int = 0


class WriteOver(Event, frozen=True):
    """Sender: a part has ended without being done: it reads our pages no more.

    clean: and nothing of it will land any more either.
    """

    index: int
    part: int = 0
    clean: bool = True


class Fenced(Event, frozen=True):
    """Receiver: the data plane to the other worker is closed; nothing of it can land."""


# -- actions ---------------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True):
    """Base of what the worker must do, in order."""


class Send(Action, frozen=True):
    message: AnyMessage


class Start(Action, frozen=True):
    """Sender: somebody asks. Answer with Admit, or Abort."""

    ask: Ask


class Post(Action, frozen=True):
    """Sender: write these slots, all parts, each with a Chunk as its notice; report each part."""

    index: int
    groups: tuple[GroupSpans, ...]
    num_parts: int


class Recall(Action, frozen=True):
    """Sender: nobody waits for this chunk; cancel it if that is possible, report it as ever."""

    index: int


class Stop(Action, frozen=True):
    """Sender: stop computing for this session. What is on its way is taken as late."""

    reason: str


class Cover(Action, frozen=True):
    """Receiver: these slots hold the sender's rows."""

    groups: tuple[GroupSpans, ...]


class Ready(Action, frozen=True):
    """Receiver: the request goes on. missing: asked for, not here; lost: known not to come."""

    first: FirstToken
    missing: tuple[GroupSpans, ...]
    lost: tuple[Lost, ...]


class GiveUp(Action, frozen=True):
    """Receiver: the request must go on elsewhere, on other pages."""

    reason: str


class Fence(Action, frozen=True):
    """Receiver: close the data plane to the other worker, then report Fenced."""


class Release(Action, frozen=True):
    """The pages are no longer pinned by this session."""


# -- the machines' common part ---------------------------------------------------------------------

State = TypeVar("State", bound=StrEnum)
Cause = TypeVar("Cause", bound=StrEnum)


class Dropped:
    """What was dropped, by reason and kind of message."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def count(self, reason: str, message: object) -> None:
        self.counts[reason, type(message).__name__] += 1

    def total(self, reason: str) -> int:
        return sum(n for (why, _), n in self.counts.items() if why == reason)


class Story:
    """The last events of one session, for the error that somebody will have to understand."""

    __slots__ = ("events", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: deque[str] = deque(maxlen=STORY_LENGTH)

    def note(self, event: object, state: object) -> None:
        self.events.append(f"{_short(event)} -> {state}")

    def error(self, what: str) -> InvariantError:
        return InvariantError(f"{self.name}: {what}; story: {', '.join(self.events) or 'none'}")

    def follow(
        self, table: Mapping[tuple[State, Cause], State], state: State, cause: Cause
    ) -> State:
        """The state after, or an InvariantError that tells the story."""
        after = table.get((state, cause))
        if after is None:
            raise self.error(f"{cause} is illegal when {state}")
        return after


def _short(event: object) -> str:
    text = type(event).__name__
    index = getattr(event, "index", None)
    reason = getattr(event, "reason", "")
    return text + (f" {index}" if index is not None else "") + (f" ({reason})" if reason else "")


SessionEvent = Event | SessionMessage
