"""The official client of the API against a real server: answers, streams, errors as its classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import Running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def model(server: Running) -> str:
    return server.engine.model_name


HELLO: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def test_models_are_listed(client: openai.OpenAI, model: str) -> None:
    assert [m.id for m in client.models.list()] == [model]
    assert client.models.retrieve(model).owned_by == "tandemkv"


def test_chat_answers(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=HELLO, **GREEDY)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_chat_streams_what_it_answers(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=HELLO, **GREEDY)
    stream = client.chat.completions.create(
        model=model, messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_completions_take_text_and_tokens(client: openai.OpenAI, model: str) -> None:
    one = client.completions.create(model=model, prompt=[72, 105], **GREEDY)
    many = client.completions.create(model=model, prompt=[[72, 105], [72]], **GREEDY)
    assert many.choices[0].text == one.choices[0].text
    assert [c.index for c in many.choices] == [0, 1]
    streamed = client.completions.create(model=model, prompt=[72, 105], stream=True, **GREEDY)
    assert "".join(c.choices[0].text for c in streamed) == one.choices[0].text


def test_chat_logprobs_are_sorted_and_end_with_the_answer(
    client: openai.OpenAI, model: str
) -> None:
    answer = client.chat.completions.create(
        model=model, messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12
    for entry in logprobs.content:
        best = [top.logprob for top in entry.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert entry.logprob == best[0]  # greedy, nothing changes the logits
        assert entry.logprob < 0
    assert b"".join(bytes(e.bytes or []) for e in logprobs.content).decode(errors="replace")


def test_a_stop_string_ends_the_answer(client: openai.OpenAI, model: str) -> None:
    free = client.chat.completions.create(model=model, messages=HELLO, **GREEDY)
    text = free.choices[0].message.content or ""
    letter = next(c for c in text[2:] if c != "\ufffd")
    cut = client.chat.completions.create(model=model, messages=HELLO, stop=[letter], **GREEDY)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == text.split(letter)[0]


def test_a_seed_repeats_n_different_choices(client: openai.OpenAI, model: str) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=model, messages=HELLO, n=4, seed=seed, temperature=1.5, max_tokens=12
        )
        return [c.message.content for c in sorted(answer.choices, key=lambda c: c.index)]

    first = ask(1)
    assert ask(1) == first
    assert len(set(first)) == 4
    assert ask(2) != first


def test_a_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "a first turn of some length, to be found again"}]
    first = client.chat.completions.create(model=model, messages=messages, **GREEDY)  # type: ignore[arg-type]
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "and a second"},
    ]
    second = client.chat.completions.create(model=model, messages=messages, **GREEDY)  # type: ignore[arg-type]
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= first.usage.prompt_tokens


def test_errors_are_the_clients_exceptions(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=HELLO, tools=[{"type": "function"}])  # type: ignore[arg-type]
    assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=model, messages=HELLO, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="256"):
        client.completions.create(model=model, prompt="x" * 400)
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model=model, prompt="x" * (9 << 20))
    assert large.value.status_code == 413


def test_a_stream_may_be_left_early(client: openai.OpenAI, model: str, server: Running) -> None:
    stream = client.chat.completions.create(
        model=model, messages=HELLO, stream=True, max_tokens=200, extra_body={"ignore_eos": True}
    )
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    server.settle()
