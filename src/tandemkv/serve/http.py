"""The HTTP server: routes, bodies, event streams, disconnects. The one file that knows FastAPI.

    request -> body (bounded) -> Ask -> prompt tokens -> Generation -> JSON or server-sent events

Law: every answer, also an error, has the API's shape; no traceback leaves the process; the engine
requests of a client that goes away, streaming or not, are aborted. No parameter is checked here and
no choice written: openai.py, generation.py, reply.py and answers.py do that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import sys
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
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
from tandemkv.engine.background import AsyncEngine
from tandemkv.serve import answers, chat, metrics
from tandemkv.serve.address import bind
from tandemkv.serve.answers import Format, Json
from tandemkv.serve.fields import Body, decode_body, flag, refuse_unknown, text
from tandemkv.serve.generation import Generation
from tandemkv.serve.openai import (
    Ask,
    Limits,
    check_model,
    parse_chat,
    parse_completion,
    parse_tokens,
)
from tandemkv.serve.reply import Answer

log = logging.getLogger("tandemkv")

MAX_BODY_BYTES = 8 << 20
CLIENT_GONE = 499
METRICS_WAIT_S = 2.0
DEFAULT_GRACE_S = 10.0
ACCEPTING_S = 0.05
FLUSH_S = 2.0
CANCEL_AFTER_S = 3.0
FORCED_CLOSE_S = 2.0

T = TypeVar("T")


class Service:
    """What the routes share: the engine, its limits, the tokenizer's thread, the latencies."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.limits = Limits(
            engine.model_name,
            engine.max_model_len,
            engine.vocab_size,
        )
        self.latencies = metrics.Latencies()
        self._snapshot = metrics.Snapshot()
        self._running: weakref.WeakSet[Generation] = weakref.WeakSet()
        self.started = int(time.time())
        self._token_bytes = answers.token_bytes_of(engine.tokenizer)
        # One thread: long prompts do not hold up the event loop, and the tokenizer sees one caller.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tandemkv-tokenize")
        longest = max((len(piece) for piece in engine.tokenizer.get_vocab()), default=1)
        self._max_chars = engine.max_model_len * longest

    async def tokenize(self, prompt: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

        def work() -> list[int]:
            return self.engine.tokenizer(
                prompt, add_special_tokens=add_special_tokens, verbose=False
            ).input_ids

        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    async def prompt_tokens(self, ask: Ask) -> list[list[int]]:
        """Token ids of every prompt of an Ask."""
        prompts: list[str | list[int]] = list(ask.prompts)
        if ask.chat:
            prompts = [chat.render(self.engine.tokenizer, ask.messages, ask.template)]
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > self._max_chars:  # not worth tokenizing
                raise RequestError(
                    f"the prompt has {len(prompt)} characters, more than this model's context of"
                    f" {self.engine.max_model_len} tokens can hold",
                    param="messages" if ask.chat else "prompt",
                )
        return [
            await self.tokenize(prompt, ask.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]

    async def answer(self, request: Request, ask: Ask) -> Response:
        """Run an Ask: a JSON response, or an event stream."""
        if not self.engine.alive:
            raise RequestError(self.engine.error or "the engine is shut down", status=503)
        prompts = await self.prompt_tokens(ask)
        request_id = f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid.uuid4().hex}"
        generation = Generation(self.engine, ask, prompts, self.limits, self.latencies, request_id)
        self._running.add(generation)
        form = Format(
            chat=ask.chat,
            logprobs=ask.params.logprobs is not None,
            return_token_ids=ask.return_token_ids,
            token_bytes=self._token_bytes,
        )
        answer = Answer(self.engine, ask, generation, form, request_id)
        await generation.start()
        if ask.stream:
            return EventStream(answer.events(), generation.abort)
        body = await while_connected(request.receive, answer.whole())
        return _json(body) if body is not None else Response(status_code=CLIENT_GONE)

    async def metrics(self) -> bytes:
        """The exposition text; a step that takes long delays it by METRICS_WAIT_S at most."""
        with contextlib.suppress(TimeoutError, RequestError):
            if self.engine.alive:
                taking = self.engine.call(metrics.snapshot_of)
                self._snapshot = await asyncio.wait_for(taking, METRICS_WAIT_S)
        return metrics.render(self.limits.model, self._snapshot, self.latencies)

    def end_all(self) -> None:
        """End every answer in progress with an error; those that are over take no notice."""
        for generation in self._running:
            generation.fail(RequestError("the server is shutting down", status=503))

    def closing(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)


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
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            raise RequestError(f"the body exceeds {MAX_BODY_BYTES} bytes", status=413)
    return decode_body(bytes(raw))


def create_app(engine: AsyncEngine, *, closes_engine: bool = False) -> FastAPI:
    """The application over a running engine. closes_engine: close it when the server stops."""
    service = Service(engine)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.closing()
        if closes_engine:
            await asyncio.to_thread(engine.close)

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    _add_api(app, service)
    _add_information(app, service)
    _add_errors(app)
    return app


def _add_api(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await service.answer(request, parse_chat(await read_body(request), service.limits))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request)
        return await service.answer(request, parse_completion(body, service.limits))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request)
        names = {"model", "prompt", "messages", "add_special_tokens", "add_generation_prompt"}
        refuse_unknown(body, frozenset(names))
        check_model(body, service.limits)
        is_chat = body.get("messages") is not None
        if is_chat == (body.get("prompt") is not None):
            raise RequestError("exactly one of prompt and messages is needed", param="prompt")
        prompt = text(body, "prompt", "")
        if is_chat:
            options = chat.TemplateOptions(flag(body, "add_generation_prompt", True))
            messages = chat.parse_messages(body["messages"])
            prompt = chat.render(service.engine.tokenizer, messages, options)
        tokens = await service.tokenize(prompt, flag(body, "add_special_tokens", not is_chat))
        limit = service.limits.max_model_len
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request)
        refuse_unknown(body, frozenset({"model", "tokens"}))
        check_model(body, service.limits)
        tokens = parse_tokens(body.get("tokens"), service.limits.vocab_size, "tokens")
        return _json({"prompt": service.engine.tokenizer.decode(tokens)})


def _add_information(app: FastAPI, service: Service) -> None:
    def model() -> Json:
        limits = service.limits
        return answers.models_body(limits.model, limits.max_model_len, service.started)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != service.limits.model:
            raise RequestError(f"model {name!r:.60} is not served", status=404, param="model")
        return _json(model())

    @app.get("/health")
    async def health() -> Response:
        if service.engine.alive:
            return _json({"status": "ok"})
        reason = service.engine.error or "the engine is shut down"
        return _json({"status": "down", **answers.error_body(reason, 503)}, 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(await service.metrics(), media_type=metrics.CONTENT_TYPE)


def _add_errors(app: FastAPI) -> None:
    def reply(message: str, status: int, param: str | None = None) -> Response:
        return _json(answers.error_body(message, status, param), status)

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
    have grace_s to end; then they end with an error that has FLUSH_S to reach its client; then
    what is still connected is cut, whatever it does, and the engine is closed.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        at: tuple[str, int] | socket.socket,
        *,
        grace_s: float = DEFAULT_GRACE_S,
    ) -> None:
        self._engine = engine
        self._socket = at if isinstance(at, socket.socket) else bind(*at)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        app = create_app(engine, closes_engine=True)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(grace_s + FLUSH_S + CANCEL_AFTER_S),
            lifespan="on",
        )
        self._server = _Uvicorn(config)
        self._server.grace_s = grace_s
        self._server.end_all = app.state.service.end_all

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
            self._engine.close(FORCED_CLOSE_S)  # closed already, unless the end was forced
        if self._server.force_exit:
            raise KeyboardInterrupt

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


def run_server(
    engine: AsyncEngine,
    address: tuple[str, int] | socket.socket,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    about: str = "",
) -> None:
    """Serve `engine` until a signal, then close it. Prints the URL, and `about`, when ready."""

    def ready(url: str) -> None:
        print(f"serving {engine.model_name} on {url}/v1{about and f' ({about})'}", flush=True)

    def stopping(count: int) -> None:
        requests = f"{count} request{'s' if count > 1 else ''}"
        print(f"finishing {requests}; press Ctrl-C again to stop now", file=sys.stderr, flush=True)

    HttpServer(engine, address, grace_s=grace_s).run(ready, stopping)


def _json(body: Json, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
