"""Which drafts stand, and the token after them: greedy, token-level and block verification.

Law: whatever the drafter proposed, the emitted tokens have exactly the target's distribution (at
temperature 0: are exactly the target's choices). Drafts cost speed only. The odds of each outcome
are pure functions (`token_odds`, `block_odds`, `residual`), so a test can add them up; `verify`
only compares them with uniforms. This module keeps no state and knows no cache.

    row j of a step      0        1        ...      k          logits of row j follow token j
    token               anchor   draft 1            draft k
    position            n        n+1                n+k        the token of row a goes to n+a+1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from tandemkv.base.errors import InvariantError
from tandemkv.base.sampling import SamplingParams
from tandemkv.model.sampling import (
    Purpose,
    distribution,
    is_deterministic,
    known_prefix,
    sample,
    uniform,
)


class Verdict(msgspec.Struct, frozen=True):
    """num_accepted: drafts kept, a prefix. token: recovered, or bonus when all were kept."""

    num_accepted: int
    token: int


class Odds(msgspec.Struct, frozen=True):
    """What is decided by uniforms u_1..u_k, one per draft.

    accept[i-1]: draft i passes when u_i is under it. weights[i]: w_i, i = 0..k, the factor of the
    target in the residual after i accepted drafts. last_pass: the accepted run ends at the last
    passing draft (block verification) rather than before the first failing one (token-level).
    """

    accept: list[float]
    weights: list[float]
    last_pass: bool

    def num_accepted(self, uniforms: Sequence[float]) -> int:
        passed = [u < h for u, h in zip(uniforms, self.accept, strict=True)]
        if self.last_pass:
            return max((i for i, ok in enumerate(passed, start=1) if ok), default=0)
        return passed.index(False) if False in passed else len(passed)


def token_odds(p: Tensor, q: Tensor | None, drafts: Sequence[int]) -> Odds:
    """Token-level rejection (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

    p [k+1, V] target, q [k, V] what the drafts were sampled from, None for one-hot at the drafts.
    """
    accept = [_ratio(a, b) for a, b in _drafted(p, q, drafts)]
    return Odds(accept, [1.0] * (len(drafts) + 1), last_pass=False)


def block_odds(p: Tensor, q: Tensor | None, drafts: Sequence[int]) -> Odds:
    """Block verification (Sun et al. 2403.10444): on average never under token-level.

    w_i = min(w_{i-1} p_{i-1}(x_i) / q_i(x_i), 1); Z_i = sum of max(w_i p_i - q_{i+1}, 0);
    draft i < k passes with Z_i / (Z_i + 1 - w_i), 0/0 being 1, and draft k with w_k.
    Arguments as for token_odds.
    """
    weights = [1.0]
    for a, b in _drafted(p, q, drafts):
        weights.append(_ratio(weights[-1] * a, b))
    accept = [
        1.0 if w == 1.0 else z / (z + 1.0 - w)
        for w, z in zip(weights[1:-1], _excess(p, q, drafts, weights), strict=True)
    ]
    return Odds(accept + weights[-1:] if drafts else [], weights, last_pass=True)


def residual(
    p: Tensor, q: Tensor | None, drafts: Sequence[int], weights: Sequence[float], accepted: int
) -> Tensor:
    """[V], not normalised: what the token after `accepted` drafts is sampled from.

    After all k: the bonus, p_k. Else max(w p - q, 0) at the first draft not kept; p itself when
    rounding leaves nothing of it (then p and q are equal and a rejection has no probability).
    """
    if accepted == len(drafts):
        return p[accepted]
    out = p[accepted].double() * weights[accepted]
    if q is None:
        out[drafts[accepted]] = 0.0
    else:
        out = (out - q[accepted]).clamp_min_(0.0)
    return out if bool(out.sum() > 0) else p[accepted]


METHODS: dict[str, Callable[[Tensor, Tensor | None, Sequence[int]], Odds]] = {
    "token": token_odds,
    "block": block_odds,
}


def verify(
    logits: Tensor,
    drafts: Sequence[int],
    draft_probs: Tensor | None,
    params: SamplingParams,
    seed: int,
    position: int,
) -> Verdict:
    """Verify one request's drafts; with no drafts, sample one token.

    logits [>= k+1, V]: processed, row j as if drafts[:j] were accepted. draft_probs [>= k, V]: the
    distribution each draft was really sampled from, None if chosen greedily or looked up (one-hot).
    position: absolute position of the anchor. A draft outside the vocabulary ends the drafts.
    Accept uniforms are keyed by the draft's position and the anchor's; the recovered or bonus
    token takes one uniform of the RESIDUAL stream at its own position.
    """
    drafts = known_prefix(drafts, logits.shape[-1])
    k = len(drafts)
    if logits.shape[0] < k + 1 or (draft_probs is not None and draft_probs.shape[0] < k):
        raise InvariantError(f"{k} drafts need {k + 1} rows of logits and {k} of draft_probs")
    if is_deterministic(params):
        return verify_greedy(logits[: k + 1].argmax(-1).tolist(), drafts)
    p = distribution(logits[: k + 1], params)
    q = None if draft_probs is None else draft_probs[:k].to(p.device)
    odds = METHODS[params.verification](p, q, drafts)
    accepted = odds.num_accepted(
        [uniform(seed, position + i, Purpose.ACCEPT, position) for i in range(1, k + 1)]
    )
    left = residual(p, q, drafts, odds.weights, accepted)
    token = sample(left, uniform(seed, position + accepted + 1, Purpose.RESIDUAL))
    return Verdict(accepted, token)


def verify_greedy(choices: Sequence[int], drafts: Sequence[int]) -> Verdict:
    """choices: the argmax of each of the k+1 rows. Keeps drafts while they are the choices."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
        accepted += 1
    return Verdict(accepted, choices[accepted])


def _drafted(p: Tensor, q: Tensor | None, drafts: Sequence[int]) -> list[tuple[float, float]]:
    """(p, q) of each draft at its own row, in double precision."""
    if not drafts:
        return []
    ids = torch.tensor(list(drafts), device=p.device)[:, None]
    of_p = p[: len(drafts)].gather(-1, ids)[:, 0].tolist()
    of_q = [1.0] * len(drafts) if q is None else q.gather(-1, ids)[:, 0].tolist()
    return list(zip(of_p, of_q, strict=True))


def _ratio(p: float, q: float) -> float:
    """min(p / q, 1); 0 when the target never emits the token, whatever q says."""
    if p <= 0.0:
        return 0.0
    return 1.0 if p >= q else p / q


def _excess(
    p: Tensor, q: Tensor | None, drafts: Sequence[int], weights: Sequence[float]
) -> list[float]:
    """Z_i for i = 1..k-1, summed in double precision."""
    k = len(drafts)
    if k < 2:
        return []
    w = torch.tensor(weights[1:k], dtype=torch.float64, device=p.device)
    if q is None:
        ids = torch.tensor(list(drafts[1:]), device=p.device)[:, None]
        rest = 1.0 - p[1:k].double().gather(-1, ids)[:, 0]
        return (w * rest).tolist()
    return (w[:, None] * p[1:k] - q[1:k]).clamp_min_(0.0).sum(-1).tolist()
