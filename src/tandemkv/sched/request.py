"""A request, its life and its acceptance record.

    WAITING --admit--> RUNNING --finish--> FINISHED
       |                |   ^                 ^
       |            suspend resume            |
       |                v   |                 |
       +---abort---> SUSPENDED ----abort------+        (abort, fail: from all but the last)

    WAITING --hand over--> SUSPENDED     its prompt was computed elsewhere, its first token is known
    WAITING --finish-----> FINISHED      ... and was its last

Law: a request has a sequence if and only if it is RUNNING, and a hold only before; the states
change along TRANSITIONS and nowhere else; an illegal event raises with the request's story and
changes nothing. `drafts` are proposals for the present anchor and exist only while it decodes. This
module does not decide when anything happens.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from tandemkv.base.errors import InvariantError
from tandemkv.base.sampling import SamplingParams
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.keys import Namespace
from tandemkv.kv.records import DraftUse

if TYPE_CHECKING:
    from tandemkv.kv.sequence import Sequence
    from tandemkv.sched.batch import StepRecord

Watch = Callable[[Seq[int]], int | None]
"""Called once with each run of newly emitted tokens; when a stop string completed inside them,
returns how many of them to keep, else None."""

STORY_LENGTH = 16


class RequestState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    FINISHED = "finished"


class RequestEvent(StrEnum):
    ADMIT = "admit"
    SUSPEND = "suspend"
    RESUME = "resume"
    HAND_OVER = "hand_over"
    FINISH = "finish"
    ABORT = "abort"
    FAIL = "fail"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.WAITING, RequestEvent.ADMIT): RequestState.RUNNING,
    (RequestState.WAITING, RequestEvent.HAND_OVER): RequestState.SUSPENDED,
    (RequestState.WAITING, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.WAITING, RequestEvent.ABORT): RequestState.FINISHED,
    (RequestState.WAITING, RequestEvent.FAIL): RequestState.FINISHED,
    (RequestState.RUNNING, RequestEvent.SUSPEND): RequestState.SUSPENDED,
    (RequestState.RUNNING, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.RUNNING, RequestEvent.ABORT): RequestState.FINISHED,
    (RequestState.RUNNING, RequestEvent.FAIL): RequestState.FINISHED,
    (RequestState.SUSPENDED, RequestEvent.RESUME): RequestState.RUNNING,
    (RequestState.SUSPENDED, RequestEvent.ABORT): RequestState.FINISHED,
    (RequestState.SUSPENDED, RequestEvent.FAIL): RequestState.FINISHED,
}


@dataclass(slots=True, eq=False)
class Acceptance:
    """How a request's drafts fared; steps without a draft are not counted.

    accepted_at[j]: steps in which draft j was accepted. Counts verdicts, not emitted tokens: a
    stop inside an accepted run emits fewer.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    drafted_at: list[int] = field(default_factory=list[int])
    accepted_at: list[int] = field(default_factory=list[int])

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Count one verify step with num_drafts >= 1 drafts, num_accepted of them accepted."""
        missing = num_drafts - len(self.accepted_at)
        if missing > 0:
            self.accepted_at += [0] * missing
            self.drafted_at += [0] * missing
        self.num_steps += 1
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        for j in range(num_drafts):
            self.drafted_at[j] += 1
        for j in range(num_accepted):
            self.accepted_at[j] += 1

    @property
    def mean_length(self) -> float:
        """AL: tokens per step with drafts, 1 + accepted / steps; 1 when there was none."""
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 1.0


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """What a client asked for, and where it stands. The scheduler alone changes the second part.

    priority: lower first. arrival: given by the scheduler when the request is added. seed: params'
    own, else drawn here. num_draft_tokens: K for this request, None for the engine's; may change
    while it runs. todo: positions still to run before it decodes; draft_todo: positions that a
    drafter rebuilt from tokens runs alone before those, rebuild: the same by group. must_propose:
    it lacks nothing but drafts. max_output: output tokens at most, by max_tokens and the model's
    length. cached_tokens: the hit of the first admission. draft_use: of all its claims. hold: rows
    that came for it from elsewhere, in the tree and held until it has pages of its own.
    """

    id: str
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace: Namespace = field(default_factory=Namespace)
    priority: int = 0
    arrival: int = 0
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    watch: Watch | None = None
    keep: bool = False

    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    seq: Sequence | None = None
    hold: Sequence | None = None
    output: list[int] = field(default_factory=list[int])
    num_draft_tokens: int | None = None
    drafts: list[int] = field(default_factory=list[int])
    todo: list[Span] = field(default_factory=list[Span])
    draft_todo: list[Span] = field(default_factory=list[Span])
    rebuild: tuple[SpanSet, ...] = ()
    must_propose: bool = False
    max_output: int = 0
    cached_tokens: int = 0
    admitted: bool = False
    last_step: int = -1
    num_overtaken: int = 0
    urgent: bool = False
    num_preemptions: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    draft_use: DraftUse = field(default_factory=DraftUse)
    steps: list[StepRecord] = field(default_factory=list["StepRecord"])
    story: deque[str] = field(default_factory=lambda: deque[str](maxlen=STORY_LENGTH))

    def __post_init__(self) -> None:
        if self.params.seed is not None:
            self.seed = self.params.seed
        self.num_draft_tokens = self.params.num_draft_tokens

    def __repr__(self) -> str:
        tokens = f"{len(self.prompt)} + {len(self.output)} tokens"
        return f"Request({self.id!r}, {self.state}, {tokens})"

    def handle(self, event: RequestEvent, why: str = "") -> None:
        """Move along TRANSITIONS; an illegal event raises InvariantError and changes nothing."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise InvariantError(
                f"request {self.id}: {event} is illegal when {self.state};"
                f" story: {', '.join(self.story) or 'none'}"
            )
        self.state = after
        self.story.append(f"{event}{f' ({why})' if why else ''} -> {after}")

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key: first come first served within a priority, urgent ones before all."""
        if self.urgent:
            return (0, 0, self.arrival)
        return (1, self.priority, self.arrival)

    @property
    def decoding(self) -> bool:
        """Whether its next segment verifies: it holds an anchor and nothing is left to compute."""
        return (
            self.seq is not None and not self.todo and not self.draft_todo and not self.must_propose
        )

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> list[int]:
        """All known tokens, a new list: the prompt and what was emitted."""
        return self.prompt + self.output
