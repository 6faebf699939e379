"""HTTP: applications, bounded bodies, event streams, disconnects, servers. The one door to FastAPI.

    connection -> application -> a route of service.py or router.py -> JSON or server-sent events

Law: every answer, also an error, has the API's shape; no traceback leaves the process; work for a
client that goes away is cancelled, and a server that is told to stop does so in a bounded time. No
route is declared here: modules that have some take these names from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import FrameType
from typing import Any, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandemkv.base.errors import RequestError
from tandemkv.serve import answers
from tandemkv.serve.address import bind
from tandemkv.serve.answers import Json
from tandemkv.serve.fields import Body, decode_body

__all__ = [
    "CLIENT_GONE",
    "DEFAULT_GRACE_S",
    "EventStream",
    "FastAPI",
    "HttpServer",
    "Request",
    "Response",
    "json_response",
    "new_app",
    "read_body",
    "read_raw",
    "while_connected",
]

MAX_BODY_BYTES = 8 << 20
CLIENT_GONE = 499
DEFAULT_GRACE_S = 10.0
ACCEPTING_S = 0.05
FLUSH_S = 2.0
CANCEL_AFTER_S = 3.0

T = TypeVar("T")


def json_response(body: Json, status: int = 200) -> Response:
    """A response of one JSON object."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def new_app(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """An application without routes, whose errors have the API's shape.

    lifespan: entered before the first request, left after the last.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    _add_errors(app)
    return app


class EventStream(Response):
    """A response of server-sent events that stops, and says so to `stopped`, with its client."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], stopped: Callable[[], None]) -> None:
        self._events = events
        self._stopped = stopped
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        finally:
            self._stopped()

    async def _send(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client goes away first, and then `work` is cancelled."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    watching = asyncio.create_task(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def read_body(request: Request) -> Body:
    """The request's JSON object, at most MAX_BODY_BYTES long (else 413)."""
    return decode_body(await read_raw(request))


async def read_raw(request: Request) -> bytes:
    """The request's body, at most MAX_BODY_BYTES long (else 413)."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            raise RequestError(f"the body exceeds {MAX_BODY_BYTES} bytes", status=413)
    return bytes(raw)


def _add_errors(app: FastAPI) -> None:
    def reply(message: str, status: int, param: str | None = None) -> Response:
        return json_response(answers.error_body(message, status, param), status)

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return reply(str(error), error.status, error.param)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path!r:.100}"
        return reply(f"{error.detail}: {where}", error.status_code)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return reply(f"the request is invalid: {error}", 400)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def internal(_: Request, error: Exception) -> Response:
        return reply("internal error: see the server's log", 500)


class HttpServer:
    """A server on one address: bound when made, answering while `run()` runs.

    at: host and port (0 takes a free one), or what `bind` returned. When it stops, running answers
    have grace_s to end; then `end_all` is called, on the loop, to end them with an error that has
    FLUSH_S to reach its client; then what is still connected is cut, whatever it does. `close` is
    called last, by `run()`, also where the end was forced and the application's lifespan not left.
    """

    def __init__(
        self,
        app: FastAPI,
        at: tuple[str, int] | socket.socket,
        *,
        end_all: Callable[[], None],
        close: Callable[[], None],
        grace_s: float = DEFAULT_GRACE_S,
    ) -> None:
        self._close = close
        self._socket = at if isinstance(at, socket.socket) else bind(*at)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(grace_s + FLUSH_S + CANCEL_AFTER_S),
            lifespan="on",
        )
        self._server = _Uvicorn(config)
        self._server.grace_s = grace_s
        self._server.end_all = end_all

    def run(
        self,
        ready: Callable[[str], None] | None = None,
        stopping: Callable[[int], None] | None = None,
    ) -> None:
        """Serve until stopped or signalled; a second SIGINT does not wait: KeyboardInterrupt.

        ready(url) is called when it answers, stopping(requests) when it stops with some in flight.
        """
        if ready is not None:
            self._server.ready = lambda: ready(self.url)
        self._server.stopping = stopping
        try:
            with contextlib.suppress(KeyboardInterrupt):
                self._server.run(sockets=[self._socket])
        finally:
            logging.getLogger("uvicorn.error").disabled = False
            self._close()
        if self._server.force_exit:
            raise KeyboardInterrupt

    def run_shown(self, line: Callable[[str], str]) -> None:
        """`run()` for an operator: line(url) on stdout when it answers, remarks on stderr."""

        def stopping(count: int) -> None:
            requests = f"{count} request{'s' if count > 1 else ''}"
            text = f"finishing {requests}; press Ctrl-C again to stop now"
            print(text, file=sys.stderr, flush=True)

        self.run(lambda url: print(line(url), flush=True), stopping)

    def stop(self) -> None:
        """Ask `run()`, in another thread, to end."""
        self._server.should_exit = True
        self._server.wake()


class _Uvicorn(uvicorn.Server):
    ready: Callable[[], None] | None = None
    stopping: Callable[[int], None] | None = None
    end_all: Callable[[], None]
    grace_s: float
    _loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and self.ready is not None:
            self.ready()

    def wake(self, work: Callable[[], None] = lambda: None) -> None:
        """Have the loop look at `should_exit` now; a timer may fire late if the clock was set."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(work)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.started:
            self.wake(self.end_all if self.force_exit else lambda: None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in self.servers:
            listening.close()
        await asyncio.sleep(ACCEPTING_S)  # a connection that was just accepted is not seen before
        in_flight = len(self.server_state.tasks)
        if in_flight and self.stopping is not None:
            self.stopping(in_flight)
        later = asyncio.get_running_loop().call_later
        timers = [later(self.grace_s, self.end_all), later(self.grace_s + FLUSH_S, self._cut_all)]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()
        if self.force_exit:  # tasks cut off are no errors to report
            logging.getLogger("uvicorn.error").disabled = True
            self._cut_all()
            await asyncio.sleep(0)  # they learn of it before they are cancelled

    def _cut_all(self) -> None:
        """Close every connection now: a client that is silent or reads nothing holds nothing up."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
