"""The engine's routes: the OpenAI API, tokenizing, models, health, metrics, over one engine.

    request -> body (bounded) -> Ask -> prompt tokens -> Generation -> JSON or server-sent events

Law: the engine requests of a client that goes away, streaming or not, are aborted. No parameter is
checked here and no choice written: openai.py, generation.py, reply.py and answers.py do that; and
what HTTP is, http.py knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import uuid
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from tandemkv.base.errors import RequestError
from tandemkv.engine.background import AsyncEngine
from tandemkv.kv.keys import Namespace
from tandemkv.serve import answers, chat, metrics
from tandemkv.serve.answers import Format, Json
from tandemkv.serve.fields import flag, refuse_unknown, text
from tandemkv.serve.generation import Generation
from tandemkv.serve.http import (
    CLIENT_GONE,
    DEFAULT_GRACE_S,
    EventStream,
    FastAPI,
    HttpServer,
    Request,
    Response,
    json_response,
    new_app,
    read_body,
    while_connected,
)
from tandemkv.serve.openai import (
    Ask,
    Limits,
    check_model,
    params_for,
    parse_chat,
    parse_completion,
    parse_tokens,
)
from tandemkv.serve.reply import Answer

if TYPE_CHECKING:
    from tandemkv.engine.engine import Engine

METRICS_WAIT_S = 2.0
WORKER_WAIT_S = 0.5
FORCED_CLOSE_S = 2.0


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
        self._worker: Json = {}
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
        self._check_alive()
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
        return json_response(body) if body is not None else Response(status_code=CLIENT_GONE)

    async def metrics(self) -> bytes:
        """The exposition text; a step that takes long delays it by METRICS_WAIT_S at most."""
        with contextlib.suppress(TimeoutError, RequestError):
            if self.engine.alive:
                taking = self.engine.call(metrics.snapshot_of)
                self._snapshot = await asyncio.wait_for(taking, METRICS_WAIT_S)
        return metrics.render(self.limits.model, self._snapshot, self.latencies)

    async def worker(self) -> Json:
        """Role, engine id, control address, model and load; what was last known during a step
        that takes longer than WORKER_WAIT_S, so that a busy worker is not taken for a dead one.
        """
        self._check_alive()
        taking = self.engine.call(lambda engine: (engine.worker_info, engine.load))
        try:
            info, load = await asyncio.wait_for(taking, WORKER_WAIT_S if self._worker else None)
        except TimeoutError:
            return self._worker
        model, longest = self.limits.model, self.limits.max_model_len
        about = {"model": model, "max_model_len": longest, "load": msgspec.to_builtins(load)}
        self._worker = {**info, **about}
        return self._worker

    async def coverage(self, ask: Ask) -> Json:
        """How many rows of an Ask's prompts are not held here, by domain; all prompts together."""
        self._check_alive()
        prompts = await self.prompt_tokens(ask)
        for tokens in prompts:
            params_for(ask, len(tokens), 0, self.limits)
        namespace = Namespace(salt=ask.cache_salt)

        def look(engine: Engine) -> tuple[str, list[dict[str, int]], Any]:
            missing = [engine.missing_rows(tokens, namespace) for tokens in prompts]
            return engine.worker_info["engine_id"], missing, engine.load

        engine_id, missing, load = await self.engine.call(look)
        return {
            "engine_id": engine_id,
            "num_tokens": sum(map(len, prompts)),
            "missing": {
                domain: sum(rows.get(domain, 0) for rows in missing)
                for domain in ("target", "draft")
            },
            "load": msgspec.to_builtins(load),
        }

    def _check_alive(self) -> None:
        if not self.engine.alive:
            raise RequestError(self.engine.error or "the engine is shut down", status=503)

    def end_all(self) -> None:
        """End every answer in progress with an error; those that are over take no notice."""
        for generation in self._running:
            generation.fail(RequestError("the server is shutting down", status=503))

    def closing(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)


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

    app = new_app(lifespan)
    app.state.service = service
    _add_api(app, service)
    _add_information(app, service)
    _add_placement(app, service)
    return app


def _add_placement(app: FastAPI, service: Service) -> None:
    """What a router asks of a worker: who it is, how busy, and what it lacks of a prompt."""

    @app.get("/worker")
    async def worker() -> Response:
        return json_response(await service.worker())

    @app.post("/coverage")
    async def coverage(request: Request) -> Response:
        body = await read_body(request)
        parse = parse_completion if body.get("messages") is None else parse_chat
        return json_response(await service.coverage(parse(body, service.limits)))


def engine_server(
    engine: AsyncEngine,
    at: tuple[str, int] | socket.socket,
    *,
    grace_s: float = DEFAULT_GRACE_S,
) -> HttpServer:
    """A server over `engine`, which is closed when it stops. at, grace_s: see HttpServer."""
    app = create_app(engine, closes_engine=True)
    return HttpServer(
        app,
        at,
        end_all=app.state.service.end_all,
        close=lambda: engine.close(FORCED_CLOSE_S),  # closed already, unless the end was forced
        grace_s=grace_s,
    )


def run_server(
    engine: AsyncEngine,
    address: tuple[str, int] | socket.socket,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    about: str = "",
) -> None:
    """Serve `engine` until a signal, then close it. Prints the URL, and `about`, when ready."""
    more = f" ({about})" if about else ""
    server = engine_server(engine, address, grace_s=grace_s)
    server.run_shown(lambda url: f"serving {engine.model_name} on {url}/v1{more}")


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
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request)
        refuse_unknown(body, frozenset({"model", "tokens"}))
        check_model(body, service.limits)
        tokens = parse_tokens(body.get("tokens"), service.limits.vocab_size, "tokens")
        return json_response({"prompt": service.engine.tokenizer.decode(tokens)})


def _add_information(app: FastAPI, service: Service) -> None:
    def model() -> Json:
        limits = service.limits
        return answers.models_body(limits.model, limits.max_model_len, service.started)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != service.limits.model:
            raise RequestError(f"model {name!r:.60} is not served", status=404, param="model")
        return json_response(model())

    @app.get("/health")
    async def health() -> Response:
        if service.engine.alive:
            return json_response({"status": "ok"})
        reason = service.engine.error or "the engine is shut down"
        return json_response({"status": "down", **answers.error_body(reason, 503)}, 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(await service.metrics(), media_type=metrics.CONTENT_TYPE)
