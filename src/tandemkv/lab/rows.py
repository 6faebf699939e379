"""The report's lines: a drafter on a path, beside its cold run and plain decoding; and the verdict.

Law: a line is a function of finished runs and of the cache's counters; parity is judged by the
limits below, and only where no fault was asked for. This module runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tandemkv.lab import measures
from tandemkv.lab.experiments import Run, row_error
from tandemkv.lab.measures import Agreement

MIN_AGREEMENT = 0.999
MAX_TIES = 0.002
RATIO_LIMITS = (0.995, 1.005)
MAX_ROW_ERROR = 1e-4
MIN_STEPS = 2000


class Row(msgspec.Struct, kw_only=True):
    """One line of the report: a drafter on a path. The names are the JSON file's."""

    drafter: str
    path: str
    prompts: int
    steps: int
    al: float
    al_interval: tuple[float, float]
    al_ratio_to_cold: float | None
    draft_agreement: float | None
    output_equal: bool | None
    acceptance_by_position: list[float]
    acceptance_by_step: list[float]
    draft_hit_tokens: int
    draft_gap_tokens: int
    recomputed_target_tokens: int
    transferred_bytes: int = 0
    tokens_per_s: float
    tokens_per_s_plain: float | None
    cached_tokens: int
    steps_compared: int
    steps_equal: int
    ties: int
    steps_unmatched: int
    output_near_ties: int
    output_different: int
    suspensions: int
    draft_row_error: float | None
    fault: str | None = None
    divergences: list[measures.OutputCheck] = []


class Counters(msgspec.Struct, frozen=True):
    """What the cache counted, summed over draft groups and reasons; differences are a phase's."""

    draft_hit_tokens: int = 0
    draft_gap_tokens: int = 0
    recomputed_target_tokens: int = 0

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.draft_hit_tokens - other.draft_hit_tokens,
            self.draft_gap_tokens - other.draft_gap_tokens,
            self.recomputed_target_tokens - other.recomputed_target_tokens,
        )


def make_row(
    drafter: str,
    path: str,
    done: Run,
    cold: Run,
    plain: Run | None,
    counted: Counters,
    *,
    cut_loops: bool = False,
    fault: str | None = None,
) -> Row:
    """A line from a path's run, its cold reference and plain decoding of the same prompts."""
    tallies = [measures.tally(trace, cut_loops=cut_loops) for trace in done.traces]
    pooled = measures.total(tallies)
    agreement = sum(measures.pair(done.traces, cold.traces, measures.compare), Agreement())
    checks = measures.pair(done.traces, plain.traces, measures.check_output) if plain else []
    return Row(
        drafter=drafter,
        path=path,
        prompts=len(done.traces),
        steps=pooled.steps,
        al=pooled.al,
        al_interval=measures.interval(tallies),
        al_ratio_to_cold=agreement.al_ratio,
        draft_agreement=agreement.share,
        output_equal=all(check.equal for check in checks) if plain else None,
        acceptance_by_position=measures.acceptance_by_position(done.traces, cut_loops=cut_loops),
        acceptance_by_step=measures.acceptance_by_step(done.traces, cut_loops=cut_loops),
        draft_hit_tokens=counted.draft_hit_tokens,
        draft_gap_tokens=counted.draft_gap_tokens,
        recomputed_target_tokens=counted.recomputed_target_tokens,
        tokens_per_s=done.tokens_per_s,
        tokens_per_s_plain=plain.tokens_per_s if plain else None,
        cached_tokens=sum(trace.cached_tokens for trace in done.traces),
        steps_compared=agreement.compared,
        steps_equal=agreement.equal,
        ties=agreement.ties,
        steps_unmatched=agreement.unmatched,
        output_near_ties=sum(check.near_tie for check in checks),
        output_different=sum(not check.equal and not check.near_tie for check in checks),
        suspensions=done.num_suspensions,
        draft_row_error=row_error(done, cold) if done is not cold else None,
        fault=fault,
        divergences=[check for check in checks if not check.equal],
    )


def failures(rows: Sequence[Row]) -> list[str]:
    """What breaks parity, one sentence each, naming the path. Rows with a fault are not judged.

    A single disagreement fails a short run: where draft agreement is under MIN_AGREEMENT, or the
    common part's AL is out of RATIO_LIMITS, or a row is further than MAX_ROW_ERROR off.
    """
    return [problem for row in rows if row.fault is None for problem in _problems(row)]


def _problems(row: Row) -> Iterator[str]:
    where = f"{row.drafter}, path {row.path}"
    if row.draft_agreement is not None and row.draft_agreement < MIN_AGREEMENT:
        differ = row.steps_compared - row.steps_equal
        yield f"{where}: drafts differ from the cold run at {differ} of {row.steps_compared} steps"
    low, high = RATIO_LIMITS
    if row.al_ratio_to_cold is not None and not low <= row.al_ratio_to_cold <= high:
        yield f"{where}: AL is {row.al_ratio_to_cold:.4f} of the cold run's"
    if row.ties > max(2, MAX_TIES * (row.steps_compared + row.ties)):
        yield f"{where}: {row.ties} ties in {row.steps_compared + row.ties} steps"
    if row.draft_row_error is not None and row.draft_row_error > MAX_ROW_ERROR:
        yield f"{where}: a draft row is {row.draft_row_error:.1e} of its norm off the cold run's"
    if row.output_different:
        yield f"{where}: {row.output_different} outputs differ from plain decoding"
