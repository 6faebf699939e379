"""The engine's thread: what is asked of it when it has ended is refused, and never waited for."""

from __future__ import annotations

import asyncio
import queue

import pytest
from engines import greedy, prompt, tiny_engine

from tandemkv.base.errors import RequestError
from tandemkv.engine.background import CHECK_IDLE_S, AsyncEngine


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


@pytest.mark.parametrize(("idle_s", "waited"), [(float("inf"), CHECK_IDLE_S), (0.2, 0.2)])
def test_an_idle_engine_is_looked_at_as_often_as_it_asks(monkeypatch, idle_s, waited):
    made = tiny_engine("none")
    monkeypatch.setattr(type(made), "idle_s", property(lambda self: idle_s))
    waits = []

    class Inbox(queue.SimpleQueue):
        def get(self, block=True, timeout=None):
            if block:
                waits.append(timeout)
            return super().get(block, timeout)

    engine = AsyncEngine.__new__(AsyncEngine)
    engine._engine, engine._inbox = made, Inbox()
    engine._inbox.put(None)
    assert engine._serve_inbox() is False
    assert waits == [waited]
