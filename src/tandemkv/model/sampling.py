"""From logits to a token: processors, the sampled distribution, counter-based random numbers.

Law: the distribution returned is the one sampled from, for target and drafter alike; a processed
row j is what plain decoding would see had drafts[:j] been emitted; a uniform is a pure function of
its key, so nothing depends on batching, chunking or the order of calls. No function here edits its
arguments or keeps state, so a rejected draft leaves no trace. This module accepts and rejects
nothing: verify.py does.

Order, as in vLLM and Hugging Face: bias, min_tokens, repetition, frequency, presence (these edit
logits); then temperature, top-k, top-p, min-p (these make the distribution).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b

import torch
from torch import Tensor

from tandemkv.base.errors import InvariantError, RequestError
from tandemkv.base.logprobs import TokenLogprobs
from tandemkv.base.sampling import SamplingParams

MIN_TEMPERATURE = 1e-6
"""Temperatures between 0 and this act as this: dividing by less only overflows."""
TOP_P_CANDIDATES = 1024
"""How many best tokens top-p looks at before it falls back on sorting the whole vocabulary."""


class Purpose(IntEnum):
    """What a uniform decides; streams of different purposes are independent."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2


def uniform(seed: int, position: int, purpose: Purpose, anchor: int | None = None) -> float:
    """A uniform in [0, 1), 53 bits, the same on every platform: a hash of its key, no state.

    position: of the token decided. anchor: position of the anchor of the step that decides;
    needed for DRAFT and ACCEPT, unused for RESIDUAL. A position may be drafted in several steps
    but is emitted once. Block verification looks at every position of a step, so the numbers past
    the accepted run are known to be unlucky: the next step must not see them again.
    """
    if purpose is Purpose.RESIDUAL:
        anchor = position
    elif anchor is None:
        raise InvariantError(
            f"a uniform for {purpose.name} needs the position of its step's anchor"
        )
    key = struct.pack("<Qqqq", seed & (2**64 - 1), position, anchor, purpose)
    (bits,) = struct.unpack("<Q", blake2b(key, digest_size=8, person=b"tandemkv").digest())
    return (bits >> 11) * 2.0**-53


def is_deterministic(params: SamplingParams) -> bool:
    """Whether only the best token can be emitted: temperature 0 or top_k 1."""
    return params.greedy or params.top_k == 1


def known_prefix(drafts: Sequence[int], vocab_size: int) -> Sequence[int]:
    """The drafts before the first id outside [0, vocab_size): what may be indexed at all."""
    for i, token in enumerate(drafts):
        if not 0 <= token < vocab_size:
            return drafts[:i]
    return drafts


# ------------------------------------------------------------------ processors


def process_logits(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    drafts: Sequence[int] = (),
    eos_token_ids: Sequence[int] = (),
) -> Tensor:
    """Apply penalties, bias and min_tokens; row j as if drafts[:j] had been emitted.

    logits [r, V] of r = 1 + len(drafts) rows, not edited; returned as they are when no parameter
    changes them. output: tokens emitted so far, the anchor included. presence and frequency
    penalties count output tokens (OpenAI); the repetition penalty divides positive and multiplies
    negative logits of tokens in prompt or output (Keskar et al. 1909.05858). While fewer than
    min_tokens are emitted, stop_token_ids and (unless ignore_eos) eos_token_ids get -inf.
    """
    if not params.changes_logits:
        return logits
    out = logits.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=out.device)
        out[:, ids] += torch.tensor(list(params.logit_bias.values())).to(out)
    _mask_stops(out, params, len(output), eos_token_ids)
    drafts = known_prefix(drafts, out.shape[-1])
    if params.repetition_penalty != 1.0:
        seen = _counts(out, (*prompt, *output), drafts) > 0
        scaled = torch.where(
            out > 0, out / params.repetition_penalty, out * params.repetition_penalty
        )
        out = torch.where(seen, scaled, out)
    if params.frequency_penalty or params.presence_penalty:
        counts = _counts(out, output, drafts)
        out -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return out


def _mask_stops(out: Tensor, params: SamplingParams, num_output: int, eos: Sequence[int]) -> None:
    rows = min(params.min_tokens - num_output, out.shape[0])
    ids = [*params.stop_token_ids, *(() if params.ignore_eos else eos)]
    if rows > 0 and ids:
        out[:rows, torch.tensor(ids, device=out.device)] = float("-inf")


def _counts(like: Tensor, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor:
    """[r, V] in the dtype of `like`: how often each token occurs in tokens + drafts[:row]."""
    ids = torch.tensor(list(tokens), dtype=torch.long)
    counts = torch.bincount(ids, minlength=like.shape[-1]).to(like).repeat(like.shape[0], 1)
    for row, token in enumerate(drafts, start=1):
        counts[row:, token] += 1
    return counts


# ------------------------------------------------------------------ distributions


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that is sampled: [r, V] processed logits to [r, V] probabilities.

    Temperature, top-k (ties with the k-th stay), top-p over what top-k left (a token stays while
    the mass before it, best first, lower id first among equals, is under p: the best one always
    stays), min-p (at least min_p times the best). One-hot at the argmax when only the best token
    can be emitted. float64 in, float64 out; anything else is computed and returned as float32.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if is_deterministic(params):
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    shifted = logits - logits.amax(-1, keepdim=True)
    probs = (shifted / max(params.temperature, MIN_TEMPERATURE)).softmax(-1)
    if 0 < params.top_k < probs.shape[-1]:
        probs = _keep(probs, probs >= probs.topk(params.top_k).values[..., -1:])
    if params.top_p < 1.0:
        probs = _keep(probs, torch.stack([_nucleus(row, params.top_p) for row in probs]))
    if params.min_p > 0.0:
        probs = _keep(probs, probs >= params.min_p * probs.amax(-1, keepdim=True))
    return probs


def draft_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """What a drafter samples from: the request's own filters, no bias and no history.

    logits [r, V] in the target's vocabulary, -inf where the drafter has no token. Penalties, bias
    and min_tokens stay on the target's side: they change the output, the filters also change AL.
    """
    return distribution(logits, params)


def _keep(probs: Tensor, mask: Tensor) -> Tensor:
    kept = torch.where(mask, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """[V] bool: tokens whose mass before is under top_p. Sorts only as many as it must."""
    size = probs.shape[0]
    if size > TOP_P_CANDIDATES:
        best = probs.topk(TOP_P_CANDIDATES).indices.sort().values
        order, kept = _nucleus_of(probs, best, top_p)
        # the order of equals is settled only if the cut lies above the last candidate's value
        if kept < len(order) and probs[order[kept]] > probs[order[-1]]:
            return torch.zeros_like(probs, dtype=torch.bool).index_fill_(0, order[:kept], True)
    order, kept = _nucleus_of(probs, torch.arange(size, device=probs.device), top_p)
    return torch.zeros_like(probs, dtype=torch.bool).index_fill_(0, order[:kept], True)


def _nucleus_of(probs: Tensor, ids: Tensor, top_p: float) -> tuple[Tensor, int]:
    """ids (ascending) best first, and how many of them have less than top_p before them."""
    values, order = probs[ids].double().sort(descending=True, stable=True)
    before = values.cumsum(0) - values
    return ids[order], max(1, int((before < top_p).sum()))


def sample(probs: Tensor, u: float) -> int:
    """The token at u of the inverse CDF. probs [V], non-negative, need not sum to one; u in [0, 1).

    A token of no mass is never returned. Raises RequestError for NaN or no mass at all: the
    request whose row it is ends, no other.
    """
    cdf = probs.cumsum(0, dtype=torch.float64)
    total = float(cdf[-1])
    if not 0.0 < total < float("inf"):
        raise RequestError(f"cannot sample: the probabilities sum to {total}", status=500)
    token = int(torch.searchsorted(cdf, torch.tensor(u * total).to(cdf), right=True))
    return token if token < len(probs) else int(probs.nonzero()[-1])


# ------------------------------------------------------------------ reports


def token_logprobs(logits: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log probabilities of tokens[i] under logits[i], with the k best of each row.

    logits [>= len(tokens), V]: the target's RAW logits, before processors, temperature and
    filters (the OpenAI API's meaning and vLLM's default `raw_logprobs`), so that a token's value
    does not depend on how it was sampled.
    """
    if not tokens:
        return []
    rows = logits[: len(tokens)].float().log_softmax(-1)
    chosen = rows.gather(-1, torch.tensor(list(tokens), device=rows.device)[:, None])[:, 0].tolist()
    best = rows.topk(min(k, rows.shape[-1]))
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, chosen, tops, strict=True)
    ]


def top2_gap(logits: Tensor) -> Tensor:
    """[r, V] to [r]: best minus second best logit of each row; inf when there is no second."""
    if logits.shape[-1] < 2:
        return torch.full(logits.shape[:-1], float("inf"), device=logits.device)
    best = logits.topk(2).values
    return best[..., 0] - best[..., 1]
