"""The drafter's head: the int8 screen finds the real head's argmax, and q is what was sampled."""

from __future__ import annotations

import pytest
import torch

from tandemkv.base.sampling import SamplingParams
from tandemkv.model.draft_head import DraftHead
from tandemkv.model.sampling import Purpose, draft_distribution, sample, uniform

GREEDY = SamplingParams(temperature=0.0)
ROWS, SIZE = 5000, 48


def head_and_hidden(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(ROWS, SIZE, generator=generator).to(dtype)
    return weight, torch.randn(7, SIZE, generator=generator).to(dtype)


def choose(head, hidden, params=GREEDY):
    num = len(hidden)
    return head.choose(hidden, [params] * num, [1] * num, [9] * num, [8] * num)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_screened_argmax_and_gap_are_those_of_the_real_head(dtype):
    weight, hidden = head_and_hidden(dtype)
    exact = (hidden.double() @ weight.double().T).topk(2)
    for rows in (slice(0, 1), slice(0, 7)):
        choice = choose(DraftHead(weight, None, ROWS, screen=True), hidden[rows])
        assert torch.equal(choice.tokens, exact.indices[rows, 0])
        gaps = exact.values[rows, 0] - exact.values[rows, 1]
        assert torch.allclose(choice.gaps.double(), gaps, atol=1e-4)


def test_the_screen_alone_would_not_do():
    """The control: screened logits are off by far more than the gaps that matter."""
    weight, hidden = head_and_hidden()
    head = DraftHead(weight, None, ROWS, screen=True)
    error = (head._screened(hidden).float() - hidden @ weight.T).abs().max()
    assert error > 0.01


def test_two_rows_that_tie_have_no_gap_under_the_screen():
    weight, hidden = head_and_hidden()
    best = int((hidden[0] @ weight.T).argmax())
    weight[(best + 1) % ROWS] = weight[best]
    choice = choose(DraftHead(weight, None, ROWS, screen=True), hidden[:1])
    assert float(choice.gaps) == 0.0


@pytest.mark.parametrize("screen", [True, False])
def test_a_sampled_draft_comes_from_the_distribution_returned(screen):
    weight, hidden = head_and_hidden()
    params = SamplingParams(temperature=0.8, top_p=0.9)
    ids = torch.arange(ROWS) * 2
    head = DraftHead(weight, ids, 2 * ROWS, screen=screen)
    choice = choose(head, hidden, params)
    for token, q in zip(choice.tokens.tolist(), choice.probs, strict=True):
        assert q.shape == (2 * ROWS,)
        assert float(q[1::2].sum()) == 0.0
        assert sample(q, uniform(1, 9, Purpose.DRAFT, 8)) == token
    exact = draft_distribution(hidden @ weight.T, params)
    got = torch.stack(choice.probs)[:, ids]
    assert (got - exact).abs().sum(1).max() < (0.05 if screen else 1e-5)


def test_a_vocabulary_of_one_token_has_no_second_best():
    head = DraftHead(torch.ones(1, SIZE), torch.tensor([3]), 10, screen=False)
    choice = choose(head, torch.ones(2, SIZE))
    assert choice.tokens.tolist() == [3, 3]
    assert choice.gaps.tolist() == [float("inf")] * 2
