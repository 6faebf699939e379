"""The engine's thread: what is asked of it when it has ended is refused, and never waited for."""

from __future__ import annotations

import asyncio
import time

import pytest
from engines import greedy, prompt, tiny_engine

from tandemkv.base.errors import RequestError
from tandemkv.engine import background
from tandemkv.engine.background import AsyncEngine


async def answer(engine: AsyncEngine) -> list[int]:
    handle = await engine.submit(prompt(9), greedy())
    return [token async for output in handle for token in output.tokens]


def test_what_is_posted_after_the_end_is_refused_and_not_waited_for():
    engine = AsyncEngine(tiny_engine("none"))
    assert asyncio.run(answer(engine))
    engine.close()

    async def late() -> None:
        with pytest.raises(RequestError, match="shut down"):
            await asyncio.wait_for(engine.call(lambda e: e.has_work), 5)

    asyncio.run(late())
    assert engine.post(lambda e: None) is False


def test_what_is_posted_while_it_ends_is_answered():
    engine = AsyncEngine(tiny_engine("none"))

    async def race() -> None:
        engine.post(lambda e: engine.post(lambda e: None))
        engine._inbox.put(None)
        calls = [engine.call(lambda e: e.has_work) for _ in range(50)]
        found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert all(isinstance(each, RequestError) for each in found)

    asyncio.run(race())
    engine.close()


def test_what_is_posted_wakes_an_idle_engine(monkeypatch):
    monkeypatch.setattr(background, "CHECK_IDLE_S", 3600.0)
    engine = AsyncEngine(tiny_engine("none"))

    async def ask() -> None:
        for _ in range(20):
            await asyncio.sleep(0.01)  # it is idle again
            assert await asyncio.wait_for(engine.call(lambda e: e.has_work), 10) is False

    asyncio.run(ask())
    engine.close()
    assert not engine._thread.is_alive()


def test_what_an_idle_engine_hears_from_elsewhere_is_worked_on(monkeypatch):
    """As a worker does to whom a frame comes: work appears while nobody posts anything."""
    monkeypatch.setattr(background, "CHECK_IDLE_S", 3600.0)
    made = tiny_engine("none")
    requests = []

    def wait(fd: int, wait_s: float) -> None:
        if not requests:
            requests.append(made.add(prompt(9), greedy()))

    monkeypatch.setattr(made, "wait", wait)
    engine = AsyncEngine(made)
    until = time.monotonic() + 30
    while not (requests and requests[0].finish_reason) and time.monotonic() < until:
        time.sleep(0.01)
    engine.close()
    assert requests[0].finish_reason == "length"
