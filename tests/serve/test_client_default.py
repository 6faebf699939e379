"""The official client against the embedded default model, real weights, with its drafter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import Running, start_engine

DRAFTER = "auto"
CAPITAL: list[Any] = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    engine = start_engine(None, drafter=DRAFTER, block_size=16, max_model_len=1024)
    server = Running(engine)
    yield server
    server.settle()
    server.stop()


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 24, **options}
    model = client.models.list().data[0].id
    return client.chat.completions.create(model=model, messages=messages, **options)


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = ask(client, CAPITAL)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 24


def test_a_drafter_changes_no_word(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Repeat: one two three one two three one two three"}]
    plain = ask(client, messages, extra_body={"num_draft_tokens": 0})
    drafted = ask(client, messages, extra_body={"return_metrics": True})
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    metrics = drafted.model_extra["metrics"]["speculative_decoding"]
    assert metrics["num_draft_tokens"] > 0
    assert metrics["num_accepted_draft_tokens"] <= metrics["num_draft_tokens"]


def test_a_stream_says_the_same_also_up_to_a_stop_string(client: openai.OpenAI) -> None:
    whole = ask(client, CAPITAL, stop=[" France", "Paris"])
    chunks = ask(client, CAPITAL, stop=[" France", "Paris"], stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert "Paris" not in text


def test_logprobs_join_to_the_answer_and_do_not_depend_on_drafts(client: openai.OpenAI) -> None:
    answers = [
        ask(client, CAPITAL, logprobs=True, top_logprobs=2, extra_body={"num_draft_tokens": k})
        for k in (0, 3)
    ]
    plain, drafted = (answer.choices[0].logprobs.content for answer in answers)
    assert [e.token for e in plain] == [e.token for e in drafted]
    assert [e.logprob for e in plain] == pytest.approx([e.logprob for e in drafted], abs=1e-4)
    said = b"".join(bytes(e.bytes) for e in drafted).decode()
    assert said.startswith(answers[1].choices[0].message.content)


def test_a_second_turn_hits_the_first(client: openai.OpenAI) -> None:
    first = ask(client, CAPITAL)
    turn = [
        *CAPITAL,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = ask(client, turn)
    assert "Rome" in second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_the_prompt_is_the_one_of_the_models_template(running: Running) -> None:
    sent = {"messages": CAPITAL}
    tokens = running.http.post("/tokenize", json=sent).json()["tokens"]
    text = running.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CAPITAL)
    assert text == expected + "<|im_start|>assistant\n"
