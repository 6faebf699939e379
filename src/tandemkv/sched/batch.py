"""What passes between scheduler and runner: a step's plan and its result, as values.

    verify    [start, stop) = anchor and drafts   tokens x_n d_1 .. d_k, start = n; samples
    chunk     [start, stop) of known tokens       samples only when it ends a fresh prompt
    draft     start == stop                       the drafter alone: rows rebuilt from tokens, or
                                                  proposals for a request that lacks nothing else

Law: a sequence has at most one segment in a step; results are bound to sequences by SeqId, never by
index, so a late result cannot land in another one. Nothing here is changed once handed over. This
module decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tandemkv.base.ids import SeqId
from tandemkv.base.logprobs import TokenLogprobs
from tandemkv.base.spans import Span
from tandemkv.base.transfer_params import KVTransferParams
from tandemkv.kv.records import DraftUse
from tandemkv.sched.request import FinishReason, Request

if TYPE_CHECKING:
    from tandemkv.kv.manager import PageCopy
    from tandemkv.kv.sequence import Sequence


class Segment(msgspec.Struct, eq=False, kw_only=True):
    """One sequence's part of a step.

    tokens: inputs of target rows [start, stop), may be empty. num_drafts: the last that many are
    drafts; the row before them is the anchor's. samples: logits are wanted, of anchor and drafts
    when verifying, of the last row when a prompt ends here. verify: a decode step, also with 0
    drafts. num_propose: drafts wanted for the new anchor if the request goes on (0: none). write:
    per group, the slots this pass writes: seq.writes(start, stop), draft groups emptied when the
    context pass is off; a group rebuilt from tokens may have slots below `start` (rows the drafter
    computes alone). The runner clips draft writes to accepted rows: slot < final rows + lookahead.
    """

    request: Request
    seq: Sequence
    start: int
    stop: int
    tokens: list[int]
    num_drafts: int = 0
    samples: bool = False
    num_propose: int = 0
    write: tuple[tuple[Span, ...], ...] = ()
    verify: bool = False

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class StepPlan(msgspec.Struct, eq=False):
    """A step: copy pages, run the segments' rows, verify or sample, let the drafter run.

    copies come first, before any row is written. claimed: sequences opened by this plan.
    """

    step: int
    segments: list[Segment] = []
    copies: list[PageCopy] = []
    claimed: list[Sequence] = []

    @property
    def num_rows(self) -> int:
        return sum(segment.num_rows for segment in self.segments)

    @property
    def empty(self) -> bool:
        return not self.segments


class StepRecord(msgspec.Struct, frozen=True):
    """One verify step of a traced request.

    anchor: its position. drafts: those verified. emitted: tokens kept after the stop rules.
    draft_gap: smallest best-two logit gap while these drafts were proposed; target_gap: the same
    of the target over the verified rows.
    """

    anchor: int
    drafts: tuple[int, ...]
    num_accepted: int
    emitted: tuple[int, ...]
    draft_gap: float
    target_gap: float


class SegmentResult(msgspec.Struct):
    """What a segment gave, bound to its sequence.

    tokens: emitted: accepted drafts and the recovered or bonus token, or the first token of a
    prompt; [] for a chunk. num_accepted: of the verified drafts. drafts: the proposal for the new
    anchor. draft_gap: smallest best-two gap while the verified drafts were proposed; target_gap:
    over the rows that were sampled. error: why no token could be had of this segment's rows; the
    request ends with it, the rest of the step stands.
    """

    seq: SeqId
    tokens: list[int] = []
    num_accepted: int = 0
    drafts: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    draft_gap: float = float("inf")
    target_gap: float = float("inf")
    error: str | None = None


class StepResult(msgspec.Struct):
    step: int
    segments: list[SegmentResult] = []


class Output(msgspec.Struct, kw_only=True):
    """News of one request: new tokens after the stop rules, and how it ended if it did.

    num_output_tokens counts emitted tokens only; num_accepted (of num_drafts, over num_draft_steps
    steps) may exceed it when a stop fell inside an accepted run. accepted_at: by draft position.
    draft_use: what its claims have found, missed and recomputed so far; not a copy. transfer: where
    the rows of a prompt are held for another worker.
    """

    request_id: str
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finished: bool = False
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    num_draft_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    draft_use: DraftUse = msgspec.field(default_factory=DraftUse)
    transfer: KVTransferParams | None = None

    @staticmethod
    def failed(request_id: str, error: str) -> Output:
        """The last output of a request whose scheduler is gone."""
        return Output(
            request_id=request_id, finished=True, finish_reason=FinishReason.ERROR, error=error
        )
