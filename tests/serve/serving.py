"""A server in a thread over a tiny engine, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tandemkv.base.config import EngineConfig
from tandemkv.engine.background import AsyncEngine
from tandemkv.engine.engine import Engine
from tandemkv.serve.service import engine_server


class Running:
    """A server in a thread, over an engine; everything a test may look at."""

    def __init__(self, engine: Any, *, grace_s: float = 10.0) -> None:
        self.engine = engine
        self.server = engine_server(engine, ("127.0.0.1", 0), grace_s=grace_s)
        self.url = self.server.url
        ready = threading.Event()

        def run() -> None:
            with contextlib.suppress(KeyboardInterrupt):  # a stop that was forced
                self.server.run(lambda _: ready.set())

        self.thread = threading.Thread(target=run, daemon=True)  # one that hangs ends with us
        self.thread.start()
        assert ready.wait(30), "the server did not start"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def on_engine(self, work: Callable[[Any], Any]) -> Any:
        """Run work(engine) between two steps."""
        return asyncio.run(self.engine.call(work))

    def pages(self) -> list[tuple[int, int, int, int]]:
        """(free, held, cached, total) of each layer group."""
        usage = self.on_engine(lambda engine: engine.kv.usage())
        return [(u.free, u.held, u.cached, u.total) for u in usage]

    def settle(self) -> None:
        """Wait until nothing runs; then nothing may be held, lost, or out of order."""
        deadline = time.monotonic() + 30
        while self.on_engine(lambda engine: engine.has_work):
            assert time.monotonic() < deadline, "requests never ended"
            time.sleep(0.01)
        self.on_engine(lambda engine: engine.check())
        for free, held, cached, total in self.pages():
            assert held == 0
            assert free + cached == total

    def stop(self, within_s: float = 30) -> None:
        self.http.close()
        self.server.stop()
        self.thread.join(within_s)
        assert not self.thread.is_alive(), f"the server did not stop\n{self.what_runs()}"

    def what_runs(self) -> str:
        """What a server that does not stop waits for: its thread, tasks, timers, connections."""
        serving = self.server._server
        out = io.StringIO()
        state = (serving.should_exit, serving.force_exit, self.engine.alive)
        print("should exit, forced, engine alive:", *state, file=out)
        frame = sys._current_frames().get(self.thread.ident or 0)
        out.writelines(traceback.format_stack(frame))
        for connection in list(serving.server_state.connections):
            cycle = connection.cycle
            doing = "idle" if cycle is None or cycle.response_complete else cycle.scope["path"]
            closing = connection.transport.is_closing()
            print("connection", connection.client, doing, f"closing: {closing}", file=out)
        if serving._loop is not None:
            print(f"its clock: {serving._loop.time()}, {serving._loop}", file=out)
            for timer in list(serving._loop._scheduled):
                print("timer", timer, file=out)
            for task in asyncio.all_tasks(serving._loop):
                task.print_stack(file=out)
        return out.getvalue()


def start_engine(model: Path | None, **options: Any) -> AsyncEngine:
    """An AsyncEngine over a model (None: the default) with small pools and every check on."""
    sizes = {"kv_cache_tokens": 4096, "max_model_len": 256, "block_size": 4, "threads": 1}
    fixed = {"model": model and str(model), "dtype": "float32", "device": "cpu", "debug": True}
    return AsyncEngine(Engine.from_config(EngineConfig(**{**fixed, **sizes, **options})))


def events_of(lines: Iterator[str]) -> Iterator[Any]:
    """The JSON of each server-sent event; "[DONE]" as it is."""
    for line in lines:
        if line:
            assert line.startswith("data: ")
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = {"prompt": "a long story", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def stream(server: Running, path: str, **sent: Any) -> list[Any]:
    with server.http.stream("POST", path, json={**sent, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events_of(response.iter_lines()))


def joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """What a stream says of each choice, put together."""
    out: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            so_far = out.setdefault(
                choice["index"], {"text": "", "token_ids": [], "logprobs": [], "finish": None}
            )
            delta = choice.get("delta", {})
            so_far["text"] += delta.get("content", "") + choice.get("text", "")
            so_far["token_ids"] += choice["token_ids"]
            so_far["logprobs"] += entries(choice)
            so_far["finish"] = so_far["finish"] or choice["finish_reason"]
    return out


class Score(float):
    """A log probability: a prompt found in the cache ran in other batches than one computed."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) <= 1e-4

    __hash__ = float.__hash__


def entries(choice: dict[str, Any]) -> list[Any]:
    """The log probability entries of a chat or completion choice, with Scores for floats."""
    logprobs = choice["logprobs"] or {}
    if "tokens" in logprobs:
        fields = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        found = [list(entry) for entry in zip(*(logprobs[f] for f in fields), strict=True)]
    else:
        found = logprobs.get("content", [])
    return json.loads(json.dumps(found), parse_float=Score)


def whole(response: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What a response that is not streamed says of each choice."""
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "token_ids": choice["token_ids"],
            "logprobs": entries(choice),
            "finish": choice["finish_reason"],
        }
        for choice in response["choices"]
    }
