"""The router: one address in front of prefill and decode workers, with the API of each of them.

    request -> coverage of its prompt, worker by worker -> the choice -> the decode worker
    client  <------------- its answer, as it comes ------------------------'    ^
                                            prefill worker: rows, shipped ------'

Law: each request is answered once: by a worker, or with an error that names the cause. What a body
says is checked by the worker that answers, but for `kv_transfer_params`, which is the router's to
say. The router holds no tokens and no text, and forgets a request that is over.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

from tandemkv.base.errors import RequestError
from tandemkv.base.transfer_params import FIELD as TRANSFER
from tandemkv.serve import answers, metrics
from tandemkv.serve.answers import Json
from tandemkv.serve.dispatch import Dispatch
from tandemkv.serve.fields import decode_body
from tandemkv.serve.fleet import Fleet, Timing
from tandemkv.serve.http import (
    DEFAULT_GRACE_S,
    FastAPI,
    HttpServer,
    Request,
    Response,
    json_response,
    new_app,
    read_raw,
)
from tandemkv.serve.relay import Asked, Relay
from tandemkv.serve.upstream import passed_on


class Router:
    """What the routes share. prefill, decode: urls of workers, without a path."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], timing: Timing = Timing()
    ) -> None:
        self.fleet = Fleet(prefill, decode, timing)
        self.dispatch = Dispatch(self.fleet, timing)

    async def generate(self, request: Request) -> Response:
        """A request for generation: its prompt may be computed by a prefill worker."""
        try:
            content = await read_raw(request)
            body = decode_body(content)
            if body.get(TRANSFER) is not None:
                raise RequestError(f"{TRANSFER} is said by this router alone", param=TRANSFER)
        except RequestError:
            self.dispatch.counts.requests["refused"] += 1
            raise
        return Relay(self.dispatch, _asked(request, content, body))

    async def ask(self, request: Request) -> Response:
        """A request that every decode worker answers alike."""
        return Relay(self.dispatch, _asked(request, await read_raw(request)))

    def health(self) -> tuple[Json, int]:
        """The body of /health and its status."""
        workers = [worker.state() for worker in self.fleet.workers]
        if any(worker.alive and worker.role == "decode" for worker in self.fleet.workers):
            return {"status": "ok", "workers": workers}, 200
        reason = f"no decode worker is alive: {self.fleet.why_none()}"
        return {"status": "down", "workers": workers, **answers.error_body(reason, 503)}, 503

    def about(self) -> Json:
        """The body of /worker: a router in front of this one sees what it is."""
        models = [worker.info for worker in self.fleet.alive if worker.info is not None]
        return {
            "role": "router",
            "engine_id": "",
            "control": None,
            "model": models[0].model if models else "",
            "max_model_len": min((info.max_model_len for info in models), default=0),
            "workers": [worker.state() for worker in self.fleet.workers],
        }


def create_router_app(router: Router) -> FastAPI:
    """The application over a router, which watches its workers while the application runs."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await router.dispatch.start()
        try:
            yield
        finally:
            await router.dispatch.close()

    app = new_app(lifespan)

    for path in ("/v1/chat/completions", "/v1/completions"):
        app.add_api_route(path, router.generate, methods=["POST"])
    for path in ("/tokenize", "/detokenize"):
        app.add_api_route(path, router.ask, methods=["POST"])
    for path in ("/v1/models", "/v1/models/{name:path}"):
        app.add_api_route(path, router.ask, methods=["GET"])

    @app.get("/health")
    async def health() -> Response:
        return json_response(*router.health())

    @app.get("/worker")
    async def worker() -> Response:
        return json_response(router.about())

    @app.get("/metrics")
    async def prometheus() -> Response:
        families = router.dispatch.counts.families(router.fleet.workers)
        return Response(metrics.render_families(families), media_type=metrics.CONTENT_TYPE)

    return app


def router_server(
    router: Router,
    at: tuple[str, int] | socket.socket,
    *,
    grace_s: float = DEFAULT_GRACE_S,
) -> HttpServer:
    """A server over a router. at, grace_s: see HttpServer."""
    return HttpServer(
        create_router_app(router),
        at,
        end_all=router.dispatch.end_all,
        close=lambda: None,
        grace_s=grace_s,
    )


def run_router(
    prefill: Sequence[str],
    decode: Sequence[str],
    at: tuple[str, int] | socket.socket,
    *,
    grace_s: float = DEFAULT_GRACE_S,
) -> None:
    """Route until a signal. Prints the URL when ready; the workers need not be there yet."""
    server = router_server(Router(prefill, decode), at, grace_s=grace_s)
    about = f"{len(prefill)} prefill and {len(decode)} decode worker(s)"
    server.run_shown(lambda url: f"routing to {about} on {url}/v1")


def _asked(request: Request, content: bytes, body: Json | None = None) -> Asked:
    target = request.scope["raw_path"].decode("ascii")
    query = request.scope["query_string"].decode("ascii")
    return Asked(
        request.method,
        f"{target}?{query}" if query else target,
        passed_on(request.headers.raw),
        content,
        body,
    )
