"""Pools that are too small for what is asked at a time: it takes its turn, and all is answered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from deploying import assert_right

TINY = {"kv_cache_tokens": 256}


@pytest.fixture(scope="module", params=["prefill", "decode", "both"])
def full(request: pytest.FixtureRequest, deploy: Any) -> Any:
    """A worker of each role, with room for two prompts at most on one side, or on both."""
    sides = ("prefill", "decode") if request.param == "both" else (request.param,)
    deployment = deploy(1, 1, max_model_len=230, **dict.fromkeys(sides, TINY))
    yield deployment
    deployment.close()


@pytest.mark.parametrize("stream", [False, True])
def test_many_requests_find_room_in_turn(full: Any, plain: Any, stream: bool) -> None:
    before = full.fetched
    prompts = [full.prompt(60 + 10 * i) for i in range(12)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(full.ask, prompt, 24, stream=stream) for prompt in prompts]
    for prompt, answer in zip(prompts, asked, strict=True):
        assert_right(answer.result(), plain(prompt, 24))
    full.settle()
    assert full.fetched == before + 12


def test_room_that_clients_gave_up_is_used_by_others(full: Any, plain: Any) -> None:
    leaving = [full.send(full.prompt(200), 30, stream=True) for _ in range(10)]
    prompts = [full.prompt(60 + 10 * i) for i in range(4)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(full.ask, prompt, 24) for prompt in prompts]
        for client in leaving:
            client.close()
    for prompt, answer in zip(prompts, asked, strict=True):
        assert_right(answer.result(), plain(prompt, 24))
    full.settle()


def test_a_prefill_worker_that_is_killed_while_all_wait_for_room(full: Any, plain: Any) -> None:
    order = full.order("prefill", "write", "die", count=9)
    prompts = [full.prompt(60 + 10 * i) for i in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(full.ask, prompt, 24) for prompt in prompts]
    for prompt, answer in zip(prompts, asked, strict=True):
        assert_right(answer.result(), plain(prompt, 24))
    assert not full.taker("prefill", order).alive
    full.no_orders()
    full.settle()
    full.whole()
