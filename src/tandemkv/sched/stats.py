"""What the scheduler counts, for the metrics.

Law: counters only grow; token counts are of emitted tokens; sum(accepted_at) = num_accepted and
num_accepted <= num_drafts. Steps without a draft do not count as draft steps. A dropped result
changes no counter but its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tandemkv.base.errors import InvariantError
from tandemkv.sched.request import Acceptance, FinishReason


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a scheduler is: requests that run and that wait, and prompt rows still to run."""

    running: int
    waiting: int
    queued_tokens: int


@dataclass(slots=True, eq=False)
class SchedulerStats:
    """Counters since the start, and two gauges.

    num_steps, num_rows: steps with work and their target rows; num_verify_rows, num_prefill_rows:
    the same rows by kind. preemptions: suspensions, by hand or for want of pages. resumed: by
    warmth: warm (the lookahead was recomputed, no gap stayed), partial, cold (nothing was left).
    drafts_skipped: proposals not verified or not asked for, for want of pages. late_results:
    dropped because their sequence was gone. num_missed: requests that found the batch full.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_rows: int = 0
    num_verify_rows: int = 0
    num_prefill_rows: int = 0
    num_missed: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    resumed: dict[str, int] = field(default_factory=lambda: {"warm": 0, "partial": 0, "cold": 0})
    drafts_skipped: int = 0
    late_results: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )

    def check(self) -> None:
        """Raise InvariantError if totals and parts disagree."""
        a = self.acceptance
        if sum(a.accepted_at) != a.num_accepted or sum(a.drafted_at) != a.num_drafts:
            raise InvariantError(f"acceptance by position does not add up: {a}")
        if a.num_accepted > a.num_drafts or a.num_steps > a.num_drafts:
            raise InvariantError(f"more accepted than drafted: {a}")
        if self.num_rows != self.num_verify_rows + self.num_prefill_rows:
            raise InvariantError("batch rows are not the sum of verify and prefill rows")
