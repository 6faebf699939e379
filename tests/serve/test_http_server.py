"""The server as such: clients that leave, metrics, a dying engine, shutdown, addresses."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import CHAT, LONG, TEXT, Running, events_of, user

from tandemkv.base.errors import ConfigError
from tandemkv.serve.address import bind


def held(server: Running) -> int:
    return sum(pages[1] for pages in server.pages())


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.01)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_pages(server: Running, streamed: bool) -> None:
    """One request of sixteen choices would run for long; its client is gone after a moment."""
    sent = json.dumps({**LONG, "stream": streamed, "n": 16, "max_tokens": 240}).encode()
    port = httpx.URL(server.url).port
    tokens = lambda: server.on_engine(lambda e: e.scheduler.stats.generation_tokens)  # noqa: E731
    before = tokens()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(head + sent)
        until(lambda: held(server) > 0, "a page")
    until(lambda: held(server) == 0, "the end")
    assert tokens() - before < 16 * 240
    assert server.on_engine(lambda e: not e.has_work)


def samples(server: Running) -> dict[str, float]:
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            name = sample.name.removeprefix("tandemkv:")
            out[name] = out.get(name, 0) + sample.value
    return out


def test_metrics_add_up_while_requests_run_and_after(server: Running) -> None:
    before = samples(server)
    with server.http.stream("POST", TEXT, json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        during = samples(server)
        for _ in lines:
            pass
    after = samples(server)
    for seen in (during, after):
        accepted = seen["spec_decode_num_accepted_tokens_total"]
        assert seen["spec_decode_num_accepted_tokens_per_pos_total"] == accepted
        assert accepted <= seen["spec_decode_num_draft_tokens_total"]
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 200
    assert after["request_success_total"] == before["request_success_total"] + 1
    waits = "time_to_first_token_seconds_count"
    assert after[waits] == before[waits] + 1
    between = "inter_token_latency_seconds_count"
    assert after[between] == before[between] + 199
    assert after["num_requests_running"] == after["kv_cache_usage_perc"] == 0


def test_an_engine_that_dies_ends_its_requests_and_is_told(start: Callable[..., Running]) -> None:
    server = start(drafter="none")

    def die(_: Any) -> None:
        raise ZeroDivisionError("a fault on the engine's thread")

    with server.http.stream("POST", TEXT, json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        server.engine.post(die)
        *_, last, done = list(events_of(lines))
    assert "engine stopped" in last["error"]["message"]
    assert last["error"]["code"] == 503
    assert done == "[DONE]"
    for path in (CHAT, TEXT):
        sent = {"messages": user("x")} if path == CHAT else {"prompt": "x"}
        assert server.http.post(path, json=sent).status_code == 503
    assert server.http.get("/health").status_code == 503
    assert samples(server)["request_success_total"] == 1
    server.stop()


def test_a_step_that_fails_is_a_server_error_and_no_more(start: Callable[..., Running]) -> None:
    server = start(drafter="none")

    def break_next_step(engine: Any) -> None:
        run = engine.runner.run

        def failing(plan: Any) -> Any:
            engine.runner.run = run
            raise ValueError("a kernel\nfailed")

        engine.runner.run = failing

    server.on_engine(break_next_step)
    response = server.http.post(TEXT, json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the step failed: a kernel failed"
    server.settle()
    assert server.http.post(TEXT, json={"prompt": "x"}).status_code == 200
    server.stop()


def test_a_server_that_stops_ends_its_streams_and_closes_the_engine(
    start: Callable[..., Running],
) -> None:
    server = start(drafter="none", grace_s=0.2)
    sent = {**LONG, "n": 16, "stream": True}
    with server.http.stream("POST", TEXT, json=sent) as response:
        lines = response.iter_lines()
        next(lines)
        server.server.stop()
        *_, last, done = list(events_of(lines))
    assert last["error"]["message"] == "the server is shutting down"
    assert done == "[DONE]"
    server.thread.join(20)
    assert not server.thread.is_alive()
    assert not server.engine.alive
    assert [u.held for u in server.engine.usage()] == [0]


def test_a_short_request_is_answered_while_the_server_stops(start: Callable[..., Running]) -> None:
    server = start(drafter="none")
    sent = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", TEXT, json=sent) as response:
        lines = response.iter_lines()
        next(lines)
        server.server.stop()
        *_, finish, done = list(events_of(lines))
    assert finish["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
    server.stop()


def test_a_port_in_use_is_one_line_for_the_operator(server: Running) -> None:
    port = httpx.URL(server.url).port
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--port") as caught:
        bind("127.0.0.1", port)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--host"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(ConfigError):
        bind("127.0.0.1", 70_000)


def test_a_leak_would_be_seen(
    tiny_model: Callable[..., Path], start: Callable[..., Running]
) -> None:
    """The check after every test can fail: a sequence that nobody releases is found."""
    server = start(drafter="none")
    server.settle()
    server.on_engine(lambda engine: engine.kv.claim([1, 2, 3, 4, 5]))
    with pytest.raises(Exception, match=r".*"):
        server.settle()
