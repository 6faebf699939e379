"""Prompts: the forms of a line, what is refused, the template's fixed parts, copying tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tandemkv.base.errors import ConfigError
from tandemkv.train import prompts
from tandemkv.train.teacher import load_teacher


@pytest.fixture(scope="module")
def chat(target):
    teacher = load_teacher(str(target), torch.device("cpu"))
    return prompts.ChatFormat(teacher.tokenizer, teacher.eos_token_ids)


def read(tmp_path: Path, chat, *rows) -> list[prompts.Prompt]:
    file = tmp_path / "set.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return prompts.read_prompts(str(file), chat)


def test_the_three_forms_of_a_line_say_the_same(tmp_path: Path, chat):
    found = read(
        tmp_path,
        chat,
        {"prompt": "hi"},
        {"turns": ["hi", "and then?"]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    )
    assert len({tuple(p.tokens) for p in found}) == 1
    assert found[0].kind == "set"


def test_an_answer_prefix_stands_where_the_assistant_speaks(tmp_path: Path, chat):
    bare, begun = read(tmp_path, chat, {"prompt": "hi"}, {"prompt": "hi", "answer_prefix": "Oh"})
    assert begun.tokens == bare.tokens + chat.encode("Oh")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: expected an object"),
        ({"prompt": " "}, "line 1: a message without text"),
        ({"messages": []}, "line 1: needs prompt, turns or messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "line 1: needs prompt"),
        ({"prompt": "hi", "max_answer": "many"}, "line 1: answer_prefix must be text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, chat, row, said: str):
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, chat, row)


def test_the_scripts_put_a_conversation_together(chat):
    scripts = chat.scripts()
    eos = [1]
    user, answer, again = chat.encode("hi"), chat.encode("ho"), chat.encode("he")
    built = [
        *scripts.opening, *user, *eos, *scripts.before_answer, *answer, *eos,
        *scripts.before_question, *again, *eos, *scripts.before_answer,
    ]  # fmt: skip
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "he"},
    ]
    assert built == chat.prompt(messages)


def test_a_target_without_a_chat_template_is_refused():
    class Bare:
        chat_template = None

    with pytest.raises(ConfigError, match="no chat template"):
        prompts.ChatFormat(Bare(), [1])


def test_a_copying_task_begins_its_answer_with_the_passage(chat):
    text = " ".join(f"word{i}" for i in range(300))
    made = prompts.copy_prompts(text, chat, 5, (20, 40), pool="long", seed=1)
    assert len(made) == 5
    for prompt in made:
        words = chat._tokenizer.decode(prompt.tokens).split("\nassistant\n")
        begun = words[0].rpartition("assistant\n")[2] if len(words) == 1 else words[1]
        assert begun.split()[0] in text.split()
        assert (prompt.pool, prompt.kind) == ("long", "copy")


def test_a_text_shorter_than_a_passage_gives_no_task(chat):
    assert prompts.copy_prompts("a b c", chat, 5, (20, 40), pool="chat", seed=1) == []
