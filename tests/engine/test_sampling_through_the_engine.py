"""Sampling between runner, drafter and verifier: what a request asks is what its rows get.

Verification is proven by enumeration in tests/model; here the wiring is: the right q, the right
history, the right rows. Each wiring fault below is seeded and must be caught.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import drafting
import pytest
import torch
from engines import TARGET_SEED, greedy, prompt, run, tiny_engine, used_pages

from tandemkv.base.errors import RequestError
from tandemkv.base.logprobs import TokenLogprobs
from tandemkv.base.sampling import SamplingParams
from tandemkv.engine.engine import Engine, GenerateRequest
from tandemkv.model.draft_lm import DraftModel
from tandemkv.model.target import ATTENTION, Target
from tandemkv.runner import forward

PROMPTS = [prompt(n, seed=n) for n in (4, 17)]
FILTERS = ({}, {"top_k": 1}, {"top_p": 0.9}, {"temperature": 0.7, "min_p": 0.05})
EDITS = (
    {"frequency_penalty": 2.0},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {3: 8.0}, "frequency_penalty": 2.0},
    {"min_tokens": 10, "stop_token_ids": (3,), "logit_bias": {3: 20.0}},
)


def sampled(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": max_tokens, "seed": 5} | changes))


def near_twin(noise: float = 0.1) -> DraftModel:
    """A drafter whose distribution is near the target's: it is accepted often, not always."""
    model = drafting.tiny_model(TARGET_SEED)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    model.set_attn_implementation(ATTENTION)
    target = drafting.tiny_target(TARGET_SEED)
    return DraftModel(target, Target(model, fingerprint="near twin"), num_draft_tokens=2)


def assert_a_perfect_drafter_is_never_rejected(verification: str, filters: dict[str, Any]) -> None:
    params = sampled(24, verification=verification, **filters)
    for completion in run(tiny_engine("self"), PROMPTS, params):
        full = [s for s in completion.steps if len(s.drafts) == 3]
        assert full
        assert all(s.num_accepted == 3 for s in full)


def assert_edits_mean_the_same_with_drafts(drafter: str, edits: dict[str, Any]) -> None:
    with_drafts = run(tiny_engine(drafter), PROMPTS, greedy(20, **edits))
    without = run(tiny_engine("none"), PROMPTS, greedy(20, **edits))
    assert [c.tokens for c in with_drafts] == [c.tokens for c in without]


def assert_logprobs_are_the_models_own(edits: dict[str, Any]) -> None:
    model = drafting.tiny_model(TARGET_SEED)
    params = sampled(20, temperature=0.7, logprobs=2, **edits)
    for tokens, (output, logprobs) in zip(
        PROMPTS, _with_logprobs(tiny_engine("eagle3"), params), strict=True
    ):
        with torch.no_grad():
            rows = model(torch.tensor([[*tokens, *output]])).logits[0].log_softmax(-1)
        assert len(logprobs) == len(output)
        for i, found in enumerate(logprobs):
            row = rows[len(tokens) - 1 + i]
            assert found.token == output[i]
            assert found.logprob == pytest.approx(float(row[output[i]]), abs=1e-4)
            assert [t for t, _ in found.top] == row.topk(2).indices.tolist()


def _with_logprobs(
    engine: Engine, params: SamplingParams
) -> list[tuple[list[int], list[TokenLogprobs]]]:
    seen: dict[str, list[TokenLogprobs]] = {}
    done = engine.generate(
        [GenerateRequest(prompt=p, params=params) for p in PROMPTS],
        on_output=lambda o: seen.setdefault(o.request_id, []).extend(o.logprobs or []),
    )
    return [(c.tokens, seen[c.request.id]) for c in done]


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("filters", FILTERS)
def test_a_drafter_that_is_the_target_is_never_rejected(
    verification: str, filters: dict[str, Any]
) -> None:
    assert_a_perfect_drafter_is_never_rejected(verification, filters)


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark", "self", "ngram"])
@pytest.mark.parametrize("edits", EDITS)
def test_penalties_bias_and_min_tokens_mean_the_same_with_drafts(
    drafter: str, edits: dict[str, Any]
) -> None:
    assert_edits_mean_the_same_with_drafts(drafter, edits)


@pytest.mark.parametrize("edits", [{}, {"frequency_penalty": 1.0}])
def test_logprobs_are_the_models_own_whatever_was_sampled(edits: dict[str, Any]) -> None:
    assert_logprobs_are_the_models_own(edits)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_sampled_output_has_the_targets_law(verification: str) -> None:
    tokens, num = prompt(6, seed=6), 1200
    target = drafting.tiny_target(TARGET_SEED)
    engine = tiny_engine(
        near_twin(), target=target, debug=False, trace=False, max_running=64, kv_cache_tokens=4096
    )
    asked = [sampled(3, seed=s, top_k=3, verification=verification) for s in range(num)]
    done = engine.generate([GenerateRequest(prompt=tokens, params=p) for p in asked])
    counts = Counter(tuple(c.tokens) for c in done)
    law = dict(_joint(drafting.tiny_model(TARGET_SEED), tokens, (), 1.0))
    assert engine.scheduler.stats.acceptance.num_accepted > 0.3 * num
    assert set(counts) <= set(law)
    chi = sum((counts[k] - num * p) ** 2 / (num * p) for k, p in law.items())
    free = len(law) - 1  # Wilson and Hilferty's normal score of a chi-square
    assert ((chi / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free)) < 4


@torch.no_grad()
def _joint(model: Any, tokens: list[int], made: tuple[int, ...], p: float) -> Any:
    """(three tokens, probability) at temperature 1 over the best three of each row."""
    if len(made) == 3:
        yield made, p
        return
    best = model(torch.tensor([[*tokens, *made]])).logits[0, -1].topk(3)
    for token, q in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
        yield from _joint(model, tokens, (*made, token), p * q)


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark", "self", "ngram"])
@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_seed_repeats_through_suspension(drafter: str, verification: str) -> None:
    params = sampled(16, verification=verification)
    reference = [run(tiny_engine(drafter), [p], params)[0].tokens for p in PROMPTS]
    engine = tiny_engine(drafter, max_batch_tokens=9)
    requests = [engine.add(p, params) for p in PROMPTS]
    for step in range(200):
        if not engine.has_work:
            break
        engine.step()
        if step % 3 == 1 and engine.scheduler.running:
            engine.suspend(engine.scheduler.running[0].id)
            if step % 2:
                engine.reset_cache()
    assert [r.output for r in requests] == reference


def test_a_smaller_model_that_is_often_wrong_changes_no_word() -> None:
    target = drafting.tiny_target(TARGET_SEED)
    small = drafting.tiny_target(9, layers=2)
    made = [DraftModel(target, m, num_draft_tokens=3) for m in (small, drafting.tiny_target(4))]
    plain = [c.tokens for c in run(tiny_engine("none"), PROMPTS)]
    for drafter in made:
        engine = tiny_engine(drafter, target=target)
        for _ in range(2):
            found = run(engine, PROMPTS)
            assert [c.tokens for c in found] == plain
            steps = [s for c in found for s in c.steps if s.drafts]
            assert any(s.num_accepted < len(s.drafts) for s in steps)


# ------------------------------------------------------------------ seeded faults of the wiring


def _drops_q(monkeypatch: pytest.MonkeyPatch) -> None:
    good = forward.verify
    monkeypatch.setattr(forward, "verify", lambda p, d, q, *rest: good(p, d, None, *rest))


def _forgets_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    good = forward.process_logits
    monkeypatch.setattr(
        forward,
        "process_logits",
        lambda logits, params, prompt, output, drafts, **more: good(
            logits, params, prompt, output, [0] * len(drafts), **more
        ),
    )


def _reports_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    good = forward.token_logprobs
    monkeypatch.setattr(
        forward, "token_logprobs", lambda logits, *rest: good(logits.roll(1, -1), *rest)
    )


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (_drops_q, lambda: assert_a_perfect_drafter_is_never_rejected("token", {})),
        (_drops_q, lambda: assert_a_perfect_drafter_is_never_rejected("block", {})),
        (_forgets_drafts, lambda: assert_edits_mean_the_same_with_drafts("self", EDITS[0])),
        (_reports_another_row, lambda: assert_logprobs_are_the_models_own({})),
    ],
)
def test_a_seeded_fault_of_the_wiring_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()


# ------------------------------------------------------------------ rows without a distribution


@pytest.mark.parametrize("params", [greedy(8), sampled(8)])
def test_rows_that_are_not_finite_end_their_request_and_no_other(params: SamplingParams) -> None:
    engine = tiny_engine("eagle3")
    first, second = (engine.add(p, params) for p in PROMPTS)
    good, calls = engine.target.logits, iter(range(100))

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = good(hidden)
        if next(calls) == 1:
            logits[0] = math.nan
        return logits

    engine.target.logits = poisoned  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert "not finite" in (first.error or "")
    assert used_pages(engine) == [0, 0]


def test_a_request_that_could_never_stop_or_go_on_is_refused() -> None:
    engine = tiny_engine("none")
    every = tuple(range(engine.target.spec.vocab_size))
    with pytest.raises(RequestError, match="min_tokens cannot be met") as caught:
        engine.add(PROMPTS[0], greedy(6, min_tokens=3, stop_token_ids=every))
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("value", [1e-45, 0.0, 0.009, 101.0])
def test_a_repetition_penalty_that_overflows_is_refused(value: float) -> None:
    with pytest.raises(RequestError, match="repetition_penalty"):
        sampled(4, repetition_penalty=value)
