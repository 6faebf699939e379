"""Acceptance on held-out prompts: walking, cutting, pooling, and the drafts themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandemkv.train import evaluate
from tandemkv.train.eagle3 import Eagle3Trainee, Shape
from tandemkv.train.evaluate import Answer, Variant, interval, summarise, walk
from tandemkv.train.prompts import ChatFormat, Prompt
from tandemkv.train.teacher import load_teacher


@pytest.fixture(scope="module")
def teacher(target):
    return load_teacher(str(target), torch.device("cpu"))


@pytest.fixture
def chat(teacher):
    return ChatFormat(teacher.tokenizer, teacher.eos_token_ids)


@pytest.fixture(scope="module")
def trainee(teacher):
    torch.manual_seed(1)
    trainee = Eagle3Trainee(Shape.of(teacher), teacher.embedding)
    trainee.start_from(teacher, copy_layer=True)
    return trainee


def test_a_walk_goes_from_anchor_to_anchor():
    assert walk([2, 0, 0, 1, 0, 3], 2) == [(3, 2), (2, 2), (1, 0)]


def test_a_step_at_the_end_emits_no_more_than_is_left():
    assert walk([4, 4, 4], 4) == [(3, 2)]
    assert walk([], 4) == []


def test_al_is_pooled_over_steps():
    answers = [Answer("s", [0] * 9, 4, 5, False), Answer("s", [0] * 9, 4, 3, True)]
    result = summarise("s", Variant(name="full", num_drafts=2), answers, [[2, 0, 0, 0], [0, 0]])
    assert (result.tokens, result.steps, result.looped) == (6, 4, 1)
    assert result.al == pytest.approx(6 / 4)
    assert result.by_position == [0.5, 1.0]


def test_the_interval_holds_the_mean_and_narrows_with_prompts():
    rng = np.random.default_rng(1)
    steps = rng.integers(20, 60, 400)
    tokens = steps + rng.binomial(steps * 2, 0.4)
    few, many = interval(tokens[:20], steps[:20]), interval(tokens, steps)
    mean = tokens.sum() / steps.sum()
    assert many[0] < mean < many[1]
    assert many[1] - many[0] < few[1] - few[0]


def answer_of(teacher, chat, words: str = "hello there", new: int = 24) -> Answer:
    prompt = Prompt(tokens=chat.prompt([{"role": "user", "content": words}]))
    return evaluate.answer_prompts(teacher, chat.scripts(), {"s": [prompt]}, new)[0]


def test_an_answer_is_greedy_and_as_long_as_asked(teacher, chat):
    answer = answer_of(teacher, chat)
    tokens = torch.tensor([answer.tokens])
    _, hidden = teacher.dense(tokens, (1,))
    best = (hidden @ teacher.head.T).argmax(-1)[0].tolist()
    assert answer.tokens[answer.start :] == best[answer.start - 1 : -1]
    assert len(answer.tokens) - answer.start <= 24


def test_a_prompt_beyond_the_targets_context_is_left_out(teacher, chat):
    sets = {"s": [Prompt(tokens=[5] * 600)]}
    assert evaluate.answer_prompts(teacher, chat.scripts(), sets, 24) == []


def test_accepted_drafts_are_those_of_a_chain_at_each_anchor(teacher, chat, trainee):
    answer = answer_of(teacher, chat)
    variant = Variant(name="full", num_drafts=3)
    ranking = torch.arange(teacher.vocab_size)
    got = evaluate.accepted_drafts(teacher, trainee, [answer], variant, ranking)[0]
    tokens = answer.tokens
    for at in range(answer.count - 1):
        anchor = answer.start + at
        assert got[at] == chain(teacher, trainee, tokens, anchor, 3)


def chain(teacher, trainee, tokens: list[int], anchor: int, k: int) -> int:
    """Accepted drafts at one anchor, from nothing but what a server has then."""
    known = torch.tensor([tokens[: anchor + 1]])
    captures, _ = teacher.dense(known[:, :anchor], trainee.shape.taps)
    captures = [torch.cat([c, torch.zeros_like(c[:, :1])], 1) for c in captures]
    drafts: list[int] = []

    def last_row(hidden: torch.Tensor) -> torch.Tensor:
        best = (hidden @ teacher.head.T).argmax(-1)
        drafts.append(int(best[0, anchor - 1]))
        return best

    with torch.no_grad():
        last_row(trainee.unroll(captures, known, k, sampler=last_row)[-1])
    accepted = 0
    for draft, true in zip(drafts, tokens[anchor + 1 :], strict=False):
        if draft != true:
            break
        accepted += 1
    return accepted


def test_without_prompt_rows_the_first_step_drafts_nothing(teacher, chat, trainee):
    answer = answer_of(teacher, chat)
    variant = Variant(name="none", num_drafts=3, keep=0)
    ranking = torch.arange(teacher.vocab_size)
    assert evaluate.accepted_drafts(teacher, trainee, [answer], variant, ranking)[0][0] == 0


def test_a_reduced_head_drafts_only_ranked_ids(teacher, chat, trainee):
    answer = answer_of(teacher, chat)
    said = set(answer.tokens[answer.start :])
    unsaid = [i for i in range(teacher.vocab_size) if i not in said]
    ranking = torch.tensor(unsaid + sorted(said))
    variant = Variant(name="head", num_drafts=3, head_rows=len(unsaid))
    got = evaluate.accepted_drafts(teacher, trainee, [answer], variant, ranking)[0]
    assert set(got) == {0}
