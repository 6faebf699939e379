"""Server-sent events: their order, and that put together they are the whole answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import CHAT, TEXT, Running, joined, stream, user, whole


def test_a_chat_stream_has_role_first_then_text_finish_usage_and_done(server: Running) -> None:
    events = stream(
        server,
        CHAT,
        messages=user("hello"),
        max_tokens=9,
        temperature=0,
        ignore_eos=True,
        stream_options={"include_usage": True},
    )
    assert events[-1] == "[DONE]"
    *chunks, finish, usage = events[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in chunks[1:])
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert all(chunk["usage"] is None for chunk in [*chunks, finish])
    assert finish["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9
    assert len({(chunk["id"], chunk["object"], chunk["created"]) for chunk in events[:-1]}) == 1


def first_letters(server: Running, length: int) -> str:
    """Some text that the model writes after "hello": a stop string that will be met."""
    sent = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = server.http.post(TEXT, json=sent).json()["choices"][0]["text"]
    solid = [i for i in range(4, 36 - length) if "\ufffd" not in text[i : i + length]]
    return text[solid[0] : solid[0] + length]


STREAMED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.0, "seed": 4, "n": 3},
    {"logprobs": 2},
    {"stop": "<from the text>", "logprobs": 1},
    {"stop": ["<from the text>", "\u0000\u0001nothing"], "n": 2},
    {"num_draft_tokens": 0, "logprobs": 0},
    {"ignore_eos": False, "logit_bias": {"258": 100}},
]


@pytest.mark.parametrize("case", range(len(STREAMED)))
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_put_together_is_the_whole_answer(server: Running, path: str, case: int) -> None:
    sent: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    sent |= {"return_token_ids": True, **STREAMED[case]}
    if "stop" in sent:
        stop = first_letters(server, 2)
        sent["stop"] = stop if isinstance(sent["stop"], str) else [stop, *sent["stop"][1:]]
    sent |= {"messages": user("hello")} if path == CHAT else {"prompt": "hello"}
    if path == CHAT:
        sent |= {"top_logprobs": sent["logprobs"], "logprobs": True}
    complete = server.http.post(path, json=sent).json()
    assert joined(stream(server, path, **sent)) == whole(complete)
    for choice in whole(complete).values():
        assert len(choice["token_ids"]) == len(choice["logprobs"])
    total = sum(len(choice["token_ids"]) for choice in whole(complete).values())
    assert complete["usage"]["completion_tokens"] == total


def test_the_comparison_of_streams_can_fail(server: Running) -> None:
    sent = {"prompt": "hello", "max_tokens": 9, "return_token_ids": True, "temperature": 0}
    events = stream(server, TEXT, **sent)
    answer = whole(server.http.post(TEXT, json=sent).json())
    assert joined(events) == answer
    assert joined(events[:1] + events[2:]) != answer


def test_a_stop_string_inside_an_accepted_run_cuts_text_tokens_and_logprobs(
    server: Running,
) -> None:
    sent = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    sent |= {"return_token_ids": True, "logprobs": 2, "return_metrics": True}
    free = server.http.post(TEXT, json=sent).json()
    letters = first_letters(server, 2)
    cut = server.http.post(TEXT, json={**sent, "stop": letters}).json()
    was, now = free["choices"][0], cut["choices"][0]
    assert now["text"] == was["text"].split(letters)[0]
    asked = {**sent, "stop": letters, "include_stop_str_in_output": True}
    with_stop = server.http.post(TEXT, json=asked).json()["choices"][0]
    assert with_stop["text"] == now["text"] + letters
    assert with_stop["token_ids"] == now["token_ids"]
    assert now["finish_reason"] == "stop"
    kept = len(now["token_ids"])
    assert now["token_ids"] == was["token_ids"][:kept]
    assert kept < 40
    assert len(now["logprobs"]["tokens"]) == kept
    assert cut["usage"]["completion_tokens"] == kept
    drafts = cut["metrics"]["speculative_decoding"]
    assert drafts["num_accepted_draft_tokens"] <= drafts["num_draft_tokens"]


def test_sixteen_streams_at_once_say_what_each_says_alone(server: Running) -> None:
    asked = [
        {"prompt": f"story {i % 5} of many", "max_tokens": 12 + i, "temperature": 0}
        | {"return_token_ids": True, "ignore_eos": True}
        for i in range(16)
    ]
    alone = [whole(server.http.post(TEXT, json=sent).json()) for sent in asked]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda sent: joined(stream(server, TEXT, **sent)), asked))
    assert together == alone
