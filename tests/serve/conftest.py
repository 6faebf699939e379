"""Real servers over tiny models on loopback, shared by the tests of the HTTP layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def start(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """start(**options) -> a Running server of its own, stopped at the end of the session."""
    from serving import Running, start_engine

    running: list[Running] = []

    def begin(*, grace_s: float = 10.0, **options: Any) -> Any:
        running.append(Running(start_engine(tiny_model(), **options), grace_s=grace_s))
        return running[-1]

    yield begin
    with contextlib.ExitStack() as stopping:  # every one, also when another does not stop
        for server in running:
            if server.thread.is_alive():
                stopping.callback(server.stop)


@pytest.fixture(scope="session")
def self_drafted(tiny_model: Callable[..., Path]) -> dict[str, Any]:
    """Engine options of a drafter that is the target itself: greedy drafts are all accepted."""
    return {"drafter": "draft_model", "drafter_path": str(tiny_model()), "num_draft_tokens": 3}


@pytest.fixture(scope="session")
def shared_server(start: Callable[..., Any], self_drafted: dict[str, Any]) -> Any:
    return start(**self_drafted)


@pytest.fixture
def server(shared_server: Any) -> Iterator[Any]:
    """A server with a drafter; after each test nothing runs, is held or lost, and it answers."""
    yield shared_server
    shared_server.settle()
    assert shared_server.http.get("/health").status_code == 200


@pytest.fixture(scope="session")
def plain_server(start: Callable[..., Any]) -> Any:
    """The same model without a drafter."""
    return start(drafter="none")


@pytest.fixture
def worker() -> Iterator[Callable[..., Any]]:
    """worker(role, **fields) -> a FakeWorker, stopped after the test."""
    from fakes import FakeWorker

    made: list[FakeWorker] = []

    def make(*args: Any, **fields: Any) -> FakeWorker:
        made.append(FakeWorker(*args, **fields))
        return made[-1]

    yield make
    for fake in made:
        fake.stop()


@pytest.fixture
def route(worker: Any) -> Iterator[Callable[..., Any]]:
    """route(*workers) -> a router before them, all alive unless `alive` says how many."""
    from fakes import Routed

    made: list[Routed] = []

    def make(*workers: Any, alive: int | None = None, **options: Any) -> Routed:
        made.append(Routed(list(workers), **options))
        made[-1].settle(len(workers) if alive is None else alive)
        return made[-1]

    yield make
    for routed in made:
        routed.stop()
