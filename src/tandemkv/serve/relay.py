"""One request on its way: to a worker, its answer back, to another worker if that one fails.

    choose -> send -> answer: whole ------------------> status, headers, body
      ^         |             events --first part-----> status, headers, part by part
      +--failed-+--failed-----+                         |
                                                        +--failed: one error event, [DONE]

Law: a request is answered once, by a worker or with an error that names the cause. Each worker is
tried at most once. Nothing is sent to the client before a worker's answer is whole, or, of a
stream, before its first event; from there on, events pass whole and in order, one is read when the
one before was taken, and none is waited for. A client that goes away ends the request at the
worker, at any point. No body is checked here, and no worker chosen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tandemkv.base.transfer_params import FIELD as TRANSFER
from tandemkv.serve import answers
from tandemkv.serve.answers import DONE, Json, event
from tandemkv.serve.dispatch import Dispatch, Known, now, said
from tandemkv.serve.fields import Body
from tandemkv.serve.fleet import Flight, Worker
from tandemkv.serve.http import Response, while_connected
from tandemkv.serve.routing import Choice, is_one_prompt
from tandemkv.serve.upstream import Failed, Header, Reply

UNAVAILABLE = 503
JSON_HEADER: Header = (b"content-type", b"application/json")


class Asked(msgspec.Struct, frozen=True):
    """A client's request. target: path and query. headers: those to pass on. body: what content
    says, of a request for generation; None of every other, which hands nothing over.
    """

    method: str
    target: str
    headers: list[Header]
    content: bytes
    body: Body | None = None


class Relay(Response):
    """The response to one request, whoever makes it."""

    def __init__(self, dispatch: Dispatch, asked: Asked) -> None:
        self._dispatch = dispatch
        self._asked = asked
        self._started = False
        self._done = False
        self._send: Any = None
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._send = send
        outcome: str | None = "failed"
        try:
            outcome = await while_connected(receive, self._answer())
        finally:
            self._dispatch.counts.requests[outcome or "client_gone"] += 1

    async def _answer(self) -> str:
        """Answer the client; the outcome, as counted."""
        dispatch, body = self._dispatch, self._asked.body
        known = Known() if body is None else await dispatch.coverage(self._asked.content)
        causes: dict[str, str] = {}
        while not dispatch.stopping:
            hands_off = body is not None and is_one_prompt(body)
            choice = dispatch.choose(known, causes, hands_off=hands_off)
            if choice.decode is None:
                return await self._refuse(self._nobody(causes))
            worker = dispatch.fleet[choice.decode]
            if body is not None:
                dispatch.send(choice, known)
            try:
                return await self._through(worker, choice)
            except Failed as error:
                if self._done:  # all was said: what broke is the connection alone
                    await self._part(b"", more=False)
                    return "answered"
                if not dispatch.stopping:
                    self._let_down(worker, error)
                causes[worker.url] = str(error)
                if self._started:
                    return await self._end_stream(worker, str(error))
        return await self._refuse("the router is shutting down")

    async def _through(self, worker: Worker, choice: Choice) -> str:
        """Answer with this worker. Raises Failed, and then another may, unless it has started."""
        asked, dispatch = self._asked, self._dispatch
        content = self._content(choice)
        url = worker.url + asked.target
        async with (
            dispatch.flight(worker) as flight,
            dispatch.upstream.send(asked.method, url, asked.headers, content) as reply,
        ):
            whole = None
            if reply.is_events and reply.status == 200:
                await self._stream(reply, flight)
            else:
                whole = b"".join([part async for part in self._parts(reply, flight)])
        if reply.status == UNAVAILABLE:
            raise Failed("unavailable", said(reply.status, whole or b""))
        worker.answered()
        if whole is not None:  # whatever becomes of the worker now, this is its answer
            await self._send_whole(reply.status, reply.headers, whole)
        return "answered" if reply.status < 400 else "refused" if reply.status < 500 else "failed"

    async def _stream(self, reply: Reply, flight: Flight) -> None:
        """Pass on a stream; only whole events, so that an error event can follow any of them."""
        rest = b""
        async for part in self._parts(reply, flight):
            events, end, rest = (rest + part).rpartition(b"\n\n")
            if not end:
                continue
            if not self._started:
                _refuse_error(events)
                await self._head(reply.status, reply.headers)
            await self._part(events + end)
            self._done = (events + end).endswith(DONE)
        if not self._started:
            raise Failed("broken", "its stream ended before the first event")
        await self._part(rest, more=False)

    async def _parts(self, reply: Reply, flight: Flight) -> AsyncIterator[bytes]:
        async for part in reply.parts():
            flight.heard = now()
            yield part

    async def _end_stream(self, worker: Worker, why: str) -> str:
        message = f"the worker {worker.url} failed in the middle of the stream: {why}"
        if self._dispatch.stopping:
            message = why
        await self._part(event(answers.error_body(message, UNAVAILABLE)))
        await self._part(DONE, more=False)
        return "broken"

    async def _refuse(self, message: str) -> str:
        body = msgspec.json.encode(answers.error_body(message, UNAVAILABLE))
        await self._send_whole(UNAVAILABLE, [JSON_HEADER], body)
        return "unavailable"

    def _nobody(self, causes: dict[str, str]) -> str:
        if not causes:
            return f"no decode worker is alive: {self._dispatch.fleet.why_none()}"
        tried = "; ".join(f"{url}: {cause}" for url, cause in causes.items())
        others = self._dispatch.fleet.why_none(causes)
        return f"no decode worker answered: {tried}{others and f'; {others}'}"

    def _let_down(self, worker: Worker, error: Failed) -> None:
        worker.failed(now())
        self._dispatch.counts.let_down[error.kind] += 1

    def _content(self, choice: Choice) -> bytes:
        """The client's body, byte for byte, with the prefill worker at its end, if there is one."""
        content, body = self._asked.content, self._asked.body
        if choice.prefill is None or not body:
            return content
        info = self._dispatch.fleet[choice.prefill].info
        if info is None or info.control is None:
            return content
        fetch: Json = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": info.engine_id,
            "remote_host": info.control.host,
            "remote_port": info.control.port,
        }
        added = msgspec.json.encode({TRANSFER: fetch}).removeprefix(b"{")
        return content.rstrip().removesuffix(b"}") + b", " + added

    async def _send_whole(self, status: int, headers: list[Header], body: bytes) -> None:
        await self._head(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._part(body, more=False)

    async def _head(self, status: int, headers: list[Header]) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _part(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _refuse_error(events: bytes) -> None:
    """Raise Failed if a stream begins with the error of a worker that is unavailable."""
    first = events.removeprefix(b"data: ").partition(b"\n")[0]
    if not first.startswith(b'{"error":'):
        return
    try:
        code = msgspec.json.decode(first)["error"]["code"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return
    if code == UNAVAILABLE:
        raise Failed("unavailable", said(code, first))
