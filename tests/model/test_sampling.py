"""Sampling: what each parameter does to a row, the sampled distribution, the random numbers."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandemkv.base.errors import InvariantError, RequestError
from tandemkv.base.logprobs import TokenLogprobs
from tandemkv.base.sampling import SamplingParams
from tandemkv.model import sampling
from tandemkv.model.sampling import (
    Purpose,
    distribution,
    draft_distribution,
    known_prefix,
    process_logits,
    sample,
    token_logprobs,
    top2_gap,
    uniform,
)

INF = float("inf")
EOS = 1
V = 12


def rows(num_rows: int, seed: int = 0, vocab: int = V) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_rows, vocab, generator=generator, dtype=torch.float64)


def chi_square_z(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Wilson-Hilferty: chi-square of counts against expected, as a standard normal deviate."""
    df = len(counts) - 1
    chi = float(((counts - expected) ** 2 / expected).sum())
    return ((chi / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


# ------------------------------------------------------------------ uniforms


def test_a_uniform_is_a_pure_function_of_its_key_on_every_platform():
    assert uniform(0, 0, Purpose.RESIDUAL) == 0.007206623430586312
    assert uniform(7, 11, Purpose.DRAFT, 9) == 0.9386706053963948
    assert uniform(-1, 2**40, Purpose.ACCEPT, 3) == 0.4387695800023843


def test_every_part_of_the_key_matters():
    keys = [
        (seed, position, purpose, anchor)
        for seed in (0, 1, 2**63)
        for position in (5, 6)
        for purpose in (Purpose.DRAFT, Purpose.ACCEPT)
        for anchor in (3, 4)
    ]
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_uniforms_fill_the_unit_interval_evenly_and_purposes_are_independent():
    n, bins = 20_000, 8
    pairs = torch.tensor(
        [[uniform(s, 3, purpose, 2) for purpose in Purpose] for s in range(n)], dtype=torch.float64
    )
    assert pairs.min() >= 0
    assert pairs.max() < 1
    cell = (pairs * bins).long()
    for a, b in ((0, 1), (0, 2), (1, 2)):
        counts = torch.bincount(cell[:, a] * bins + cell[:, b], minlength=bins * bins).double()
        assert abs(chi_square_z(counts, torch.full_like(counts, n / bins**2))) < 4
    same = torch.bincount(cell[:, 0] * bins + cell[:, 0], minlength=bins * bins).double()
    assert chi_square_z(same, torch.full_like(same, n / bins**2)) > 50  # the check can fail


def test_a_draft_or_accept_uniform_without_its_anchor_is_refused():
    for purpose in (Purpose.DRAFT, Purpose.ACCEPT):
        with pytest.raises(InvariantError, match="anchor"):
            uniform(0, 1, purpose)


def test_the_residual_stream_does_not_depend_on_how_the_steps_fell():
    assert uniform(3, 9, Purpose.RESIDUAL, 8) == uniform(3, 9, Purpose.RESIDUAL, 5)


# ------------------------------------------------------------------ processors


def test_without_a_parameter_that_edits_logits_the_rows_come_back_untouched():
    logits = rows(3)
    assert process_logits(logits, SamplingParams(), [1], [2], [3, 4], [EOS]) is logits


EDITING = {
    "frequency_penalty": 1.5,
    "presence_penalty": 1.5,
    "repetition_penalty": 1.7,
    "logit_bias": {4: 3.0},
    "min_tokens": 9,
}


@pytest.mark.parametrize("name", EDITING)
def test_every_parameter_edits_every_row_as_plain_decoding_would(name):
    params = SamplingParams(**{name: EDITING[name]}, max_tokens=20)
    logits, prompt, output, drafts = rows(4), [2, 3], [5, 5, 8], [7, 5, 9]
    before = logits.clone()
    together = process_logits(logits, params, prompt, output, drafts, [EOS])
    for j in range(4):
        alone = process_logits(logits[j : j + 1], params, prompt, output + drafts[:j], (), [EOS])
        assert torch.equal(together[j], alone[0])
        assert not torch.equal(together[j], logits[j])
    assert torch.equal(logits, before)  # raw logits stay raw: log probabilities are of these


@pytest.mark.parametrize("name", ["frequency_penalty", "repetition_penalty", "min_tokens"])
def test_a_row_that_ignores_the_drafts_before_it_is_seen(name):
    params = SamplingParams(**{name: EDITING[name] if name != "min_tokens" else 4}, max_tokens=20)
    logits, output, drafts = rows(4), [5, 5, 8], [7, 5, 9]
    right = process_logits(logits, params, [2], output, drafts, [EOS])
    ignoring = torch.cat(
        [process_logits(logits[j : j + 1], params, [2], output, (), [EOS]) for j in range(4)]
    )
    assert torch.equal(right[0], ignoring[0])
    assert not torch.equal(right, ignoring)


def test_penalties_are_the_published_formulas():
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0]])
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    out = process_logits(logits, params, [0, 0, 0], [1, 1, 2])
    assert out.tolist() == [[2.0, -2.0 - 1.0 - 0.25, 1.0 - 0.5 - 0.25, 1.0]]
    out = process_logits(logits, SamplingParams(repetition_penalty=2.0), [0], [1])
    assert out.tolist() == [[1.0, -4.0, 1.0, 1.0]]


def test_presence_and_frequency_count_output_only_and_repetition_the_prompt_too():
    logits = rows(1)
    openai = SamplingParams(frequency_penalty=1.0, presence_penalty=1.0)
    assert torch.equal(process_logits(logits, openai, [3, 4], []), logits)
    hf = process_logits(logits, SamplingParams(repetition_penalty=1.5), [3, 4], [])
    assert (hf != logits).nonzero()[:, 1].tolist() == [3, 4]


def test_min_tokens_masks_eos_and_stop_tokens_row_by_row():
    params = SamplingParams(min_tokens=3, max_tokens=9, stop_token_ids=(6,))
    out = process_logits(rows(4), params, [], [2], [3, 4, 5], [EOS])  # 1, 2, 3, 4 emitted before
    assert (out == -INF).nonzero().tolist() == [[0, EOS], [0, 6], [1, EOS], [1, 6]]
    ignoring = SamplingParams(min_tokens=3, max_tokens=9, ignore_eos=True)
    assert torch.isfinite(process_logits(rows(2), ignoring, [], [2], [3], [EOS])).all()


def test_a_rejected_draft_leaves_no_trace_in_the_penalties():
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.3)
    output = [5]
    process_logits(rows(4), params, [2], output, [7, 8, 9])  # proposed; only 7 stands
    output += [7, 3]
    after = process_logits(rows(1, seed=1), params, [2], output)
    assert torch.equal(after, process_logits(rows(1, seed=1), params, [2], [5, 7, 3]))
    tainted = process_logits(rows(1, seed=1), params, [2], [5, 7, 8, 9, 7, 3])
    assert not torch.equal(after, tainted)


def test_a_draft_outside_the_vocabulary_is_never_indexed():
    assert known_prefix([3, -1, 4], V) == [3]
    assert known_prefix([3, V], V) == [3]
    params = SamplingParams(frequency_penalty=1.0)
    out = process_logits(rows(4), params, [], [2], [3, -1, 4])
    assert torch.equal(out[:2], process_logits(rows(4)[:2], params, [], [2], [3]))


# ------------------------------------------------------------------ distributions


def naive(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """One row by the book: every filter a loop over sorted tokens."""
    weight = {i: math.exp(x / params.temperature) for i, x in enumerate(logits.tolist())}
    if params.top_k:
        cut = sorted(weight.values(), reverse=True)[: params.top_k][-1]
        weight = {i: w for i, w in weight.items() if w >= cut}
    total, before, kept = sum(weight.values()), 0.0, {}
    for i, w in sorted(weight.items(), key=lambda item: (-item[1], item[0])):
        if before < params.top_p:
            kept[i] = w
        before += w / total
    best = max(kept.values())
    kept = {i: w for i, w in kept.items() if w >= params.min_p * best}
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 2, 5, V, 3 * V]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_the_distribution_is_the_filters_by_the_book(seed, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = rows(3, seed)
    out = distribution(logits, params)
    for row, probs in zip(logits, out, strict=True):
        assert probs.tolist() == pytest.approx(naive(row, params), abs=1e-12)
    assert torch.equal(out, draft_distribution(logits, params))


def test_top_p_keeps_the_best_token_however_small_p_is():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    out = distribution(logits, SamplingParams(top_p=1e-9))
    assert out.tolist() == [[0.0, 1.0, 0.0]]
    probs = logits.softmax(-1)[0]
    assert not bool((probs.sort(descending=True).values.cumsum(0) <= 1e-9).any())  # mass included


def test_top_p_over_a_large_vocabulary_is_the_same_with_and_without_the_short_cut(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    peaked = (8 * torch.randn(4, 5000, generator=generator)).round()  # many ties, some at the cut
    flat = 0.1 * torch.randn(2, 5000, generator=generator)
    logits = torch.cat(
        [peaked, flat, torch.zeros(1, 5000).index_fill(1, torch.tensor([4000]), 1.0)]
    )
    settings = [SamplingParams(top_p=p) for p in (0.1, 0.9, 0.999)]
    short = [distribution(logits, params) for params in settings]
    monkeypatch.setattr(sampling, "TOP_P_CANDIDATES", 10_000)
    for a, b in zip(short, [distribution(logits, params) for params in settings], strict=True):
        assert torch.equal(a, b)
    assert int((short[2][4] > 0).sum()) > 4000
    assert int((short[0][0] > 0).sum()) < 100
    equals = (short[0][6] > 0).nonzero()[:, 0].tolist()  # the cut among equals: lower ids first
    assert equals == [*range(len(equals) - 1), 4000]


def test_the_best_token_alone_is_one_hot_also_on_ties():
    logits = torch.tensor([[1.0, 4.0, 4.0], [2.0, 0.0, 0.0]])
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=1)):
        assert distribution(logits, params).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_a_tiny_temperature_gives_no_nan():
    logits = 30 * rows(2).float()
    for temperature in (1e-3, 1e-12, 5e-324):
        out = distribution(logits, SamplingParams(temperature=temperature))
        assert torch.equal(out, distribution(logits, SamplingParams(temperature=0.0)))


def test_precision_is_kept_and_bfloat16_is_widened():
    assert distribution(rows(1), SamplingParams()).dtype == torch.float64
    assert distribution(rows(1).bfloat16(), SamplingParams()).dtype == torch.float32


def test_a_masked_token_has_no_probability():
    logits = rows(1)
    logits[0, :5] = -INF
    for params in (SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.99)):
        assert distribution(logits, params)[0, :5].sum() == 0


# ------------------------------------------------------------------ sampling


@given(st.lists(st.sampled_from([0, 1, 2, 5]), min_size=1, max_size=6).filter(any), st.data())
def test_sampling_is_the_inverse_of_the_cumulative_distribution(weights, data):
    probs = torch.tensor(weights, dtype=torch.float64)
    u = data.draw(st.floats(0, 1, exclude_max=True))
    token = sample(probs, u)
    assert weights[token] > 0
    below = sum(weights[:token]) / sum(weights)
    above = sum(weights[: token + 1]) / sum(weights)
    assert below - 1e-12 <= u <= above + 1e-12


def test_the_ends_of_the_interval_stay_inside_the_support():
    probs = torch.tensor([0.0, 0.3, 0.7, 0.0])
    assert sample(probs, 0.0) == 1
    assert sample(probs, 1 - 2**-53) == 2
    assert sample(probs, 1.0) == 2


@pytest.mark.parametrize("probs", [[0.0, 0.0], [float("nan"), 1.0], [INF, 1.0]])
def test_what_is_no_distribution_is_refused(probs):
    with pytest.raises(RequestError, match="cannot sample"):
        sample(torch.tensor(probs), 0.5)


def test_seeded_draws_follow_the_distribution_and_a_wrong_one_is_rejected():
    probs = distribution(rows(1, vocab=5), SamplingParams(temperature=1.5))[0]
    n = 20_000
    drawn = Counter(sample(probs, uniform(s, 4, Purpose.RESIDUAL)) for s in range(n))
    counts = torch.tensor([drawn[i] for i in range(5)], dtype=torch.float64)
    assert abs(chi_square_z(counts, n * probs)) < 4
    assert chi_square_z(counts, n * (0.95 * probs + 0.05 / 5)) > 6


# ------------------------------------------------------------------ reports


def test_logprobs_are_of_the_raw_logits_best_first():
    logits = torch.tensor([[0.0, math.log(3.0), -INF, math.log(4.0)], [0.0, 0.0, 0.0, 0.0]])
    first, second = token_logprobs(logits, [0, 2], 2)
    assert first.token == 0
    assert first.logprob == pytest.approx(math.log(1 / 8))
    assert [token for token, _ in first.top] == [3, 1]
    assert [x for _, x in first.top] == pytest.approx([math.log(4 / 8), math.log(3 / 8)])
    assert second.logprob == pytest.approx(math.log(1 / 4))


def test_logprobs_do_not_change_when_the_request_is_processed():
    logits, params = rows(3), SamplingParams(temperature=0.7, frequency_penalty=2.0, top_k=2)
    before = token_logprobs(logits, [5, 7, 5], 2)
    processed = process_logits(logits, params, [], [5], [7, 5])
    distribution(processed, params)
    assert token_logprobs(logits, [5, 7, 5], 2) == before
    assert token_logprobs(processed, [5, 7, 5], 2) != before


def test_as_many_logprobs_as_tokens_and_as_many_alternatives_as_asked():
    logits = rows(4)
    assert token_logprobs(logits, [], 3) == []
    assert token_logprobs(logits, [1, 2], 0) == [
        TokenLogprobs(t, pytest.approx(float(logits[i].log_softmax(-1)[t])))
        for i, t in enumerate([1, 2])
    ]
    assert len(token_logprobs(logits, [1], 99)[0].top) == V


def test_the_gap_is_between_the_best_two_logits():
    logits = torch.tensor([[1.0, 5.0, 4.5], [2.0, 2.0, -INF]])
    assert top2_gap(logits).tolist() == [0.5, 0.0]
    assert top2_gap(torch.zeros(2, 1)).tolist() == [INF, INF]
