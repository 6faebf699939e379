"""What a request over HTTP means: cache hits, choices, drafts, parameters, prompts, models."""

from __future__ import annotations

from typing import Any

import pytest
from serving import CHAT, TEXT, Running, joined, stream, user, whole


def test_prompt_tokens_found_in_the_cache_are_reported(server: Running) -> None:
    sent = {"prompt": "a prompt that nobody else has sent so far", "max_tokens": 4}
    sent |= {"temperature": 0, "ignore_eos": True, "cache_salt": "fresh"}
    hits = lambda: server.on_engine(lambda e: e.kv.stats.prefix_hit_tokens)  # noqa: E731
    cached = []
    for _ in range(2):
        before = hits()
        usage = server.http.post(TEXT, json=sent).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[-1] == hits() - before
    assert cached == [0, usage["prompt_tokens"] - 1]


def test_a_salt_keeps_prefixes_apart(server: Running) -> None:
    sent = {"prompt": "the same words under two salts", "max_tokens": 1}
    for salt in ("one", "two"):
        usage = server.http.post(TEXT, json={**sent, "cache_salt": salt}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_n_choices_compute_their_prompt_once(server: Running) -> None:
    sent = {"prompt": "w" * 200, "max_tokens": 3, "n": 4, "cache_salt": "n choices", "seed": 1}
    recomputed = lambda: server.on_engine(  # noqa: E731
        lambda e: e.kv.stats.prefix_queries_tokens - e.kv.stats.prefix_hit_tokens
    )
    before = recomputed()
    usage = server.http.post(TEXT, json=sent).json()["usage"]
    assert usage["prompt_tokens"] == 200
    assert recomputed() - before < 200 + 4 * 8


def test_a_drafter_that_is_the_target_is_always_right(server: Running) -> None:
    sent = {"prompt": "hello", "max_tokens": 25, "temperature": 0, "ignore_eos": True}
    answer = server.http.post(TEXT, json={**sent, "return_metrics": True}).json()
    drafts = answer["metrics"]["speculative_decoding"]
    assert drafts["num_spec_tokens"] == 3
    assert drafts["draft_acceptance_rate"] == 1.0
    assert sum(drafts["acceptance_histogram"]) == drafts["num_spec_steps"] > 0
    assert "metrics" not in server.http.post(TEXT, json=sent).json()


def test_metrics_of_a_request_come_with_its_stream(server: Running) -> None:
    events = stream(server, TEXT, prompt="hello", max_tokens=9, return_metrics=True)
    assert events[-2]["choices"] == []
    assert events[-2]["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
    assert events[-2]["usage"] is None


def test_a_request_tells_what_its_drafter_found_and_missed(server: Running) -> None:
    """The drafter is rebuilt from tokens: the target recomputes nothing for it."""
    sent = {"prompt": "a prompt of some length", "max_tokens": 3, "return_metrics": True}
    sent |= {"cache_salt": "draft kv"}
    cold, warm = (server.http.post(TEXT, json=sent).json()["metrics"]["draft_kv"] for _ in "ab")
    assert cold == {"hit_tokens": 0, "gap_tokens": {}, "target_recomputed_tokens": {}}
    assert warm["hit_tokens"] > 0
    assert warm["gap_tokens"] == warm["target_recomputed_tokens"] == {}
    try:
        server.on_engine(lambda e: setattr(e.kv, "faults", frozenset({"withhold_draft_rows"})))
        lost = server.http.post(TEXT, json=sent).json()["metrics"]["draft_kv"]
    finally:
        server.on_engine(lambda e: setattr(e.kv, "faults", frozenset()))
    assert lost["gap_tokens"] == {"fault": warm["hit_tokens"]}
    assert lost["hit_tokens"] == 0


def test_speculation_can_be_switched_off_for_one_request(server: Running) -> None:
    sent = {"prompt": "hello", "max_tokens": 9, "num_draft_tokens": 0, "return_metrics": True}
    drafts = server.http.post(TEXT, json=sent).json()["metrics"]["speculative_decoding"]
    assert drafts["num_draft_tokens"] == 0
    assert drafts["mean_acceptance_length"] == 1.0


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0, "repetition_penalty": 1.5},
        {"logit_bias": {"30": 3.0, "31": -100}},
        {"min_tokens": 20, "ignore_eos": False},
        {"stop_token_ids": list(range(40, 90))},
        {"logprobs": 2},
    ],
)
def test_a_parameter_means_the_same_with_and_without_a_drafter(
    server: Running, plain_server: Running, asked: dict[str, Any]
) -> None:
    sent = {"prompt": "hello", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    sent |= {"return_token_ids": True, **asked}
    speculated = whole(server.http.post(TEXT, json=sent).json())[0]
    plain = whole(plain_server.http.post(TEXT, json=sent).json())[0]
    assert speculated == plain


def test_special_tokens_are_shown_on_request(server: Running) -> None:
    sent = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "logit_bias": {"258": 100}}
    answers = [
        server.http.post(TEXT, json={**sent, "skip_special_tokens": skip}).json()["choices"][0]
        for skip in (True, False)
    ]
    assert [answer["text"] for answer in answers] == ["", "<|im_end|>"]
    assert [answer["finish_reason"] for answer in answers] == ["stop", "stop"]


def test_echo_returns_the_prompt_before_the_completion(server: Running) -> None:
    sent = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
    plain = server.http.post(TEXT, json=sent).json()["choices"][0]["text"]
    echoed = server.http.post(TEXT, json={**sent, "echo": True}).json()["choices"][0]["text"]
    assert echoed == "hello" + plain
    events = stream(server, TEXT, **sent, echo=True, return_token_ids=True)
    assert joined(events)[0]["text"] == echoed


def test_several_prompts_are_answered_in_order(server: Running) -> None:
    sent = {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
    prompts = [[5, 6, 7], [8, 9, 10]]
    both = whole(server.http.post(TEXT, json={**sent, "prompt": prompts, "n": 2}).json())
    for i, prompt in enumerate(prompts):
        alone = whole(server.http.post(TEXT, json={**sent, "prompt": prompt}).json())[0]
        assert both[2 * i] == both[2 * i + 1] == alone


def test_text_and_tokens_of_it_are_the_same_prompt(server: Running) -> None:
    tokens = server.http.post("/tokenize", json={"prompt": "héllo"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 6
    assert tokens["max_model_len"] == 256
    back = server.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": "héllo"}


def test_messages_are_tokenized_as_chat_sees_them(server: Running) -> None:
    tokens = server.http.post("/tokenize", json={"messages": user("hi")}).json()["tokens"]
    sent = {"messages": user("hi"), "max_tokens": 1, "return_token_ids": True}
    answer = server.http.post(CHAT, json=sent).json()
    assert answer["choices"][0]["prompt_token_ids"] == tokens
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_the_served_model_is_listed(server: Running) -> None:
    listed = server.http.get("/v1/models").json()["data"]
    assert [m["id"] for m in listed] == [server.engine.model_name]
    assert listed[0]["max_model_len"] == 256
    assert server.http.get(f"/v1/models/{listed[0]['id']}").json() == listed[0]
    assert server.http.get("/v1/models/other").status_code == 404
