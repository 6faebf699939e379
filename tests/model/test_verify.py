"""Verification, proven by adding up every outcome on tiny vocabularies, with controls that fail.

The product's own odds and residual are integrated over the uniforms analytically: no sampling, so
errors of 1e-12 are seen. Each control changes one thing that has gone wrong somewhere and must
show. Sampled tests exist only for the random-number plumbing between the pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tandemkv.base.sampling import SamplingParams
from tandemkv.model.sampling import distribution, process_logits
from tandemkv.model.verify import (
    METHODS,
    Odds,
    residual,
)

History = tuple[int, ...]
Rows = Callable[[History], Tensor]
EXACT = 1e-12


@dataclass
class Tables:
    """History-dependent target and draft distributions over a tiny vocabulary, up to a depth."""

    vocab: int
    p: dict[History, Tensor]
    q: dict[History, Tensor]

    @classmethod
    def random(cls, vocab: int, depth: int, seed: int, top_p: float = 0.95) -> Tables:
        generator = torch.Generator().manual_seed(seed)
        params = SamplingParams(temperature=0.9, top_p=top_p)
        p: dict[History, Tensor] = {}
        q: dict[History, Tensor] = {}
        for length in range(depth + 1):
            for history in itertools.product(range(vocab), repeat=length):
                logits = 1.5 * torch.randn(2, vocab, generator=generator, dtype=torch.float64)
                p[history] = distribution(logits[:1], params)[0]
                q[history] = 0.5 * p[history] + 0.5 * distribution(logits[1:], params)[0]
        return cls(vocab, p, q)

    def target_law(self, length: int) -> Tensor:
        return completed({(): 1.0}, self.p, self.vocab, length)


def completed(mass: dict[History, float], p: dict[History, Tensor], vocab: int, length: int):
    """The law of `length` tokens when each prefix of `mass` is continued by the target. Flat."""
    mass = dict(mass)
    for n in range(length):
        for history in itertools.product(range(vocab), repeat=n):
            start = mass.pop(history, 0.0)
            if start:
                for token, x in enumerate(p[history].tolist()):
                    mass[(*history, token)] = mass.get((*history, token), 0.0) + start * x
    every = itertools.product(range(vocab), repeat=length)
    return torch.tensor([mass.get(history, 0.0) for history in every], dtype=torch.float64)


def stop_law(odds: Odds) -> list[float]:
    """P(accepted = a), a = 0..k, for independent uniforms."""
    k = len(odds.accept)
    if odds.last_pass:  # the last passing draft: a passes, everything after fails
        tail = [math.prod(1 - h for h in odds.accept[i:]) for i in range(k + 1)]
        return [tail[0], *(odds.accept[i - 1] * tail[i] for i in range(1, k + 1))]
    head = [math.prod(odds.accept[:i]) for i in range(k + 1)]
    return [*(head[i] * (1 - odds.accept[i]) for i in range(k)), head[k]]


Residual = Callable[[Tensor, "Tensor | None", Sequence[int], Sequence[float], int], Tensor]


def one_step(
    tables: Tables,
    method: str,
    k: int,
    *,
    declared: dict[History, Tensor] | None = None,
    one_hot: bool = False,
    odds_of: Callable[[Odds], Odds] = lambda odds: odds,
    residual_of: Residual = residual,
    target: dict[History, Tensor] | None = None,
    kept: Callable[[History], int] | None = None,
) -> tuple[dict[History, float], float]:
    """Mass of every emitted run after one step with k drafts, and the mean acceptance length.

    Drafts are sampled from tables.q (or are its argmax, declared one-hot, when one_hot).
    declared: the q that verification is told; target: the p that it is told. kept: of these
    drafts, how many are sent to verification (None: all).
    """
    p_of, q_of = target or tables.p, declared or tables.q
    mass: dict[History, float] = {}
    al = 0.0
    for drafts in itertools.product(range(tables.vocab), repeat=k):
        steps = [(tables.q[drafts[:i]], token) for i, token in enumerate(drafts)]
        if one_hot:
            weight = float(all(int(q.argmax()) == token for q, token in steps))
        else:
            weight = math.prod(float(q[token]) for q, token in steps)
        if weight == 0.0:
            continue
        drafts = drafts[: len(drafts) if kept is None else kept(drafts)]
        num = len(drafts)
        p = torch.stack([p_of[drafts[:i]] for i in range(num + 1)])
        q = torch.stack([q_of[drafts[:i]] for i in range(num)]) if num else p[:0]
        told = None if one_hot and declared is None else q
        odds = odds_of(METHODS[method](p, told, drafts))
        for accepted, chance in enumerate(stop_law(odds)):
            al += weight * chance * (accepted + 1)
            left = residual_of(p, told, drafts, odds.weights, accepted)
            for token, x in enumerate((left / left.sum()).tolist()):
                run = (*drafts[:accepted], token)
                mass[run] = mass.get(run, 0.0) + weight * chance * x
    return mass, al


def error(tables: Tables, mass: dict[History, float], length: int) -> float:
    law = completed(mass, tables.p, tables.vocab, length)
    assert float(law.sum()) == pytest.approx(1.0, abs=EXACT)
    return float((law - tables.target_law(length)).abs().max())


# ------------------------------------------------------------------ the law

SIZES = [(2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (4, 2), (5, 1), (5, 3)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("vocab", "depth"), SIZES)
def test_the_output_has_exactly_the_targets_law(method, vocab, depth):
    tables = Tables.random(vocab, depth, seed=vocab * 10 + depth)
    for k in range(depth + 1):  # ragged: any number of drafts, none included
        mass, _ = one_step(tables, method, k)
        assert error(tables, mass, depth + 1) <= EXACT
        assert k == 0 or max(len(run) for run in mass) == k + 1


def survival(drafts: History) -> int:
    """A confidence rule: whether draft j is kept depends on the drafts before it alone."""
    kept = 0
    while kept < len(drafts) and sum(drafts[:kept]) < 2:
        kept += 1
    return kept


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("vocab", "depth"), [(2, 3), (3, 3), (4, 2)])
def test_a_block_cut_by_what_came_before_the_cut_has_the_targets_law(method, vocab, depth):
    tables = Tables.random(vocab, depth, seed=vocab)
    mass, al = one_step(tables, method, depth, kept=survival)
    assert error(tables, mass, depth + 1) <= EXACT
    whole = one_step(tables, method, depth)[1]
    assert 1.0 < al < whole


@pytest.mark.parametrize("method", METHODS)
def test_a_cut_that_looks_at_the_draft_it_drops_is_biased(method):
    tables = Tables.random(3, 2, seed=3)
    mass, _ = one_step(tables, method, 2, kept=lambda drafts: 1 if drafts[1] == 0 else 2)
    assert error(tables, mass, 3) > 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_argmax_and_looked_up_drafts_are_one_hot(method, vocab):
    tables = Tables.random(vocab, 3, seed=vocab)
    for k in range(4):
        mass, al = one_step(tables, method, k, one_hot=True)
        assert error(tables, mass, 4) <= EXACT
    hot = {h: (torch.arange(vocab) == q.argmax()).double() for h, q in tables.q.items()}
    spelled_out, same_al = one_step(tables, method, 3, one_hot=True, declared=hot)
    assert error(tables, spelled_out, 4) <= EXACT
    assert same_al == pytest.approx(al, abs=EXACT)


@pytest.mark.parametrize("k", range(4))
def test_block_verification_is_never_shorter_on_average(k):
    gains = []
    for seed in range(8):
        tables = Tables.random(3, 3, seed)
        gains.append(one_step(tables, "block", k)[1] - one_step(tables, "token", k)[1])
    assert min(gains) >= -EXACT
    assert max(gains) > 0.01 if k > 1 else max(gains) <= EXACT


def test_block_verification_takes_the_last_draft_that_passes_not_the_first_that_fails():
    tables = Tables.random(2, 2, seed=5)
    mass, _ = one_step(tables, "block", 2)
    assert error(tables, mass, 3) <= EXACT
    first_fail, _ = one_step(
        tables, "block", 2, odds_of=lambda o: Odds(o.accept, o.weights, last_pass=False)
    )
    assert error(tables, first_fail, 3) > 1e-3


# ------------------------------------------------------------------ adversarial drafters


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_is_the_target_has_every_draft_accepted(method):
    tables = Tables.random(4, 3, seed=1)
    tables.q = tables.p
    mass, al = one_step(tables, method, 3)
    assert al == pytest.approx(4.0, abs=EXACT)
    assert error(tables, mass, 4) <= EXACT


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_with_another_support_has_every_draft_rejected(method):
    tables = Tables.random(4, 3, seed=2)
    for history, p in tables.p.items():
        swap = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
        tables.p[history] = (p + 0.1) * swap / ((p + 0.1) * swap).sum()
        tables.q[history] = (1 - swap) / 2
    mass, al = one_step(tables, method, 3)
    assert al == pytest.approx(1.0, abs=EXACT)
    assert error(tables, mass, 4) <= EXACT


@pytest.mark.parametrize("method", METHODS)
def test_a_uniform_drafter_costs_speed_only(method):
    tables = Tables.random(4, 2, seed=3)
    tables.q = {h: torch.full((4,), 0.25, dtype=torch.float64) for h in tables.q}
    mass, al = one_step(tables, method, 2)
    assert 1.0 < al < 3.0
    assert error(tables, mass, 3) <= EXACT


@pytest.mark.parametrize("method", METHODS)
def test_tokens_outside_top_p_are_never_emitted(method):
    tables = Tables.random(5, 2, seed=4, top_p=0.6)
    tables.q = {h: torch.full((5,), 0.2, dtype=torch.float64) for h in tables.q}
    mass, _ = one_step(tables, method, 2)
    assert any(float(p.min()) == 0.0 for p in tables.p.values())
    for run, x in mass.items():
        inside = all(tables.p[run[:i]][token] > 0 for i, token in enumerate(run))
        assert inside or x == 0.0


# ------------------------------------------------------------------ controls: each must fail


def test_a_residual_without_its_weight_is_seen_though_the_acceptance_length_is_the_same():
    tables = Tables.random(5, 3, seed=9)

    def unweighted(p, q, drafts, weights, accepted):
        return residual(p, q, drafts, [1.0] * len(weights), accepted)

    right, al = one_step(tables, "block", 3)
    wrong, wrong_al = one_step(tables, "block", 3, residual_of=unweighted)
    assert error(tables, right, 4) <= EXACT
    assert error(tables, wrong, 4) > 1e-5
    assert wrong_al == al


def test_the_weight_in_place_of_the_odds_is_seen_and_inflates_the_acceptance_length():
    tables = Tables.random(5, 3, seed=9)
    wrong, wrong_al = one_step(
        tables, "block", 3, odds_of=lambda o: Odds(o.weights[1:], o.weights, o.last_pass)
    )
    assert error(tables, wrong, 4) > 1e-3
    assert wrong_al > one_step(tables, "block", 3)[1] + 0.01


@pytest.mark.parametrize("method", METHODS)
def test_a_declared_q_that_was_not_sampled_from_is_seen(method):
    tables = Tables.random(4, 2, seed=10)
    declared = {h: (q**0.7) / (q**0.7).sum() for h, q in tables.q.items()}
    mass, _ = one_step(tables, method, 2, declared=declared)
    assert error(tables, mass, 3) > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_softmax_q_for_argmax_drafts_is_seen(method):
    tables = Tables.random(3, 2, seed=11)
    mass, _ = one_step(tables, method, 2, one_hot=True, declared=tables.q)
    assert error(tables, mass, 3) > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_one_uniform_for_drafting_and_accepting_is_seen(method):
    tables = Tables.random(4, 1, seed=12)

    def law(shared: bool) -> dict[History, float]:
        """One draft; x is drafted where u is in its cell of the CDF of q, kept where u < h."""
        p, q = torch.stack([tables.p[()]] * 2), tables.q[()][None]
        mass = {(token,): 0.0 for token in range(4)}
        edges = [0.0, *q[0].cumsum(0).tolist()]
        for x in range(4):
            odds = METHODS[method](p, q, [x])
            cell = edges[x + 1] - edges[x]
            kept = min(max(odds.accept[0] - edges[x], 0.0), cell) if shared else None
            kept = cell * odds.accept[0] if kept is None else kept
            mass[(x,)] += kept
            left = residual(p, q, [x], odds.weights, 0)
            for token, share in enumerate((left / left.sum()).tolist()):
                mass[(token,)] += (cell - kept) * share
        return mass

    assert error(tables, law(shared=False), 1) <= EXACT
    assert error(tables, law(shared=True), 1) > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_ignore_the_drafts_before_them_are_seen(method):
    """The target's law under a frequency penalty, rows processed together against one by one."""
    params = SamplingParams(frequency_penalty=2.0, repetition_penalty=1.5)
    generator = torch.Generator().manual_seed(13)
    base = {
        h: torch.randn(1, 3, generator=generator, dtype=torch.float64)
        for n in range(3)
        for h in itertools.product(range(3), repeat=n)
    }
    plain = {h: distribution(process_logits(x, params, [], h), params)[0] for h, x in base.items()}
    drafted = Tables.random(3, 2, seed=14).q
    tables = Tables(3, plain, drafted)

    def told(history: History, drafts: History) -> Tensor:
        packed = torch.cat([base[history[:i]] for i in range(len(history) + 1)])
        return distribution(process_logits(packed, params, [], [], drafts), params)[-1]

    right = {h: told(h, h) for h in base}
    ignoring = {h: told(h, ()) for h in base}
    assert error(tables, one_step(tables, method, 2, target=right)[0], 3) <= EXACT
    assert error(tables, one_step(tables, method, 2, target=ignoring)[0], 3) > 1e-3
