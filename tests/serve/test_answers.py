"""Answers: usage, log probabilities, acceptance, errors, in the shapes that clients read."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemkv.base.logprobs import TokenLogprobs
from tandemkv.serve.answers import (
    Acceptance,
    Envelope,
    Format,
    Piece,
    error_body,
    token_bytes_of,
    usage,
)

WORDS = {1: b"hello", 2: b" world", 3: b"\xe2\x82", 4: b"\xac"}


def form(*, chat: bool, logprobs: bool = True, token_ids: bool = False) -> Format:
    return Format(
        chat=chat, logprobs=logprobs, return_token_ids=token_ids, token_bytes=WORDS.__getitem__
    )


def scored(*tokens: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(t, -0.5, ((t, -0.5), (1, float("-inf")))) for t in tokens]


def test_chat_logprobs_hold_one_entry_per_token_with_its_bytes() -> None:
    body = form(chat=True).whole(Piece(0, "€", [3, 4], scored(3, 4), "stop"))
    content = body["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xE2, 0x82], [0xAC]]
    assert content[0]["top_logprobs"][1] == {
        "token": "hello",
        "logprob": -9999.0,
        "bytes": list(b"hello"),
    }
    assert body["message"]["content"] == "€"
    assert body["finish_reason"] == "stop"
    msgspec.json.encode(body)


def test_completion_logprobs_know_where_each_token_starts_across_chunks() -> None:
    stream = form(chat=False)
    first = stream.delta(Piece(0, "hello", [1], scored(1)))["logprobs"]
    second = stream.delta(Piece(0, " world", [2], scored(2)))["logprobs"]
    other = stream.delta(Piece(1, " world", [2], scored(2)))["logprobs"]
    assert first["text_offset"] == [0]
    assert second["text_offset"] == [5]
    assert other["text_offset"] == [0]
    assert second["tokens"] == [" world"]
    assert second["token_logprobs"] == [-0.5]
    assert second["top_logprobs"] == [{" world": -0.5, "hello": -9999.0}]


def test_nothing_is_returned_that_was_not_asked_for() -> None:
    plain = form(chat=True, logprobs=False)
    body = plain.whole(Piece(0, "hello", [1], [], "stop"))
    assert body["logprobs"] is None
    assert "token_ids" not in body
    assert not plain.says_something(Piece(0, "", [1]))
    assert form(chat=True).says_something(Piece(0, "", [1], scored(1)))


def test_token_ids_are_returned_on_request() -> None:
    body = form(chat=False, token_ids=True).whole(Piece(0, "hello", [1], [], "length", [7, 8]))
    assert body["token_ids"] == [1]
    assert body["prompt_token_ids"] == [7, 8]


def test_usage_adds_up() -> None:
    assert usage(10, 3, 8) == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_acceptance_is_written_as_others_write_it() -> None:
    pooled = Acceptance(num_spec_tokens=3)
    pooled.add(steps=43, drafts=129, accepted=10, accepted_at=(4, 3, 3))
    assert pooled.body() == {
        "mean_acceptance_length": 1 + 10 / 43,
        "draft_acceptance_rate": 10 / 129,
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }


def test_without_a_draft_a_step_emits_one_token() -> None:
    body = Acceptance(num_spec_tokens=2).body()
    assert body["mean_acceptance_length"] == 1.0
    assert body["draft_acceptance_rate"] is None
    assert body["acceptance_histogram"] == [0, 0, 0]
    assert Acceptance().body()["acceptance_histogram"] == [0]


@given(st.lists(st.lists(st.integers(0, 4), max_size=20), max_size=4))
def test_a_histogram_counts_every_step_once(requests: list[list[int]]) -> None:
    pooled = Acceptance(num_spec_tokens=4)
    for steps in requests:
        reached = [sum(a > j for a in steps) for j in range(max(steps, default=0))]
        pooled.add(len(steps), 4 * len(steps), sum(steps), reached)
    every = [a for steps in requests for a in steps]
    assert pooled.histogram() == [every.count(j) for j in range(5)]
    assert sum(pooled.accepted_at) == pooled.num_accepted


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (413, "invalid_request_error"), (500, "internal_error")],
)
def test_an_error_is_one_bounded_line(status: int, kind: str) -> None:
    error = error_body("bad\n  value " + "x" * 10_000, status, "n")["error"]
    assert error["message"].startswith("bad value xxx")
    assert len(error["message"]) == 500
    assert (error["type"], error["param"], error["code"]) == (kind, "n", status)


def test_an_unknown_model_has_the_code_that_clients_look_for() -> None:
    assert error_body("no", 404, "model")["error"]["code"] == "model_not_found"
    assert error_body("no", 404)["error"]["code"] == 404


def test_an_envelope_repeats_itself() -> None:
    envelope = Envelope.new("cmpl-1", "text_completion", "tiny")
    body = envelope.body([], usage=None)
    assert body["id"] == "cmpl-1"
    assert json.loads(msgspec.json.encode(body)) == body


class ByteLevel:
    """A byte-level vocabulary of three pieces, as tokenizers show them."""

    all_special_ids = (2,)
    pieces = ("Ġhi", "âĤ", "<|end|>", "<0x41>")

    class backend_tokenizer:
        decoder = "ByteLevel()"

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.pieces[token] if token < 4 else None

    def decode(self, tokens: list[int]) -> str:
        return self.pieces[tokens[0]]


def test_the_bytes_of_a_token_can_be_joined_into_text() -> None:
    token_bytes = token_bytes_of(ByteLevel())
    assert token_bytes(0) == b" hi"
    assert token_bytes(1) == "€".encode()[:2]
    assert token_bytes(2) == b"<|end|>"
    assert token_bytes(3) == b"A"
    assert token_bytes(99) == b""
