"""What a router asks of a worker over HTTP, and the hand-off that a request may name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from serving import CHAT, TEXT, Running, user

from tandemkv.base.errors import RequestError
from tandemkv.base.transfer_params import KVTransferParams, parse_transfer
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


def coverage(server: Running, **body: Any) -> dict[str, Any]:
    response = server.http.post("/coverage", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_worker_says_who_it_is_and_how_busy(server: Running) -> None:
    said = server.http.get("/worker").json()
    assert said["role"] == "aggregated"
    assert said["engine_id"]
    assert said["control"] is None
    assert said["model"] == server.engine.model_name
    assert said["max_model_len"] == 256
    assert said["load"] == {"running": 0, "waiting": 0, "queued_tokens": 0}


def test_coverage_counts_the_rows_that_are_not_held_and_takes_nothing(server: Running) -> None:
    sent = {"prompt": "a prompt that only this test asks about", "cache_salt": "coverage"}
    pages = server.pages()
    cold = coverage(server, **sent)
    assert server.pages() == pages
    assert cold["engine_id"] == server.http.get("/worker").json()["engine_id"]
    assert cold["missing"]["target"] >= cold["num_tokens"] - 1
    assert cold["missing"]["draft"] >= cold["num_tokens"] - 1
    server.http.post(TEXT, json={**sent, "max_tokens": 1}).raise_for_status()
    warm = coverage(server, **sent)
    assert warm["num_tokens"] == cold["num_tokens"]
    assert warm["missing"]["target"] <= 1
    other = coverage(server, **{**sent, "cache_salt": "another"})
    assert other["missing"] == cold["missing"]


def test_coverage_reads_a_chat_as_chat_does(server: Running) -> None:
    messages = user("what is covered?")
    tokens = server.http.post("/tokenize", json={"messages": messages}).json()["count"]
    assert coverage(server, messages=messages, max_tokens=5)["num_tokens"] == tokens
    body = {"messages": messages, "max_tokens": 5, "temperature": 0}
    answer = server.http.post(CHAT, json=body).json()
    assert answer["usage"]["prompt_tokens"] == tokens
    assert "kv_transfer_params" not in answer


def test_coverage_adds_up_over_prompts(server: Running) -> None:
    one, two = [5, 6, 7, 8, 9], [9, 8, 7]
    counts = [
        coverage(server, prompt=prompt, cache_salt="sum")["missing"]["target"]
        for prompt in (one, two, [one, two])
    ]
    assert counts[0] + counts[1] == counts[2] > 0


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt": "x", "temprature": 1}, "temprature"), ({"prompt": [1] * 300}, "prompt")],
)
def test_coverage_refuses_what_the_api_refuses(
    server: Running, body: dict[str, Any], param: str
) -> None:
    response = server.http.post("/coverage", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("asked", [FETCH, DECODE])
def test_a_server_by_itself_refuses_a_hand_off_by_name(
    server: Running, asked: dict[str, Any]
) -> None:
    body = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": asked}
    response = server.http.post(TEXT, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "kv_transfer_params"


def test_where_a_prompt_is_held_is_part_of_the_answer(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a prefill worker's engine answers a proxy, which passes it on unchanged."""
    held = KVTransferParams(**FETCH, remote_request_id="cmpl-1-0")
    engine = server.engine.engine
    add, step = engine.add, engine.step

    def adding(*args: Any, transfer: Any = None, **kwargs: Any) -> Any:
        assert transfer is not None
        return add(*args, **kwargs)

    def stepping() -> Any:
        return [msgspec.structs.replace(output, transfer=held) for output in step()]

    monkeypatch.setattr(engine, "add", adding)
    monkeypatch.setattr(engine, "step", stepping)
    body = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": DECODE}
    said = server.http.post(TEXT, json=body).json()["kv_transfer_params"]
    assert said == msgspec.to_builtins(held)
    assert parse_transfer(said) == held
