"""Bad input over HTTP: the right status, one line with the field at fault, nothing leaked."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
from serving import CHAT, TEXT, Running, user

from tandemkv.serve.http import MAX_BODY_BYTES
from tandemkv.serve.service import create_app


def raw(value: bytes) -> dict[str, Any]:
    return {"content": value}


def body(**fields: Any) -> dict[str, Any]:
    return {"content": json.dumps(fields).encode()}


# what is sent, where to, the status and the field named in the answer
BAD_INPUT: list[tuple[str, dict[str, Any], int, str | None]] = [
    (CHAT, body(model="gpt-4", messages=user("x")), 404, "model"),
    (CHAT, body(messages=user("x" * 300)), 400, "messages"),
    (TEXT, body(prompt="x" * 300), 400, "prompt"),
    (TEXT, body(prompt=[1] * 256), 400, "prompt"),
    (TEXT, body(prompt="x", max_tokens=256), 400, "max_tokens"),
    (TEXT, body(prompt=["fits", "x" * 300]), 400, "prompt"),
    (CHAT, raw(b"{"), 400, None),
    (CHAT, raw(b""), 400, None),
    (CHAT, raw(b'{"messages": [}'), 400, None),
    (CHAT, raw(b"[" * 100_000), 400, None),
    (CHAT, raw(b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'), 400, None),
    (TEXT, raw(b'{"prompt": "\xc3\x28"}'), 400, None),
    (TEXT, raw(b'{"prompt": "\\ud800"}'), 400, None),
    (CHAT, body(messages=user("x"), temperature=float("nan")), 400, "temperature"),
    (CHAT, body(messages=user("x"), temperature=float("inf")), 400, "temperature"),
    (CHAT, body(messages=user("x"), temperature=-1), 400, "temperature"),
    (CHAT, body(messages=user("x"), n=17), 400, "n"),
    (CHAT, body(messages=user("x"), n=10**18), 400, "n"),
    (CHAT, body(messages=[]), 400, "messages"),
    (CHAT, body(), 400, "messages"),
    (CHAT, body(messages=[{"role": "robot", "content": "x"}]), 400, "messages"),
    (CHAT, body(messages=user([{"type": "image_url", "image_url": {}}])), 400, "messages"),
    (CHAT, body(messages=user("x"), tools=[{"type": "function"}]), 400, "tools"),
    (CHAT, body(messages=user("x"), tool_choice="required"), 400, "tool_choice"),
    (CHAT, body(messages=user("x"), response_format={"type": "json"}), 400, "response_format"),
    (CHAT, body(messages=user("x"), guided_regex="a+"), 400, "guided_regex"),
    (CHAT, body(messages=user("x"), temprature=1), 400, "temprature"),
    (CHAT, body(messages=user("x"), num_draft_tokens=999), 400, "num_draft_tokens"),
    (CHAT, body(messages=user("x"), repetition_penalty=1e-45), 400, "repetition_penalty"),
    (TEXT, body(prompt="x", stop_token_ids=[*range(250)] * 9), 400, "stop_token_ids"),
    (TEXT, body(prompt="word " * 200_000), 400, "prompt"),
    (CHAT, body(messages=user("word " * 200_000)), 400, "messages"),
    (TEXT, body(prompt="x", best_of=2), 400, "best_of"),
    (TEXT, body(prompt="x", suffix="y"), 400, "suffix"),
    (TEXT, body(prompt=""), 400, "prompt"),
    (TEXT, body(prompt=[]), 400, "prompt"),
    (TEXT, body(prompt=[10**6]), 400, "prompt"),
    (TEXT, body(prompt="x", logit_bias={"1000000": 1}), 400, "logit_bias"),
    (TEXT, body(prompt="x", stream=True, max_tokens=0), 400, "max_tokens"),
    (TEXT, body(prompt="x", stream=True, stop=""), 400, "stop"),
    (TEXT, raw(b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'), 413, None),
    ("/tokenize", body(), 400, "prompt"),
    ("/tokenize", body(prompt=5), 400, "prompt"),
    ("/detokenize", body(tokens=[-1]), 400, "tokens"),
    ("/detokenize", body(tokens="abc"), 400, "tokens"),
    ("/v1/nothing", body(), 404, None),
]


@pytest.mark.parametrize("case", range(len(BAD_INPUT)))
def test_bad_input_is_refused_in_one_line_and_leaks_nothing(server: Running, case: int) -> None:
    path, sent, status, param = BAD_INPUT[case]
    before = server.pages()
    response = server.http.post(path, **sent)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"]
    assert "\n" not in error["message"]
    assert "Traceback" not in response.text
    assert server.pages() == before
    server.settle()


def test_a_prompt_too_long_is_told_with_both_numbers(server: Running) -> None:
    message = server.http.post(TEXT, json={"prompt": [5] * 300}).json()["error"]["message"]
    assert "300" in message
    assert "256" in message


def test_another_method_is_refused_in_the_apis_shape(server: Running) -> None:
    response = server.http.get(CHAT)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == 405


def test_bytes_that_are_no_http_do_no_harm(server: Running) -> None:
    port = httpx.URL(server.url).port
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"\x00\xff garbage\r\n\r\n")
        sock.settimeout(5)
        assert sock.recv(100).startswith(b"HTTP/1.1 400")


def test_a_body_cut_short_by_its_client_does_no_harm(server: Running) -> None:
    port = httpx.URL(server.url).port
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(head + b'{"prompt": ')


def test_an_error_of_ours_shows_no_inside(server: Running) -> None:
    app = create_app(server.engine)

    @app.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError("a secret path")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/broken")

    response = asyncio.run(ask())
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_error"
    assert "secret" not in response.text
