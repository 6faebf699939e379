"""Peers that are slow, that stop and go on, whose frames are lost, whose clock is wrong."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from deploying import HOUR_S, LIMIT_S, LOST_S, PATIENCE_S, assert_right, until

FRAMES = [
    ("decode", "send Hello"),
    ("prefill", "send Welcome"),
    ("decode", "send Ask"),
    ("prefill", "send Accept"),
    ("prefill", "send FirstToken"),
    ("prefill", "send Delivered"),
    ("decode", "send Bye"),
]
STAGES = [("hear Ask", 1), ("write", 6), ("send Delivered", 1)]


@pytest.mark.parametrize(("role", "moment"), FRAMES)
@pytest.mark.parametrize("deed", ["drop", "twice"])
def test_a_frame_that_is_lost_or_comes_twice_costs_time_alone(
    deployment: Any, plain: Any, role: str, moment: str, deed: str
) -> None:
    if moment in ("send Hello", "send Welcome"):  # they have met: let them be new to each other
        for worker in deployment.of("prefill"):
            worker.kill()
        deployment.whole()
    before = deployment.fetched
    order = deployment.order(role, moment, deed)
    prompt = deployment.prompt()
    assert_right(deployment.ask(prompt), plain(prompt, 16))
    deployment.taker(role, order)
    start = time.monotonic()
    deployment.settle()
    assert time.monotonic() - start < PATIENCE_S  # by words, not because time ran out
    assert deployment.fetched == before + 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_slow_worker_is_waited_for(deployment: Any, plain: Any, role: str) -> None:
    """Also where the word that it is still wanted is lost once."""
    before = deployment.fetched
    moment = "write" if role == "prefill" else "hear Chunk"
    slow = deployment.order(role, moment, "slow", times=100, seconds=0.2)
    prompt = deployment.prompt()
    assert_right(deployment.ask(prompt), plain(prompt, 16))
    deployment.taker(role, slow)
    assert deployment.fetched == before + 1


@pytest.mark.parametrize(("role", "hours"), [("prefill", 1), ("prefill", -1), ("decode", 1)])
def test_no_wall_clock_matters(deployment: Any, plain: Any, role: str, hours: int) -> None:
    """It is set while rows are on their way, and differs from the others' from then on."""
    moment = "write" if role == "prefill" else "hear Chunk"
    order = deployment.order(role, moment, "skew", count=3, seconds=hours * HOUR_S)
    before = deployment.fetched
    for _ in range(3):
        prompt = deployment.prompt()
        assert_right(deployment.ask(prompt), plain(prompt, 16))
    assert deployment.fetched == before + 3
    deployment.taker(role, order)


@pytest.mark.parametrize(("moment", "count"), STAGES)
def test_a_prefill_worker_that_stops_costs_no_request_and_may_go_on(
    deployment: Any, plain: Any, moment: str, count: int
) -> None:
    order = deployment.order("prefill", moment, "stop", count=count)
    prompt = deployment.prompt()
    answer = deployment.ask(prompt, stream=count == 1)
    stopped = deployment.taker("prefill", order)
    assert_right(answer, plain(prompt, 16))
    assert answer.seconds < PATIENCE_S + LIMIT_S / 2
    stopped.signal(signal.SIGCONT)


def test_a_prefill_worker_that_stopped_is_killed_in_the_end(deployment: Any, plain: Any) -> None:
    """What it might still write to is held until then, and by the decode worker alone."""
    order = deployment.order("prefill", "write", "stop", count=4)
    prompt = deployment.prompt()
    assert_right(deployment.ask(prompt), plain(prompt, 16))
    stopped = deployment.taker("prefill", order)
    for _ in range(4):
        prompt = deployment.prompt()
        answer = deployment.ask(prompt)
        assert_right(answer, plain(prompt, 16))
        assert answer.seconds < PATIENCE_S  # it is known to be silent
    assert sum(not worker.idle for worker in deployment.of("decode")) == 1
    stopped.kill()


@pytest.mark.parametrize("moment", ["hear Accept", "hear Chunk", "hear Delivered", "step"])
def test_a_decode_worker_that_stops_costs_no_request_and_may_go_on(
    deployment: Any, plain: Any, moment: str
) -> None:
    """Rows that have landed are given back at once; those in flight, when it goes on."""
    order = deployment.order("decode", moment, "stop", count=2 if moment == "hear Chunk" else 1)
    prompt = deployment.prompt()
    answer = deployment.ask(prompt)
    stopped = deployment.taker("decode", order)
    assert_right(answer, plain(prompt, 16))
    assert LOST_S / 2 < answer.seconds < LIMIT_S / 2
    landed = moment in ("hear Delivered", "step")
    for worker in deployment.of("prefill") if landed else ():
        until(lambda w=worker: w.idle, f"{worker.name} holds nothing", worker)
    stopped.signal(signal.SIGCONT)
    deployment.whole()


def test_a_stream_of_a_decode_worker_that_stops_ends_with_an_error(
    deployment: Any, plain: Any
) -> None:
    order = deployment.order("decode", "step", "stop", count=4)
    prompt = deployment.prompt()
    start = time.monotonic()
    answer = deployment.ask(prompt, stream=True)
    stopped = deployment.taker("decode", order)
    assert stopped.url in answer.error
    assert "is gone" in answer.error
    assert answer.tokens == plain(prompt, 16)[: len(answer.tokens)]
    assert time.monotonic() - start < LIMIT_S / 2
    stopped.signal(signal.SIGCONT)
    deployment.whole()
