"""What a router asks of a worker over HTTP, and the hand-off that a request may name."""

from __future__ import annotations

from typing import Any

import pytest
from serving import CHAT, TEXT, Running, user

from tandemkv.base.errors import RequestError
from tandemkv.serve.openai import Limits, parse_chat, parse_completion

LIMITS = Limits(model="tiny", max_model_len=64, vocab_size=100)
DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
FETCH = {
    "do_remote_prefill": True,
    "remote_engine_id": "prefill-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


def completion(**body: Any) -> Any:
    return parse_completion({"prompt": "hello", **body}, LIMITS)


def test_a_hand_off_is_part_of_what_is_asked() -> None:
    asked = completion(kv_transfer_params=FETCH)
    assert asked.transfer.remote_engine_id == "prefill-1"
    assert completion(kv_transfer_params=None).transfer is None
    message = {"messages": user("hello"), "max_tokens": 1}
    assert parse_chat({**message, "kv_transfer_params": DECODE}, LIMITS).transfer.do_remote_decode


@pytest.mark.parametrize(
    "body",
    [
        {"kv_transfer_params": "yes"},
        {"kv_transfer_params": {**FETCH, "do_remote_prefil": True}},
        {"kv_transfer_params": {**FETCH, "remote_port": "5600"}},
        {"kv_transfer_params": {**FETCH, "do_remote_decode": True}},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": FETCH, "n": 2},
        {"kv_transfer_params": FETCH, "prompt": ["one", "two"]},
        {"kv_transfer_params": DECODE, "max_tokens": 2},
        {"kv_transfer_params": DECODE},
        {"kv_transfer_params": DECODE, "max_tokens": 1, "stream": True},
    ],
)
def test_a_hand_off_that_cannot_be_is_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="kv_transfer_params") as caught:
        completion(**body)
    assert caught.value.param == "kv_transfer_params"
    assert caught.value.status == 400


def test_one_prompt_in_a_list_is_one_prompt() -> None:
    assert completion(kv_transfer_params=FETCH, prompt=["one"]).transfer is not None
    assert completion(kv_transfer_params=FETCH, prompt=[5, 6, 7]).transfer is not None


def test_chat_names_the_field_that_it_was_given() -> None:
    body = {"messages": user("x"), "max_completion_tokens": 3, "kv_transfer_params": DECODE}
    with pytest.raises(RequestError, match="max_completion_tokens 1"):
        parse_chat(body, LIMITS)


@pytest.fixture
def worker(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A server whose engine says what a worker's does, as far as it does not yet."""
    engine = server.engine.engine

    def missing(tokens: Any, namespace: Any) -> dict[str, int]:
        rows = len(tokens) - engine.kv.match(tokens, namespace).end
        return {"target": rows, "draft": rows}

    for name, value in (
        ("missing_rows", missing),
        ("load", {"running": 0, "waiting": 0, "queued_tokens": 0}),
        ("worker_info", {"role": "aggregated", "engine_id": "one", "control": None}),
    ):
        if not hasattr(type(engine), name):
            monkeypatch.setattr(engine, name, value, raising=False)
    return server


def coverage(server: Running, **body: Any) -> dict[str, Any]:
    response = server.http.post("/coverage", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_worker_says_who_it_is_and_how_busy(worker: Running) -> None:
    said = worker.http.get("/worker").json()
    assert said["role"] == "aggregated"
    assert said["engine_id"]
    assert said["control"] is None
    assert said["model"] == worker.engine.model_name
    assert said["max_model_len"] == 256
    assert said["load"] == {"running": 0, "waiting": 0, "queued_tokens": 0}


def test_coverage_counts_the_rows_that_are_not_held_and_takes_nothing(worker: Running) -> None:
    sent = {"prompt": "a prompt that only this test asks about", "cache_salt": "coverage"}
    pages = worker.pages()
    cold = coverage(worker, **sent)
    assert worker.pages() == pages
    assert cold["engine_id"] == worker.http.get("/worker").json()["engine_id"]
    assert cold["missing"]["target"] >= cold["num_tokens"] - 1
    assert cold["missing"]["draft"] >= cold["num_tokens"] - 1
    worker.http.post(TEXT, json={**sent, "max_tokens": 1}).raise_for_status()
    warm = coverage(worker, **sent)
    assert warm["num_tokens"] == cold["num_tokens"]
    assert warm["missing"]["target"] <= 1
    other = coverage(worker, **{**sent, "cache_salt": "another"})
    assert other["missing"] == cold["missing"]


def test_coverage_reads_a_chat_as_chat_does(worker: Running) -> None:
    messages = user("what is covered?")
    tokens = worker.http.post("/tokenize", json={"messages": messages}).json()["count"]
    assert coverage(worker, messages=messages, max_tokens=5)["num_tokens"] == tokens
    body = {"messages": messages, "max_tokens": 5, "temperature": 0}
    answer = worker.http.post(CHAT, json=body).json()
    assert answer["usage"]["prompt_tokens"] == tokens
    assert "kv_transfer_params" not in answer


def test_coverage_adds_up_over_prompts(worker: Running) -> None:
    one, two = [5, 6, 7, 8, 9], [9, 8, 7]
    counts = [
        coverage(worker, prompt=prompt, cache_salt="sum")["missing"]["target"]
        for prompt in (one, two, [one, two])
    ]
    assert counts[0] + counts[1] == counts[2] > 0


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt": "x", "temprature": 1}, "temprature"), ({"prompt": [1] * 300}, "prompt")],
)
def test_coverage_refuses_what_the_api_refuses(
    worker: Running, body: dict[str, Any], param: str
) -> None:
    response = worker.http.post("/coverage", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
