"""A router's knowledge of its workers, and how it gets it: polls, coverage, the choice, flights.

Law: a question to a worker has a time after which its answer is not waited for; what a worker says
wrongly counts as not said; no failure of one worker stops the watch over another. Which worker is
best, routing.py says; what becomes of a request, relay.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Container

import msgspec

from tandemkv.serve.counts import Counts
from tandemkv.serve.fleet import Fleet, Flight, Info, Timing, Worker
from tandemkv.serve.routing import Choice, Load, Missing, choose, lacked
from tandemkv.serve.upstream import Failed, Upstream

log = logging.getLogger("tandemkv")

FIRST_LOOK_S = 1.0
JSON_TYPE = (b"content-type", b"application/json")


class Covered(msgspec.Struct, frozen=True):
    """A worker's answer to POST /coverage."""

    num_tokens: int
    missing: Missing
    load: Load = Load()


class Known(msgspec.Struct, frozen=True):
    """What the workers said of one prompt: its tokens (0: nobody said), and the rows they lack."""

    num_tokens: int = 0
    missing: dict[str, Missing] = {}


class Dispatch:
    """The fleet of one router, watched from `start` to `close`. For one event loop."""

    def __init__(self, fleet: Fleet, timing: Timing) -> None:
        self.fleet = fleet
        self.counts = Counts()
        self.upstream = Upstream()
        self.stopping = False
        self._timing = timing
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Look at every worker, for FIRST_LOOK_S at most; then go on watching them."""
        looks = [asyncio.create_task(self._look(worker)) for worker in self.fleet.workers]
        await asyncio.wait(looks, timeout=FIRST_LOOK_S)
        watches = [asyncio.create_task(self._watch(worker)) for worker in self.fleet.workers]
        self._tasks = looks + watches

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.upstream.close()

    def end_all(self) -> None:
        """End every request in progress with an error, and refuse what comes."""
        self.stopping = True
        for worker in self.fleet.workers:
            for flight in list(worker.flights):
                flight.end("the router is shutting down")

    async def coverage(self, content: bytes) -> Known:
        """What the workers lack of a request body's prompt, as far as they say it in time."""
        asked = {
            asyncio.create_task(self._covered(worker, content)): worker
            for worker in self.fleet.alive
        }
        if not asked:
            return Known()
        try:
            done, _ = await asyncio.wait(asked, timeout=self._timing.coverage)
        finally:
            for task in asked:
                task.cancel()
        said = {asked[task].url: answer for task in done if (answer := task.result()) is not None}
        longest = max((answer.num_tokens for answer in said.values()), default=0)
        return Known(longest, {url: answer.missing for url, answer in said.items()})

    def choose(self, known: Known, tried: Container[str], *, hands_off: bool) -> Choice:
        """The workers for a request, but for those tried."""
        at = now()
        views = [
            worker.view(at, known.missing.get(worker.url))
            for worker in self.fleet.workers
            if worker.url not in tried
        ]
        return choose(views, known.num_tokens, hands_off=hands_off)

    def send(self, choice: Choice, known: Known) -> None:
        """Count a request as sent to the workers chosen."""
        at = now()
        for url, computes in ((choice.prefill, True), (choice.decode, choice.prefill is None)):
            if url is None:
                continue
            worker, missing = self.fleet[url], known.missing.get(url)
            lacks = lacked(worker.view(at, missing), known.num_tokens)
            worker.sent(at, max(lacks.target, lacks.draft) if computes else 0)
            self.counts.route(worker, missing)

    @contextlib.asynccontextmanager
    async def flight(self, worker: Worker) -> AsyncIterator[Flight]:
        """Around a request at a worker: raises Failed if it is ended from outside."""
        loop, cause = asyncio.get_running_loop(), list[str]()
        scope = asyncio.timeout(None)

        def end(why: str) -> None:
            if not cause:
                cause.append(why)
                scope.reschedule(loop.time())

        flight = Flight(now(), end)
        try:
            async with scope:
                worker.flights.add(flight)
                yield flight
        except TimeoutError:
            if not cause:
                raise
            raise Failed("lost", cause[0]) from None
        finally:
            worker.flights.discard(flight)

    async def _covered(self, worker: Worker, content: bytes) -> Covered | None:
        asked_at, url = now(), worker.url + "/coverage"
        try:
            status, answer = await self.upstream.ask(
                "POST", url, content, [JSON_TYPE], timeout_s=self._timing.coverage
            )
            if status != 200:
                return None
            covered = msgspec.json.decode(answer, type=Covered)
        except (Failed, msgspec.MsgspecError):
            return None
        worker.report(covered.load, asked_at)
        return covered

    async def _watch(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(self._timing.poll)
            try:
                await self._look(worker)
                worker.end_lost(now())
            except Exception:
                log.exception("a look at %s failed", worker.url)

    async def _look(self, worker: Worker) -> None:
        asked_at = now()
        try:
            status, answer = await self.upstream.ask(
                "GET", worker.url + "/worker", timeout_s=self._timing.silent
            )
            if status != 200:
                raise Failed("unavailable", said(status, answer))
            info = msgspec.json.decode(answer, type=Info)
        except Failed as error:
            worker.gone(error.kind, str(error), now())
        except msgspec.MsgspecError as error:
            worker.gone("broken", f"its GET /worker is none of ours: {error}", now())
        else:
            self.fleet.heard_from(worker, info, asked_at, now())


def said(status: int, answer: bytes) -> str:
    """What an error answer says, in one line."""
    try:
        message = msgspec.json.decode(answer)["error"]["message"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        message = answer[:200].decode(errors="replace")
    return f"{status}: {' '.join(str(message).split())}"


def now() -> float:
    """Seconds, on the running loop's clock."""
    return asyncio.get_running_loop().time()
