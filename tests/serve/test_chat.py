"""Chat messages: what reaches the template, what is refused, and templates that fail."""

from __future__ import annotations

from typing import Any

import pytest

from tandemkv.base.errors import RequestError
from tandemkv.serve.chat import TemplateOptions, parse_messages, render


def refusal(value: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse_messages(value)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def user(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "missing"),
        ([], "empty"),
        ("hello", "list"),
        ({}, "list"),
        (["hello"], "messages[0]"),
        ([{}], "role"),
        ([{"role": "robot", "content": "x"}], "robot"),
        ([{"role": ["user"], "content": "x"}], "role"),
        ([{"role": "tool", "content": "x"}], "tools are not offered"),
        ([{"role": "user"}], "messages[0].content"),
        (user(5), "content"),
        (user([]), "content"),
        (user(["x"]), "content[0]"),
        (user([{"type": "text"}]), "content[0].text"),
        (user([{"type": "text", "text": "x"}, {"type": "image_url"}]), "content[1] has type"),
        (user([{"type": "input_audio"}]), "input_audio"),
        (user("x", tool_calls=[{"id": "1"}]), "tool_calls"),
        (user("x", **{"a\nb": 1}), r"a\nb"),
        (user("x", name=3), "name"),
        (user("x") * 5000, "at most"),
    ],
)
def test_messages_that_cannot_be_served_are_refused_by_their_place(messages, said: str) -> None:
    assert said in refusal(messages)


def test_text_parts_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_messages(user(parts)) == ({"role": "user", "content": "a\nb"},)


def test_an_echoed_answer_of_ours_is_accepted() -> None:
    echoed = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": []}
    assert parse_messages([echoed]) == ({"role": "assistant", "content": "hi"},)


def test_developer_is_todays_name_of_system() -> None:
    assert parse_messages([{"role": "developer", "content": "x"}])[0]["role"] == "system"


class Tokenizer:
    """A tokenizer whose template is a function."""

    def __init__(self, template: Any) -> None:
        self.chat_template = template

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return self.chat_template(messages, **options)


MESSAGES = parse_messages(user("hello"))


def test_the_template_gets_messages_and_options() -> None:
    def template(messages: Any, **options: Any) -> str:
        assert options == {
            "tokenize": False,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "enable_thinking": False,
        }
        return messages[0]["content"]

    options = TemplateOptions(False, True, {"enable_thinking": False})
    assert render(Tokenizer(template), MESSAGES, options) == "hello"


def test_a_tokenizer_without_a_template_is_said_so() -> None:
    with pytest.raises(RequestError, match="no chat template") as caught:
        render(Tokenizer(None), MESSAGES, TemplateOptions())
    assert caught.value.status == 400


def test_a_template_that_fails_is_one_line() -> None:
    def template(*_: Any, **__: Any) -> str:
        raise ValueError("roles must\nalternate")

    with pytest.raises(RequestError, match="refused the messages: roles must alternate"):
        render(Tokenizer(template), MESSAGES, TemplateOptions())


@pytest.mark.parametrize(
    "name", ["tokenize", "tools", "chat_template", "messages", "a b", "self.x"]
)
def test_template_arguments_of_the_call_cannot_be_set_by_a_client(name: str) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        render(Tokenizer(lambda *a, **k: ""), MESSAGES, TemplateOptions(kwargs={name: 1}))
