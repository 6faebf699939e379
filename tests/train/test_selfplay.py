"""Self-play: turns, forcing, limits, and that it plays the very model that teaches."""

from __future__ import annotations

import pytest
import torch

from tandemkv.train.prompts import ChatFormat, Prompt
from tandemkv.train.selfplay import ANSWER, FORCED, QUESTION, SelfPlay, draw
from tandemkv.train.teacher import load_teacher


@pytest.fixture(scope="module")
def teacher(target):
    return load_teacher(str(target), torch.device("cpu"))


@pytest.fixture
def chat(teacher):
    return ChatFormat(teacher.tokenizer, teacher.eos_token_ids)


def play(teacher, chat, prompts, *, temperature=1.0, length=60, seed=0, max_answer=9):
    player = SelfPlay(teacher, chat.scripts(), len(prompts), length)
    return player.run(
        prompts, [temperature] * len(prompts), max_answer=max_answer, max_question=5, seed=seed
    )


def test_a_prompt_is_played_as_given(teacher, chat):
    prompt = Prompt(tokens=chat.prompt([{"role": "user", "content": "hi"}]))
    tokens, kinds = play(teacher, chat, [prompt])
    size = len(prompt.tokens)
    assert tokens[0, :size].tolist() == prompt.tokens
    assert kinds[0, :size].eq(FORCED).all()
    assert kinds[0, size] == ANSWER


def test_without_a_prompt_the_target_asks_first(teacher, chat):
    tokens, kinds = play(teacher, chat, [None])
    opening = chat.scripts().opening
    assert tokens[0, : len(opening)].tolist() == opening
    assert kinds[0, len(opening)] == QUESTION


def test_turns_alternate_through_the_template(teacher, chat):
    prompt = Prompt(tokens=chat.prompt([{"role": "user", "content": "hi"}]))
    tokens, kinds = play(teacher, chat, [prompt], length=90)
    scripts = chat.scripts()
    size = len(prompt.tokens)
    speakers = [k for k in kinds[0, size:].tolist() if k != FORCED]
    changes = [a for a, b in zip([None, *speakers], speakers, strict=False) if a != b]
    assert changes[:4] == [None, ANSWER, QUESTION, ANSWER]
    eos = teacher.eos_token_ids[0]
    end = next(i for i in range(size, 90) if kinds[0, i] == ANSWER and tokens[0, i] == eos)
    after = tokens[0, end + 1 : end + 1 + len(scripts.before_question)].tolist()
    assert after == scripts.before_question


def test_a_turn_ends_at_its_limit(teacher, chat):
    _, kinds = play(teacher, chat, [None] * 4, length=80, max_answer=7)
    for row in kinds.tolist():
        text = "".join("fqa"[(0, 2, 1)[k]] for k in row)
        assert max(len(x) for x in text.replace("q", " ").replace("f", " ").split()) <= 7


def test_equal_seeds_give_equal_rows_and_others_do_not(teacher, chat):
    rows = [play(teacher, chat, [None, None], seed=s)[0] for s in (1, 1, 2)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def test_greedy_answers_are_the_dense_argmax(teacher, chat):
    prompt = Prompt(tokens=chat.prompt([{"role": "user", "content": "count to ten"}]))
    tokens, kinds = play(teacher, chat, [prompt] * 2, temperature=0.0, max_answer=1000)
    _, hidden = teacher.dense(tokens, (1,))
    best = (hidden @ teacher.head.T).argmax(-1)
    said = kinds[:, 1:] == ANSWER
    assert int(said.sum()) > 20
    assert torch.equal(best[:, :-1][said], tokens[:, 1:][said])


def test_the_dense_pass_is_that_of_transformers(teacher, target):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target).eval()
    tokens = torch.randint(0, teacher.vocab_size, (2, 30))
    with torch.no_grad():
        theirs = model(tokens, output_hidden_states=True)
    captures, hidden = teacher.dense(tokens, (1, 4))
    assert torch.allclose(hidden @ teacher.head.T, theirs.logits, atol=1e-4)
    assert torch.allclose(captures[0], theirs.hidden_states[2], atol=1e-4)
    assert torch.allclose(captures[1], theirs.hidden_states[5], atol=1e-4)


def test_draws_follow_the_temperature_and_never_leave_the_floor():
    torch.manual_seed(0)
    logits = torch.log(torch.tensor([0.7, 0.29, 0.01])).expand(20000, 3)
    share = draw(logits, torch.ones(20000)).bincount(minlength=3) / 20000
    assert share[2] == 0
    assert abs(float(share[0]) - 0.7 / 0.99) < 0.02
    assert draw(logits[:50], torch.zeros(50)).eq(0).all()
