"""One step on a device: copies, the target's pass, verification, the drafter's pass.

Law: a step reads and writes only what its plan names. Draft rows are written from the step's
final tokens and the target's own hidden states, in the same step that makes the tokens final, so
no catch-up is ever owed to a request that finishes or is suspended. A proposal's distributions
stay here, bound to the sequence they were drafted for. This module decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tandemkv.base.errors import RequestError
from tandemkv.base.ids import SeqId
from tandemkv.kv.layout import Layout
from tandemkv.model.drafter import Drafter
from tandemkv.model.sampling import process_logits, token_logprobs, top2_gap
from tandemkv.model.target import Target
from tandemkv.model.verify import verify, verify_greedy
from tandemkv.runner.inputs import draft_inputs, target_inputs
from tandemkv.runner.storage import Storage
from tandemkv.sched.batch import Segment, SegmentResult, StepPlan, StepResult


class Runner:
    """Runs step plans on a target, an optional drafter and their pools."""

    def __init__(
        self,
        layout: Layout,
        storage: Storage,
        target: Target,
        drafter: Drafter | None,
        *,
        trace: bool = False,
    ) -> None:
        self._layout = layout
        self._storage = storage
        self._target = target
        self._drafter = drafter
        self._taps = drafter.spec.taps if drafter else ()
        self._trace = trace
        self._probs: dict[SeqId, Tensor] = {}
        self._gaps: dict[SeqId, float] = {}
        if drafter is not None:
            drafter.bind([storage.pools[g] for g in layout.draft_groups])

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """The whole step. Raises what the models raise; the plan's pages are then not canonical."""
        self._storage.copy(plan.copies)
        inputs = target_inputs(plan, self._layout, self._storage.pools)
        hidden = features = None
        if inputs.rows:
            out = self._target.forward(inputs.token_ids, inputs.positions, inputs.rows, self._taps)
            hidden, features = out.hidden, out.features
        results = self._verify(plan, inputs.starts, hidden)
        self._propose(plan, results, inputs.starts, features)
        return StepResult(step=plan.step, segments=results)

    def forget(self, live: Iterable[SeqId]) -> None:
        """Drop the proposals of every sequence that is not in `live`."""
        if self._probs or self._gaps:
            keep = set(live)
            self._probs = {seq: p for seq, p in self._probs.items() if seq in keep}
            self._gaps = {seq: g for seq, g in self._gaps.items() if seq in keep}

    def _verify(
        self, plan: StepPlan, starts: Sequence[int], hidden: Tensor | None
    ) -> list[SegmentResult]:
        results = [_empty(segment) for segment in plan.segments]
        wanted = [i for i, segment in enumerate(plan.segments) if segment.samples]
        if not wanted or hidden is None:
            return results
        picks: list[int] = []
        first: list[int] = []
        for i in wanted:
            segment = plan.segments[i]
            first.append(len(picks))
            stop = starts[i] + segment.stop - segment.start
            picks.extend(range(stop - 1 - segment.num_drafts, stop))
        index = torch.tensor(picks, dtype=torch.long, device=hidden.device)
        logits = self._target.logits(hidden[index])
        peaks, best = logits.max(-1)
        finite, best = peaks.isfinite().tolist(), best.tolist()
        for i, row in zip(wanted, first, strict=True):
            rows = slice(row, row + plan.segments[i].num_drafts + 1)
            try:
                if not all(finite[rows]):
                    raise RequestError("the model's logits are not finite", status=500)
                results[i] = self._judge(plan.segments[i], logits[rows], best[rows])
            except RequestError as error:  # this request's rows alone: the step stands
                results[i].error = str(error)
        return results

    def _judge(self, segment: Segment, logits: Tensor, best: list[int]) -> SegmentResult:
        """Verify one segment: logits [k + 1, V], best their argmaxes."""
        request, params = segment.request, segment.request.params
        drafts = segment.tokens[len(segment.tokens) - segment.num_drafts :]
        probs = self._probs.pop(segment.seq.id, None)
        gap = self._gaps.pop(segment.seq.id, math.inf)
        if params.greedy and not params.changes_logits:
            verdict = verify_greedy(best, drafts)
        else:
            processed = process_logits(
                logits,
                params,
                request.prompt,
                request.output,
                drafts,
                eos_token_ids=self._target.spec.eos_token_ids,
            )
            verdict = verify(
                processed,
                drafts,
                None if probs is None else probs[: len(drafts)],
                params,
                request.seed,
                segment.stop - 1 - len(drafts),
            )
        accepted = verdict.num_accepted
        tokens = [*drafts[:accepted], verdict.token]
        logprobs = None
        if params.logprobs is not None:
            logprobs = token_logprobs(logits[: accepted + 1], tokens, params.logprobs)
        target_gap = float(top2_gap(logits[: accepted + 1]).min()) if self._trace else math.inf
        return SegmentResult(
            seq=segment.seq.id,
            tokens=tokens,
            num_accepted=accepted,
            drafts=[],
            logprobs=logprobs,
            draft_gap=gap,
            target_gap=target_gap,
        )

    def _propose(
        self,
        plan: StepPlan,
        results: list[SegmentResult],
        starts: Sequence[int],
        features: Tensor | None,
    ) -> None:
        if self._drafter is None:
            return
        packed = draft_inputs(
            plan,
            self._layout,
            [r.tokens for r in results],
            [r.num_accepted for r in results],
            starts,
            features,
            self._storage.pools[0].data.device,
            skip={i for i, result in enumerate(results) if result.error is not None},
            exact_proposals=self._drafter.spec.exact_proposals,
        )
        if packed is None:
            return
        inputs, owners = packed
        drafts = self._drafter.run(inputs)
        for i, tokens, probs, gap in zip(
            owners, drafts.tokens, drafts.probs, drafts.gaps, strict=True
        ):
            results[i].drafts = tokens
            if probs is not None and tokens:
                self._probs[results[i].seq] = probs
            if self._trace and tokens:
                self._gaps[results[i].seq] = gap


def _empty(segment: Segment) -> SegmentResult:
    inf = math.inf
    return SegmentResult(
        seq=segment.seq.id,
        tokens=[],
        num_accepted=0,
        drafts=[],
        logprobs=None,
        draft_gap=inf,
        target_gap=inf,
    )
