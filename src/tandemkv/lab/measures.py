"""What the lab measures on finished runs: acceptance, agreement with the cold run, intervals.

Law: everything here is a pure function of token ids and step records; nothing is estimated from
text, and no number depends on how a run was scheduled. Only verify steps with at least one draft
count as steps. This module runs no engine.

    output    o0   o1   o2   o3   o4   o5 ...      position of o_j = prompt length + j
    steps         |o0: anchor, drafts d1 d2 d3|    2 accepted -> emits o1 o2 and the recovered o3
                                 |o3: anchor ...
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

T = TypeVar("T")

TIE_GAP = 1e-4
"""A step whose best two logits (draft or target) lie closer than this is a tie."""
OUTPUT_TIE_GAP = 1e-5
"""Greedy outputs may part only where the target's best two logits lie closer than this."""
LOOP_LENGTH = 12
MIN_PROMPTS = 8
"""Prompts from which on an interval over prompts decides anything: resampling fewer says little."""


class Step(Protocol):
    """What a step record must say (sched.batch.StepRecord does)."""

    anchor: int
    drafts: Sequence[int]
    num_accepted: int
    draft_gap: float
    target_gap: float


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request. prompt, output: token ids; steps: its verify steps, in order.

    draft_hit_tokens, draft_gap_tokens: draft rows that its claims found, and lacked for good.
    recomputed_lookahead_tokens, recomputed_hole_tokens: target positions run for the drafter alone.
    """

    id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    finish_reason: str
    steps: tuple[Step, ...]
    cached_tokens: int = 0
    draft_hit_tokens: int = 0
    draft_gap_tokens: int = 0
    recomputed_lookahead_tokens: int = 0
    recomputed_hole_tokens: int = 0

    def offset(self, step: Step) -> int:
        """Index in the output of a step's anchor."""
        return step.anchor - len(self.prompt)


class Tally(msgspec.Struct, frozen=True):
    """Verify steps with a draft, and the drafts accepted in them."""

    steps: int = 0
    accepted: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.steps + other.steps, self.accepted + other.accepted)

    @property
    def al(self) -> float:
        """Acceptance length, bonus or recovered token included; 1 without a step."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


def loop_start(output: Sequence[int], length: int = LOOP_LENGTH) -> int | None:
    """Index of the token that ends the first `length`-gram seen twice before; None if none does."""
    seen: dict[tuple[int, ...], int] = {}
    for end in range(length, len(output) + 1):
        gram = tuple(output[end - length : end])
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] > 2:
            return end - 1
    return None


def counted(trace: Trace, *, cut_loops: bool = False) -> list[tuple[Step, int]]:
    """The steps that count, each with its accepted drafts.

    Drafts accepted past the end of a text that stopped, or past a loop's start, are not counted;
    at a length limit the text would have gone on, so a step there counts whole.
    """
    end = len(trace.output) if trace.finish_reason == "stop" else None
    if cut_loops and (loop := loop_start(trace.output)) is not None:
        end = loop
    out: list[tuple[Step, int]] = []
    for step in trace.steps:
        room = None if end is None else end - 1 - trace.offset(step)
        if not step.drafts or (room is not None and room < 1):
            continue
        out.append((step, step.num_accepted if room is None else min(step.num_accepted, room)))
    return out


def tally(trace: Trace, *, cut_loops: bool = False) -> Tally:
    """Steps and accepted drafts of one request."""
    steps = counted(trace, cut_loops=cut_loops)
    return Tally(len(steps), sum(accepted for _, accepted in steps))


def total(tallies: Iterable[Tally]) -> Tally:
    """The pooled tally."""
    return sum(tallies, Tally())


def interval(
    tallies: Sequence[Tally], *, confidence: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the pooled AL, resampling whole prompts.

    Prompts are the unit: steps of one prompt depend on each other (Efron 1979, cluster form).
    """
    return _bootstrap(tallies, lambda drawn: total(drawn).al, (1.0, 1.0), confidence, draws, seed)


Paired = tuple[Tally, Tally]
"""Two runs of one prompt."""


def ratio(pairs: Sequence[Paired]) -> float:
    """Pooled AL of the first runs over that of the second runs."""
    return total(mine for mine, _ in pairs).al / total(other for _, other in pairs).al


def ratio_interval(
    pairs: Sequence[Paired], *, confidence: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of `ratio`, resampling prompts with both of their runs."""
    return _bootstrap(pairs, ratio, (1.0, 1.0), confidence, draws, seed)


def difference(pairs: Sequence[Paired]) -> float:
    """Pooled AL of the first runs less that of the second runs."""
    return total(mine for mine, _ in pairs).al - total(other for _, other in pairs).al


def difference_interval(
    pairs: Sequence[Paired], *, confidence: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of `difference`, resampling prompts with both of their runs."""
    return _bootstrap(pairs, difference, (0.0, 0.0), confidence, draws, seed)


def _bootstrap(
    units: Sequence[T],
    f: Callable[[Sequence[T]], float],
    empty: tuple[float, float],
    confidence: float,
    draws: int,
    seed: int,
) -> tuple[float, float]:
    """Percentile interval of f over `draws` resamples of the units."""
    if not units:
        return empty
    rng = random.Random(seed)
    found = sorted(f(rng.choices(units, k=len(units))) for _ in range(draws))
    low = int((1 - confidence) / 2 * draws)
    return found[low], found[draws - 1 - low]


def acceptance_by_position(traces: Iterable[Trace], *, cut_loops: bool = False) -> list[float]:
    """Share of steps in which draft j = 1, 2, ... was accepted (and so all before it)."""
    steps = [pair for trace in traces for pair in counted(trace, cut_loops=cut_loops)]
    depth = max((len(step.drafts) for step, _ in steps), default=0)
    return [sum(a > j for _, a in steps) / len(steps) for j in range(depth)]


def acceptance_by_step(
    traces: Iterable[Trace], *, cut_loops: bool = False, first: int = 16
) -> list[float]:
    """Mean AL of a request's 1st, 2nd, ... counted step, over the requests that have one."""
    columns: list[list[int]] = [[] for _ in range(first)]
    for trace in traces:
        for column, (_, accepted) in zip(
            columns, counted(trace, cut_loops=cut_loops), strict=False
        ):
            column.append(accepted)
    return [1 + sum(column) / len(column) for column in columns if column]


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """A path's run beside the cold run of the same prompt, up to the first divergence of outputs.

    compared: anchors at which both runs stand, ties left out; equal: those with the same drafts.
    ties: anchors left out because a top-2 gap is under TIE_GAP. unmatched: anchors at which one run
    alone stands, after an unequal step or a tie. path, cold: AL tallies of the common part.
    """

    compared: int = 0
    equal: int = 0
    ties: int = 0
    unmatched: int = 0
    path: Tally = Tally()
    cold: Tally = Tally()

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            compared=self.compared + other.compared,
            equal=self.equal + other.equal,
            ties=self.ties + other.ties,
            unmatched=self.unmatched + other.unmatched,
            path=self.path + other.path,
            cold=self.cold + other.cold,
        )

    @property
    def share(self) -> float | None:
        """Share of compared anchors with equal drafts; None when nothing was compared."""
        return self.equal / self.compared if self.compared else None

    @property
    def tie_share(self) -> float:
        """Ties as a share of all anchors at which both runs stand."""
        both = self.compared + self.ties
        return self.ties / both if both else 0.0

    @property
    def al_ratio(self) -> float | None:
        """AL of the path over AL of the cold run, on the common part; None without a cold step."""
        return self.path.al / self.cold.al if self.cold.steps else None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def compare(path: Trace, cold: Trace) -> Agreement:
    """Compare two runs of the same prompt, anchor by anchor, until their outputs part.

    As long as no step differed, both must stand at the same anchors: a step that the path took
    without drafts, where the cold run had some, is an unequal step and not a missing one.
    """
    common = common_prefix(path.output, cold.output)
    ours, theirs = _by_offset(path, common), _by_offset(cold, common)
    result = Agreement()
    in_step = True
    for offset in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(offset), theirs.get(offset)
        if mine is None or other is None:
            if in_step:
                result += Agreement(compared=1)
                in_step = False
            else:
                result += Agreement(unmatched=1)
            continue
        same = list(mine.drafts) == list(other.drafts)
        in_step = same and mine.num_accepted == other.num_accepted
        if min(mine.draft_gap, mine.target_gap, other.draft_gap, other.target_gap) < TIE_GAP:
            result += Agreement(ties=1)
        else:
            result += Agreement(compared=1, equal=int(same))
    kept = Agreement(path=_tally_before(path, common), cold=_tally_before(cold, common))
    return result + kept


def _by_offset(trace: Trace, common: int) -> dict[int, Step]:
    steps = ((trace.offset(step), step) for step in trace.steps if step.drafts)
    return {offset: step for offset, step in steps if offset < common}


def _tally_before(trace: Trace, common: int) -> Tally:
    kept = [a for step, a in counted(trace) if trace.offset(step) < common]
    return Tally(len(kept), sum(kept))


class OutputCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A run's output beside plain decoding's. gap: the target's top-2 gap where they part."""

    id: str
    equal: bool
    position: int | None = None
    gap: float | None = None

    @property
    def near_tie(self) -> bool:
        """Whether the outputs part at a top-2 gap that float rounding can turn."""
        return self.gap is not None and self.gap < OUTPUT_TIE_GAP


def check_output(path: Trace, plain: Trace) -> OutputCheck:
    """Whether a run's output equals plain decoding's, token for token."""
    if path.output == plain.output:
        return OutputCheck(id=path.id, equal=True)
    at = common_prefix(path.output, plain.output)
    last = [step for step in path.steps if path.offset(step) < at]
    gap = last[-1].target_gap if last else None
    return OutputCheck(id=path.id, equal=False, position=len(path.prompt) + at, gap=gap)


def pair(
    runs: Iterable[Trace], references: Iterable[Trace], f: Callable[[Trace, Trace], T]
) -> list[T]:
    """Apply f to each run and the reference of the same id; runs without one are left out."""
    by_id = {trace.id: trace for trace in references}
    return [f(run, by_id[run.id]) for run in runs if run.id in by_id]
