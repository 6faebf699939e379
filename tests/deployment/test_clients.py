"""Clients that go away at each stage of a hand-off, one and many: nothing is left of them."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from deploying import until

NOTICED_S = 0.15
"""From a connection that is closed until router and worker have noticed it."""

MOMENTS = [
    ("decode", "add", 1),
    ("decode", "send Ask", 1),
    ("prefill", "hear Ask", 1),
    ("prefill", "write", 1),
    ("decode", "hear Chunk", 1),
    ("decode", "hear Chunk", 6),
    ("prefill", "send FirstToken", 1),
    ("decode", "hear FirstToken", 1),
    ("decode", "hear Delivered", 1),
    ("decode", "send Bye", 1),
    ("decode", "step", 1),
    ("decode", "step", 4),
]


def gone(deployment: Any) -> float:
    """Requests whose client went, as the router counts them."""
    return deployment.router.metric(r'router_requests_total\{outcome="client_gone"\}')


@pytest.mark.parametrize(("role", "moment", "count"), MOMENTS)
def test_a_client_that_goes_away_leaves_nothing(
    deployment: Any, role: str, moment: str, count: int
) -> None:
    """A worker waits at that moment until the client's end was noticed; see `deployment`."""
    for stream in (False, True):
        before = gone(deployment)
        order = deployment.order(role, moment, "pause", count=count)
        with deployment.send(deployment.prompt(), stream=stream):
            deployment.taker(role, order)
        until(lambda start=before: gone(deployment) == start + 1, "the router notices")
        time.sleep(NOTICED_S)
        deployment.go_on(role, order)
        deployment.settle()


def test_fifty_clients_that_all_go_away_leave_nothing(deployment: Any) -> None:
    before, rng = gone(deployment), random.Random(1)
    clients = [
        deployment.send(deployment.prompt(rng.randint(20, 250)), 100, stream=i % 2 == 0)
        for i in range(50)
    ]
    rng.shuffle(clients)
    for i, client in enumerate(clients):
        client.close()
        time.sleep(0.05 if i % 10 == 9 else 0.0)
    until(lambda: gone(deployment) == before + 50, "the router notices")


def test_those_that_stay_are_answered_beside_those_that_go(deployment: Any, plain: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from deploying import assert_right

    prompts = [deployment.prompt(30 + 20 * i) for i in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(deployment.ask, p, stream=i % 2 == 0) for i, p in enumerate(prompts)]
        for _ in range(24):
            with deployment.send(deployment.prompt(100), 50, stream=True):
                time.sleep(0.01)
    for prompt, answer in zip(prompts, asked, strict=True):
        assert_right(answer.result(), plain(prompt, 16))
