"""The drafter's output head: from a normalised hidden state to drafted tokens and what they cost.

Law: the probabilities returned are exactly those a draft was sampled from, spread over the target's
vocabulary; greedy drafts and their gaps come from full-precision logits. This module keeps no state
between calls and accepts nothing: verification does.

On a CPU a draft step is bound by reading the head, so an int8 copy screens the vocabulary and the
best candidates are scored again with the real rows: the argmax of the real head at a quarter of the
bytes. Elsewhere the real head is read whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.base.errors import ConfigError
from tandemkv.base.sampling import SamplingParams
from tandemkv.model.draft_checkpoint import RANKING, quantised
from tandemkv.model.drafter import Drafts
from tandemkv.model.packed import pack_linear
from tandemkv.model.sampling import (
    Purpose,
    draft_distribution,
    is_deterministic,
    sample,
    uniform,
)
from tandemkv.model.target import Target

DEFAULT_DRAFT_VOCAB = 16384
"""Rows of the target's head to draft over on CPU, where the checkpoint ranks them and nobody asked.

There a draft step is bound by reading the head; on an accelerator the whole head is cheap.
"""
NUM_GREEDY = 16
"""Screened candidates scored again for a greedy draft (the best two matter)."""
NUM_SAMPLED = 256
"""Screened candidates scored again for a sampled draft; the rest keep their screened logits."""
_ROWS_AT_ONCE = 16384
"""Rows quantised at a time, so that a large head is not held in float32 as a whole."""


@dataclass(slots=True)
class Choice:
    """One draft step of P rows: token ids [P] on the device, and per row q [V] or None, and gap."""

    tokens: Tensor
    probs: list[Tensor | None]
    gaps: Tensor


def collect(num_segments: int, steps: Sequence[tuple[Sequence[int], Choice]]) -> Drafts:
    """All steps of a run as Drafts. steps: the segments whose rows took part, and their choice.

    One transfer from the device for the whole run.
    """
    drafts = Drafts([[] for _ in range(num_segments)], [None] * num_segments)
    drafts.gaps = [float("inf")] * num_segments
    if not steps:
        return drafts
    owners = [i for segments, _ in steps for i in segments]
    tokens = torch.cat([choice.tokens for _, choice in steps]).tolist()
    gaps = torch.cat([choice.gaps for _, choice in steps]).tolist()
    probs: dict[int, list[Tensor]] = {}
    for segments, choice in steps:
        for i, q in zip(segments, choice.probs, strict=True):
            if q is not None:
                probs.setdefault(i, []).append(q)
    for i, token, gap in zip(owners, tokens, gaps, strict=True):
        drafts.tokens[i].append(token)
        drafts.gaps[i] = min(drafts.gaps[i], gap)
    for i, rows in probs.items():
        drafts.probs[i] = torch.stack(rows)
    return drafts


def choose(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    anchors: Sequence[int],
) -> Choice:
    """Draft one token per row of logits [P, V] float32: the best, or sampled as the request asks.

    positions: of the drafted tokens; anchors: of the steps' anchors, which key the uniforms. A row
    without a distribution (its logits are not finite) drafts some token for certain: whatever it
    is, verification is none the worse for it, and no other row of the step notices.
    """
    top = logits.topk(min(2, logits.shape[-1]))
    fixed = [is_deterministic(p) for p in params]
    probs: list[Tensor | None] = [None] * len(fixed)
    if all(fixed):
        return Choice(top.indices[:, 0], probs, _gaps(top.values))
    tokens = top.indices[:, 0].tolist()
    for i in (i for i, best in enumerate(fixed) if not best):
        q = draft_distribution(logits[i : i + 1], params[i])[0]
        if bool(q.sum() > 0):
            tokens[i] = sample(q, uniform(seeds[i], positions[i], Purpose.DRAFT, anchors[i]))
        else:
            q = torch.zeros_like(q).index_fill_(0, torch.tensor([tokens[i]], device=q.device), 1.0)
        probs[i] = q
    return Choice(torch.tensor(tokens, device=logits.device), probs, _gaps(top.values))


class DraftHead:
    """weight [V_draft, d]; ids [V_draft]: target ids of its rows, None if the vocabularies agree.

    vocab_size: of the target. screen: use the int8 screen (default: on a CPU, for vocabularies
    large enough to gain from it); False for a drafter that reads the head for many rows at once.
    """

    def __init__(
        self, weight: Tensor, ids: Tensor | None, vocab_size: int, *, screen: bool | None = None
    ) -> None:
        self.weight = weight
        self.ids = None if ids is None else ids.to(weight.device)
        self.vocab_size = vocab_size
        wanted = weight.device.type == "cpu" and len(weight) >= 4096 if screen is None else screen
        self._screen: tuple[Tensor, Tensor] | None = None
        self._packed = pack_linear(weight) if screen is False else None
        if wanted and hasattr(torch, "_weight_int8pack_mm"):
            parts = [quantised(rows) for rows in weight.split(_ROWS_AT_ONCE)]
            values, scales = (torch.cat(each) for each in zip(*parts, strict=True))
            self._screen = (values, scales.bfloat16())

    def choose(
        self,
        hidden: Tensor,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        anchors: Sequence[int],
    ) -> Choice:
        """Draft one token per row of hidden [P, d], after the drafter's final norm."""
        if all(is_deterministic(p) for p in params):
            best, gaps = self._best(hidden)
            return Choice(self._target_ids(best), [None] * len(params), gaps)
        return self.pick(self.logits(hidden, NUM_SAMPLED), params, seeds, positions, anchors)

    def pick(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        anchors: Sequence[int],
    ) -> Choice:
        """Draft one token per row of logits [P, V_draft] float32, whatever was added to them."""
        choice = choose(logits, params, seeds, positions, anchors)
        probs = [None if q is None else self._spread(q) for q in choice.probs]
        return Choice(self._target_ids(choice.tokens), probs, choice.gaps)

    def logits(self, hidden: Tensor, num_exact: int) -> Tensor:
        """[P, d] to [P, V_draft] float32; under a screen only the num_exact best are exact."""
        if self._screen is None:
            return self._plain(hidden).float()
        screened = self._screened(hidden).float()
        values, index = self._rescored(hidden, screened, num_exact)
        return screened.scatter_(1, index, values)

    def _best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Row index of the best logit [P] and its lead over the second [P]."""
        if self._screen is None:
            values, index = self._plain(hidden).float(), None
        else:
            values, index = self._rescored(hidden, self._screened(hidden), NUM_GREEDY)
        top = values.topk(min(2, values.shape[-1]))
        best = top.indices[:, 0]
        if index is not None:
            best = index.gather(1, best[:, None])[:, 0]
        return best, _gaps(top.values)

    def _plain(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight) if self._packed is None else self._packed(hidden)

    def _screened(self, hidden: Tensor) -> Tensor:
        """Approximate logits [P, V_draft] bfloat16; row by row, which the kernel is made for."""
        values, scale = self._screen  # type: ignore[misc]
        rows = hidden.to(torch.bfloat16)
        out = [torch._weight_int8pack_mm(row, values, scale) for row in rows.split(1)]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _rescored(self, hidden: Tensor, screened: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Exact float32 logits [P, num] of the best screened candidates, and their rows."""
        index = screened.topk(min(num, screened.shape[-1]), sorted=False).indices
        index = index.sort(-1).values
        rows = self.weight[index].float()
        return (rows @ hidden.float().unsqueeze(-1)).squeeze(-1), index

    def _target_ids(self, rows: Tensor) -> Tensor:
        return rows if self.ids is None else self.ids[rows]

    def _spread(self, q: Tensor) -> Tensor:
        """[V_draft] over the target's vocabulary [V]; zero where there is no draft token."""
        if self.ids is None:
            return q
        return q.new_zeros(self.vocab_size).index_copy_(0, self.ids, q)


def _gaps(top: Tensor) -> Tensor:
    if top.shape[-1] < 2:
        return torch.full(top.shape[:1], float("inf"), device=top.device)
    return (top[:, 0] - top[:, 1]).nan_to_num(0.0, posinf=float("inf"))


def ranked_ids(
    target: Target, ranking: Tensor | None, draft_vocab: int | None, origin: str
) -> Tensor | None:
    """Target ids to draft over, ascending: the first draft_vocab of a ranking; None for all.

    draft_vocab None: default_draft_vocab where there is a ranking. Raises ConfigError for more ids
    than are ranked, or for a number where nothing is ranked.
    """
    vocab_size = target.spec.vocab_size
    if ranking is None:
        if draft_vocab is None:
            return None
        raise ConfigError(
            f"{origin}: draft_vocab {draft_vocab} was asked for, but the checkpoint does not rank"
            f" its vocabulary (tensor {RANKING!r})"
        )
    if draft_vocab is None:
        on = target.head_weight.device.type
        draft_vocab = default_draft_vocab(on, len(ranking), vocab_size)
    if draft_vocab >= vocab_size:
        return None
    if draft_vocab > len(ranking):
        raise ConfigError(
            f"{origin}: draft_vocab {draft_vocab} was asked for, the checkpoint ranks"
            f" {len(ranking)} tokens"
        )
    return ranking[:draft_vocab].long().sort().values


def default_draft_vocab(device: str, num_ranked: int, vocab_size: int) -> int:
    """How many rows of the head to draft over: some on CPU, all elsewhere."""
    return min(DEFAULT_DRAFT_VOCAB, num_ranked) if device == "cpu" else vocab_size
