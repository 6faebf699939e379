"""A router that is killed: workers go on, nothing is left there, another one takes its place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from deploying import assert_right

MOMENTS = [
    ("decode", "add", 1),
    ("decode", "send Ask", 1),
    ("prefill", "write", 3),
    ("decode", "hear Chunk", 3),
    ("prefill", "send Delivered", 1),
    ("decode", "step", 1),
    ("decode", "step", 4),
]


@pytest.mark.parametrize(("role", "moment", "count"), MOMENTS)
def test_a_router_that_is_killed_leaves_nothing_with_its_workers(
    deployment: Any, plain: Any, role: str, moment: str, count: int
) -> None:
    order = deployment.order(role, moment, "pause", count=count)
    prompt = deployment.prompt()
    engines = [worker.get("/worker") for worker in deployment.workers]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(deployment.ask, prompt, 64, stream=count % 2 == 1)
        deployment.taker(role, order)
        deployment.router.kill()
        with pytest.raises(httpx.HTTPError):
            asked.result()
    deployment.go_on(role, order)
    deployment.settle()
    deployment.whole()
    assert [worker.get("/worker") for worker in deployment.workers] == engines  # as they were
    assert_right(deployment.ask(prompt), plain(prompt, 16))


def test_workers_answer_without_a_router(deployment: Any, plain: Any) -> None:
    deployment.router.kill()
    worker = deployment.of("decode")[0]
    prompt = deployment.prompt()
    body = deployment.body(prompt, 16, False)
    answer = deployment.http.post(f"{worker.url}/v1/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == plain(prompt, 16)
