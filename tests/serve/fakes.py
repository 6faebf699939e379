"""Workers that compute nothing: real servers that answer as a test says; a router before them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import msgspec

from tandemkv.serve.fleet import Timing
from tandemkv.serve.http import (
    EventStream,
    FastAPI,
    HttpServer,
    Request,
    Response,
    json_response,
    new_app,
    read_body,
)
from tandemkv.serve.router import Router, router_server

MODEL = "a/model"
QUICK = Timing(poll=0.05, silent=0.5, lost=1.0, lost_refusing=30.0, coverage=5.0, rest=0.2)
"""Failures are seen soon; what workers hold is waited for, however slow the machine is."""

Answer = Callable[["FakeWorker", Request, dict[str, Any]], Awaitable[Response]]


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.01)
    return found


class Served:
    """A server in a thread."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.url = server.url
        ready = threading.Event()
        run = lambda: server.run(lambda _: ready.set())  # noqa: E731
        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert ready.wait(30), "the server did not start"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        loop = self.server._server._loop
        assert loop is not None
        return loop

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server did not stop"


class FakeWorker:
    """One worker. answer: what it does with a request for generation; all else is a field.

    seen: the bodies and headers of those requests. left: those whose client went away.
    """

    def __init__(self, role: str, *, answer: Answer | None = None, **fields: Any) -> None:
        self.role = role
        self.answer = answer or whole("hello")
        self.model = MODEL
        self.engine_id = f"{role}-1"
        self.control: dict[str, Any] | None = None
        if role == "prefill":
            self.control = {"host": "127.0.0.9", "port": 5600}
        self.lacks = {"target": 10, "draft": 10}
        self.load = {"running": 0, "waiting": 0, "queued_tokens": 0}
        self.frozen = False
        self.covers = True
        self.grace_s = 0.1
        self.seen: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.left = 0
        self.produced = 0
        self.gate = threading.Event()
        self.port = 0
        for name, value in fields.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        self.start()

    def start(self) -> None:
        """Listen, on the port of before if there was one."""
        server = HttpServer(
            self._app(),
            ("127.0.0.1", self.port),
            end_all=lambda: None,
            close=lambda: None,
            grace_s=self.grace_s,
        )
        self.port = httpx.URL(server.url).port or 0
        self.served = Served(server)
        self.url = self.served.url

    def cut(self) -> None:
        """Close every connection that there is, on its loop."""
        self.served.server._server._cut_all()

    def kill(self) -> None:
        """As a process that ends by itself: nothing listens, all is cut."""
        uvicorn = self.served.server._server

        def end() -> None:
            for listening in uvicorn.servers:
                listening.close()
            uvicorn._cut_all()
            uvicorn.should_exit = True

        self.served.loop.call_soon_threadsafe(end)
        self.served.thread.join(30)
        assert not self.served.thread.is_alive()

    def stop(self) -> None:
        self.frozen = False
        self.gate.set()
        if self.served.thread.is_alive():
            self.kill()

    def _app(self) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield

        app = new_app(lifespan)

        async def thaw() -> None:
            while self.frozen:
                await asyncio.sleep(0.01)

        @app.get("/worker")
        async def worker() -> Response:
            await thaw()
            names = ("role", "engine_id", "control", "model", "load")
            return json_response({name: getattr(self, name) for name in names})

        @app.post("/coverage")
        async def coverage(request: Request) -> Response:
            await thaw()
            if not self.covers:
                return json_response({"error": {"message": "no"}}, 400)
            body = {"num_tokens": 100, "missing": self.lacks, "load": self.load}
            return json_response({"engine_id": self.engine_id, **body})

        async def generate(request: Request) -> Response:
            body = await read_body(request)
            self.seen.append(body)
            self.headers.append(httpx.Headers(request.headers.raw))
            await thaw()
            return await self.answer(self, request, body)

        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            app.add_api_route(path, generate, methods=["POST"])

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            return json_response({"by": self.url, "query": str(request.query_params)})

        @app.get("/v1/models/{name:path}")
        async def one(name: str) -> Response:
            return json_response({"name": name})

        return app


def whole(text: str, status: int = 200, **headers: str) -> Answer:
    """Answers with one JSON body."""

    async def answer(worker: FakeWorker, request: Request, body: dict[str, Any]) -> Response:
        response = json_response({"text": text}, status)
        response.headers.update(headers)
        return response

    return answer


def waits(then: Answer) -> Answer:
    """Answers when the gate is opened; counts a client that leaves before."""

    async def answer(worker: FakeWorker, request: Request, body: dict[str, Any]) -> Response:
        while not worker.gate.is_set():
            if await request.is_disconnected():
                worker.left += 1
                return Response()
            await asyncio.sleep(0.01)
        return await then(worker, request, body)

    return answer


def dies(worker: FakeWorker, request: Request, body: dict[str, Any]) -> Awaitable[Response]:
    """Cuts its connections before it says anything."""

    async def answer() -> Response:
        worker.cut()
        await asyncio.sleep(0.05)  # it is cut before this ends
        return Response()

    return answer()


class Half(Response):
    """A body of which only the beginning comes, before the connection is cut."""

    def __init__(self, worker: FakeWorker, beginning: bytes, **headers: str) -> None:
        super().__init__(headers=headers)
        self.worker, self.beginning = worker, beginning

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.beginning, "more_body": True})
        while not self.worker.gate.is_set():
            await asyncio.sleep(0.01)
        self.worker.cut()
        await asyncio.sleep(0.05)  # it is cut before this ends


def half(beginning: bytes, kind: str = "application/json") -> Answer:
    async def answer(worker: FakeWorker, request: Request, body: dict[str, Any]) -> Response:
        return Half(worker, beginning, **{"content-type": kind})

    return answer


EVENTS = "text/event-stream"


def event(text: str) -> bytes:
    return b"data: " + msgspec.json.encode({"text": text}) + b"\n\n"


def streams(count: int, *, gate_after: int | None = None, padding: int = 0) -> Answer:
    """`count` events and [DONE]; the gate is waited for after the first gate_after."""

    async def answer(worker: FakeWorker, request: Request, body: dict[str, Any]) -> Response:
        async def events() -> AsyncIterator[bytes]:
            for i in range(count):
                while i == gate_after and not worker.gate.is_set():
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0)  # to see a client that left
                worker.produced += 1
                yield event(f"{i}" + " " * padding)
            ended.append(True)
            yield b"data: [DONE]\n\n"

        def stopped() -> None:
            worker.left += not ended

        ended: list[bool] = []
        return EventStream(events(), stopped)

    return answer


class Routed:
    """A router in a thread, before these workers."""

    def __init__(
        self, workers: list[FakeWorker | tuple[str, str]], timing: Timing = QUICK, **options: Any
    ) -> None:
        named = [(w.role, w.url) if isinstance(w, FakeWorker) else w for w in workers]
        self.router = Router(
            *([url for role, url in named if role == asked] for asked in ("prefill", "decode")),
            timing=timing,
        )
        self.served = Served(router_server(self.router, ("127.0.0.1", 0), **options))
        self.url = self.served.url
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def stop(self) -> None:
        self.http.close()
        self.served.stop()

    def workers(self) -> dict[str, dict[str, Any]]:
        return {w["url"]: w for w in self.http.get("/health").json()["workers"]}

    def settle(self, alive: int) -> None:
        """Wait until so many workers are alive."""
        until(lambda: sum(w["alive"] for w in self.workers().values()) == alive, "the workers")

    def samples(self) -> dict[str, float]:
        """Metrics by name{labels}, without prefix and zeros."""
        lines: Iterator[str] = iter(self.http.get("/metrics").text.splitlines())
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {k.removeprefix("tandemkv:router_"): float(v) for k, v in pairs if float(v)}
