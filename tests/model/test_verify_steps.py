"""Verification step by step: verify() does what its odds say, with uniforms that stay independent.

The odds themselves are proven exactly in test_verify.py; here are the pieces around them: which
uniform decides what, several steps in a row, greedy verification, processors at every row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tandemkv.base.errors import InvariantError
from tandemkv.base.sampling import SamplingParams
from tandemkv.model.sampling import Purpose, distribution, process_logits, sample, uniform
from tandemkv.model.verify import (
    METHODS,
    Verdict,
    residual,
    verify,
    verify_greedy,
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square_z(counts: Tensor, expected: Tensor) -> float:
    df = len(counts) - 1
    chi = float(((counts - expected) ** 2 / expected).sum())
    return ((chi / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


SAMPLED = SamplingParams(temperature=1.0)


def token_params(method: str, **kwargs) -> SamplingParams:
    return SamplingParams(verification=method, **kwargs)


@pytest.mark.parametrize("method", METHODS)
def test_uniforms_on_either_side_of_the_odds_decide(method):
    rows = torch.randn(7, 4, dtype=torch.float64, generator=seeded(20)).softmax(-1)
    p, q, eps = rows[:4], rows[4:], 1e-9
    for drafts in itertools.product(range(4), repeat=3):
        odds = METHODS[method](p, q, drafts)
        for side in itertools.product([True, False], repeat=3):
            possible = all(h > 0 if ok else h < 1 for ok, h in zip(side, odds.accept, strict=True))
            if not possible:
                continue
            us = [h - eps if ok else h for ok, h in zip(side, odds.accept, strict=True)]
            passing = [i for i in range(4) if i == 0 or side[i - 1]]
            first_failing = [*side, False].index(False)
            assert odds.num_accepted(us) == (max(passing) if method == "block" else first_failing)


@pytest.mark.parametrize("method", METHODS)
def test_a_verdict_is_the_odds_at_the_uniforms_of_its_seed_and_position(method):
    logits, drafted = torch.randn(2, 4, 6, dtype=torch.float64, generator=seeded(21))
    params, position = token_params(method, temperature=0.8, top_p=0.95), 17
    q = distribution(drafted, SAMPLED)[:3]
    p = distribution(logits, params)
    seen = set()
    for seed in range(200):
        drafts = [sample(q[i], uniform(seed, 18 + i, Purpose.DRAFT, 17)) for i in range(3)]
        odds = METHODS[method](p, q, drafts)
        us = [uniform(seed, 18 + i, Purpose.ACCEPT, 17) for i in range(3)]
        a = odds.num_accepted(us)
        left = residual(p, q, drafts, odds.weights, a)
        token = sample(left, uniform(seed, 18 + a, Purpose.RESIDUAL))
        assert verify(logits, drafts, q, params, seed, position) == Verdict(a, token)
        seen.add(a)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("method", METHODS)
def test_full_acceptance_emits_one_more_token_from_one_draw(method):
    logits = torch.randn(4, 6, generator=seeded(22))
    params = token_params(method)
    p = distribution(logits, params)
    for seed in range(20):
        drafts = [sample(p[i], uniform(seed, 6 + i, Purpose.DRAFT, 5)) for i in range(3)]
        verdict = verify(logits, drafts, p[:3], params, seed, 5)
        assert verdict == Verdict(3, sample(p[3], uniform(seed, 9, Purpose.RESIDUAL)))


@pytest.mark.parametrize("method", METHODS)
def test_without_drafts_a_token_is_sampled_as_plain_decoding_would(method):
    logits = torch.randn(1, 6, generator=seeded(23))
    params = token_params(method, temperature=0.7)
    for seed in range(20):
        plain = sample(distribution(logits, params)[0], uniform(seed, 6, Purpose.RESIDUAL))
        assert verify(logits, [], None, params, seed, 5) == Verdict(0, plain)
        assert verify(logits, [], torch.empty(0, 6), params, seed, 5) == Verdict(0, plain)


@pytest.mark.parametrize("method", METHODS)
def test_an_impossible_draft_is_rejected_and_a_padding_draft_ends_the_drafts(method):
    logits = torch.randn(3, 6, generator=seeded(24))
    logits[0, 2] = -math.inf
    for seed in range(30):
        wrong = verify(logits, [2, 3], None, token_params(method), seed, 5)
        assert wrong.num_accepted == 0
        assert wrong.token != 2
        q = torch.tensor(
            [[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]] * 2
        )  # not sampled from: a defect elsewhere
        assert verify(logits, [2, 3], q, token_params(method), seed, 5).num_accepted == 0
        padded = verify(logits, [-1, 3], None, token_params(method), seed, 5)
        assert padded == verify(logits[:1], [], None, token_params(method), seed, 5)


@pytest.mark.parametrize("method", METHODS)
def test_with_top_k_one_sampled_drafts_are_accepted_as_greedy_ones(method):
    logits = torch.randn(4, 6, generator=seeded(25))
    params = token_params(method, top_k=1)
    best = logits.argmax(-1).tolist()
    q = distribution(logits[:3], params)  # the drafter samples inside the request's top-k
    drafts = [sample(q[i], uniform(1, 6 + i, Purpose.DRAFT, 5)) for i in range(3)]
    assert verify(logits, drafts, q, params, 1, 5) == Verdict(3, best[3])
    greedy = SamplingParams(temperature=0.0)
    for drafts in itertools.product([0, best[0]], [0, best[1]], [0, best[2]]):
        assert verify(logits, drafts, None, params, 1, 5) == verify(
            logits, drafts, None, greedy, 9, 7
        )
    unfiltered = [sample(distribution(logits, SAMPLED)[i], 0.999) for i in range(3)]
    assert verify(logits, unfiltered, None, params, 1, 5).num_accepted < 3


def test_the_drafters_distribution_reaches_the_verifier():
    """Told q, min(p, q) is accepted; told None the law stays but AL falls."""
    p, q, n = [0.6, 0.3, 0.1], [0.1, 0.8, 0.1], 6000
    logits, probs = torch.tensor([p, p]).log(), torch.tensor([q])

    def outcome(told: Tensor | None) -> tuple[float, float]:
        counts, accepted = torch.zeros(3, dtype=torch.float64), 0
        for seed in range(n):
            draft = sample(probs[0], uniform(seed, 1, Purpose.DRAFT, 0))
            verdict = verify(logits, [draft], told, SAMPLED, seed, 0)
            counts[draft if verdict.num_accepted else verdict.token] += 1
            accepted += verdict.num_accepted
        z = chi_square_z(counts, n * torch.tensor(p, dtype=torch.float64))
        return z, accepted / n

    z, rate = outcome(probs)
    assert abs(z) < 4
    assert rate == pytest.approx(0.1 + 0.3 + 0.1, abs=0.02)
    z, rate = outcome(None)
    assert abs(z) < 4
    assert rate == pytest.approx(0.1 * 0.6 + 0.8 * 0.3 + 0.1 * 0.1, abs=0.02)
    z, _ = outcome(torch.softmax(probs.log() / 0.5, -1))
    assert z > 8  # a q that was not sampled from is rejected


def test_too_few_rows_are_a_defect_and_said_so():
    with pytest.raises(InvariantError, match="2 drafts need 3 rows"):
        verify(torch.zeros(2, 4), [1, 2], None, SAMPLED, 0, 0)
    with pytest.raises(InvariantError, match="2 drafts need 3 rows"):
        verify(torch.zeros(3, 4), [1, 2], torch.full((1, 4), 0.25), SAMPLED, 0, 0)


# ------------------------------------------------------------------ random numbers across steps


P2, Q2 = [0.5, 0.5], [0.1, 0.9]


def emitted(seed: int, length: int, key_of: Callable[[int], int], draft_as: Purpose) -> list[int]:
    """Steps of block verification with two drafts each; key_of: the anchor given to the key."""
    p, q = torch.tensor([P2] * 3), torch.tensor([Q2] * 2)
    out: list[int] = []
    while len(out) < length:
        n = len(out)  # the anchor's position; drafts at n+1, n+2
        key = key_of(n)
        drafts = [sample(q[i], uniform(seed, n + 1 + i, draft_as, key)) for i in range(2)]
        odds = METHODS["block"](p, q, drafts)
        a = odds.num_accepted([uniform(seed, n + 1 + i, Purpose.ACCEPT, key) for i in range(2)])
        left = residual(p, q, drafts, odds.weights, a)
        verdict = Verdict(a, sample(left, uniform(seed, n + 1 + a, Purpose.RESIDUAL)))
        if key == n and draft_as is Purpose.DRAFT:
            assert verdict == verify(
                p.log(), drafts, q, SamplingParams(verification="block"), seed, n
            )
        out += [*drafts[:a], verdict.token]
    return out[:length]


def z_of_emitted(key_of: Callable[[int], int], draft_as: Purpose = Purpose.DRAFT) -> float:
    n, counts = 3000, torch.zeros(8, dtype=torch.float64)
    for seed in range(n):
        run = emitted(seed, 3, key_of, draft_as)
        counts[run[0] * 4 + run[1] * 2 + run[2]] += 1
    return chi_square_z(counts, torch.full((8,), n / 8, dtype=torch.float64))


def test_several_steps_together_keep_the_targets_law():
    assert abs(z_of_emitted(lambda anchor: anchor)) < 4


def test_uniforms_keyed_by_position_alone_are_seen_under_block_verification():
    """A rejected block says that the uniforms past the accepted run were unlucky; reuse biases."""
    assert z_of_emitted(lambda anchor: 0) > 6


def test_the_accept_stream_used_for_drafting_is_seen():
    assert z_of_emitted(lambda anchor: anchor, draft_as=Purpose.ACCEPT) > 6


# ------------------------------------------------------------------ greedy

GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("drafts", "verdict"),
    [
        ([3, 1, 4], Verdict(3, 1)),
        ([3, 1, 9], Verdict(2, 4)),
        ([3, 9, 4], Verdict(1, 1)),
        ([9, 1, 4], Verdict(0, 3)),
        ([3, 1], Verdict(2, 4)),
        ([], Verdict(0, 3)),
        ([3, -1, 4], Verdict(1, 1)),
    ],
)
def test_greedy_keeps_drafts_while_they_are_the_targets_choices(drafts, verdict):
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 1]), 10).float()
    for method in METHODS:
        params = token_params(method, temperature=0.0)
        assert verify(logits, drafts, None, params, 0, 0) == verdict
        assert verify_greedy([3, 1, 4, 1], drafts) == verdict
        q = torch.full((max(len(drafts), 1), 10), 0.1)
        assert verify(logits, drafts, q, params, 1, 5) == verdict


def model(context: Sequence[int]) -> Tensor:
    """A tiny target that loves token 3 and depends on its last two tokens; [V]."""
    logits = torch.randn(8, generator=seeded(100 * context[-1] + context[-2]))
    logits[3] += 3.0
    return logits


def plain(prompt: list[int], params: SamplingParams, length: int) -> list[int]:
    out: list[int] = []
    while len(out) < length:
        row = process_logits(model(prompt + out)[None], params, prompt, out, (), [0])
        out.append(verify(row, [], None, params, 0, 0).token)
    return out


def speculative(prompt: list[int], params: SamplingParams, length: int, guess: list[int]):
    """Drafts are right by `guess` but for every third, which is wrong."""
    out: list[int] = []
    accepted = 0
    while len(out) < length:
        n = len(out)
        drafts = [(t + (n + i) % 3 // 2) % 8 for i, t in enumerate(guess[n : n + 3])]
        packed = torch.stack([model(prompt + out + drafts[:i]) for i in range(len(drafts) + 1)])
        packed = process_logits(packed, params, prompt, out, drafts, [0])
        verdict = verify(packed, drafts, None, params, 0, 0)
        out += [*drafts[: verdict.num_accepted], verdict.token]
        accepted += verdict.num_accepted
    return out[:length], accepted


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 2.0},
        {"logit_bias": {5: 4.0}},
        {"min_tokens": 6, "stop_token_ids": (3,)},
    ],
)
def test_greedy_output_with_every_processor_equals_plain_decoding(asked):
    params = SamplingParams(temperature=0.0, max_tokens=30, **asked)
    expected = plain([1, 2], params, 30)
    out, accepted = speculative([1, 2], params, 30, expected)
    assert out == expected
    assert accepted >= 10
    assert not asked or expected != plain([1, 2], GREEDY, 30)
