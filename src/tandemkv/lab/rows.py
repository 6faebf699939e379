"""The report's lines: a drafter on a path, beside its cold run and plain decoding; and the verdict.

Law: a line is a function of finished runs; parity is judged by the limits below, and only where no
fault was asked for. Greedy, drafts and outputs are compared step by step; sampled, outputs differ
by design, and the ratio of acceptance lengths is judged by its interval. This module runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tandemkv.lab import branches as branching
from tandemkv.lab import measures
from tandemkv.lab.branches import Branch
from tandemkv.lab.experiments import Run, row_error
from tandemkv.lab.measures import MIN_PROMPTS, Agreement, Tally

MIN_AGREEMENT = 0.999
MAX_TIES = 0.002
RATIO_LIMITS = (0.995, 1.005)
MAX_ROW_ERROR = 1e-4
MIN_STEPS = 2000
MAX_SUFFIX_RATIO = 1.2
"""What a second turn ships, over the rows that it adds."""


class PromptTally(msgspec.Struct, frozen=True):
    """One prompt's verify steps with a draft, and the drafts accepted in them."""

    id: str
    steps: int
    accepted: int

    @property
    def tally(self) -> Tally:
        return Tally(self.steps, self.accepted)


class Row(msgspec.Struct, kw_only=True):
    """One line of the report: a drafter on a path. The names are the JSON file's.

    al_ratio_to_cold: on the part where the outputs are equal; sampled, of all steps, and
    al_ratio_interval is its interval over prompts. recomputed_lookahead_tokens and
    recomputed_hole_tokens: target positions run for the drafter alone, as the cache counts them;
    recomputed_target_tokens: the same as rows that the target ran too many. Of hand-offs:
    asked_bytes, transferred_bytes, the draft groups' part of them, and suffix_bytes, of the rows
    that second turns add; computed_here: requests that no prefill worker computed.
    """

    drafter: str
    path: str
    num_draft_tokens: int
    prompts: int
    steps: int
    al: float
    al_interval: tuple[float, float]
    al_ratio_to_cold: float | None
    al_ratio_interval: tuple[float, float] | None = None
    sampled: bool = False
    draft_agreement: float | None
    output_equal: bool | None
    acceptance_by_position: list[float]
    acceptance_by_step: list[float]
    draft_hit_tokens: int
    draft_gap_tokens: int
    recomputed_target_tokens: int
    recomputed_lookahead_tokens: int
    recomputed_hole_tokens: int
    transferred_bytes: int = 0
    transferred_draft_bytes: int = 0
    asked_bytes: int = 0
    suffix_bytes: int | None = None
    computed_here: int = 0
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
    by_prompt: list[PromptTally] = []
    branches: list[Branch] = []
    divergences: list[measures.OutputCheck] = []


def make_row(
    drafter: str,
    path: str,
    done: Run,
    cold: Run,
    plain: Run | None,
    *,
    num_draft_tokens: int,
    cut_loops: bool = False,
    sampled: bool = False,
    fault: str | None = None,
    branches: list[Branch] | None = None,
    suffix_bytes: int | None = None,
) -> Row:
    """A line from a path's run, its cold reference and plain decoding of the same prompts."""
    traces = done.traces
    tallies = [measures.tally(trace, cut_loops=cut_loops) for trace in traces]
    pooled = measures.total(tallies)
    agreement, checks, ratio, interval = Agreement(), [], None, None
    if not sampled:
        agreement = sum(measures.pair(traces, cold.traces, measures.compare), agreement)
        checks = measures.pair(traces, plain.traces, measures.check_output) if plain else []
        ratio = agreement.al_ratio
    elif done is not cold:
        pairs = measures.pair(
            traces,
            cold.traces,
            lambda *both: tuple(measures.tally(trace, cut_loops=cut_loops) for trace in both),
        )
        ratio, interval = measures.ratio(pairs), measures.ratio_interval(pairs)
    return Row(
        drafter=drafter,
        path=path,
        num_draft_tokens=num_draft_tokens,
        prompts=len(traces),
        steps=pooled.steps,
        al=pooled.al,
        al_interval=measures.interval(tallies),
        al_ratio_to_cold=ratio,
        al_ratio_interval=interval,
        sampled=sampled,
        draft_agreement=agreement.share,
        output_equal=all(check.equal for check in checks) if plain and not sampled else None,
        acceptance_by_position=measures.acceptance_by_position(traces, cut_loops=cut_loops),
        acceptance_by_step=measures.acceptance_by_step(traces, cut_loops=cut_loops),
        draft_hit_tokens=sum(trace.draft_hit_tokens for trace in traces),
        draft_gap_tokens=sum(trace.draft_gap_tokens for trace in traces),
        recomputed_target_tokens=done.recomputed_target_tokens,
        recomputed_lookahead_tokens=sum(trace.recomputed_lookahead_tokens for trace in traces),
        recomputed_hole_tokens=sum(trace.recomputed_hole_tokens for trace in traces),
        transferred_bytes=done.transfer.received,
        transferred_draft_bytes=done.transfer.draft,
        asked_bytes=done.transfer.asked,
        suffix_bytes=suffix_bytes,
        computed_here=done.transfer.computed_here,
        tokens_per_s=done.tokens_per_s,
        tokens_per_s_plain=plain.tokens_per_s if plain else None,
        cached_tokens=sum(trace.cached_tokens for trace in traces),
        steps_compared=agreement.compared,
        steps_equal=agreement.equal,
        ties=agreement.ties,
        steps_unmatched=agreement.unmatched,
        output_near_ties=sum(check.near_tie for check in checks),
        output_different=sum(not check.equal and not check.near_tie for check in checks),
        suspensions=done.num_suspensions,
        draft_row_error=row_error(done, cold) if done is not cold else None,
        fault=fault,
        by_prompt=[
            PromptTally(trace.id, tally.steps, tally.accepted)
            for trace, tally in zip(traces, tallies, strict=True)
        ],
        branches=branches or [],
        divergences=[check for check in checks if not check.equal],
    )


def failures(rows: Sequence[Row], *, exact: bool = True) -> list[str]:
    """What breaks parity, one sentence each, naming the path. Rows with a fault are not judged.

    A single disagreement fails a short run: where draft agreement is under MIN_AGREEMENT, or the
    common part's AL is out of RATIO_LIMITS, or a row is further than MAX_ROW_ERROR off. A sampled
    path fails where the interval of its ratio, over MIN_PROMPTS at least, does not contain 1.
    exact: whether the run was in float32, without which step by step nothing is judged.
    """
    return [
        f"{row.drafter}, path {row.path}: {problem}"
        for row in rows
        if row.fault is None
        for problem in _problems(row, exact)
    ]


def _problems(row: Row, exact: bool) -> Iterator[str]:
    low, high = row.al_ratio_interval or (1.0, 1.0)
    if row.prompts >= MIN_PROMPTS and not low <= 1.0 <= high:
        yield (
            f"AL is {row.al_ratio_to_cold:.3f} of the fresh run's, and the 95 % interval"
            f" {low:.3f} to {high:.3f} does not contain 1, as of one healthy path in 20; another"
            " --seed tells"
        )
    yield from branching.problems(row.branches)
    if row.asked_bytes != row.transferred_bytes:
        yield f"{row.transferred_bytes} bytes came, {row.asked_bytes} were asked for"
    if row.suffix_bytes and row.transferred_bytes >= MAX_SUFFIX_RATIO * row.suffix_bytes:
        yield f"{row.transferred_bytes} bytes came for a suffix of {row.suffix_bytes}"
    if row.computed_here:
        yield f"{row.computed_here} prompts were not computed by a prefill worker"
    if exact:
        yield from _inexact(row)


def _inexact(row: Row) -> Iterator[str]:
    """What differs, beyond float rounding, from the cold run and from plain decoding."""
    if row.draft_agreement is not None and row.draft_agreement < MIN_AGREEMENT:
        differ = row.steps_compared - row.steps_equal
        yield f"drafts differ from the cold run at {differ} of {row.steps_compared} steps"
    low, high = RATIO_LIMITS
    ratio = None if row.sampled else row.al_ratio_to_cold
    if ratio is not None and not low <= ratio <= high:
        yield f"AL is {ratio:.4f} of the cold run's"
    if row.ties > max(2, MAX_TIES * (row.steps_compared + row.ties)):
        yield f"{row.ties} ties in {row.steps_compared + row.ties} steps"
    if row.draft_row_error is not None and row.draft_row_error > MAX_ROW_ERROR:
        yield f"a draft row is {row.draft_row_error:.1e} of its norm off the cold run's"
    if row.output_different:
        yield f"{row.output_different} outputs differ from plain decoding"
