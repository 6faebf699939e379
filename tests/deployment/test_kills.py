"""Workers that are killed at each stage of a hand-off: the request ends, the others go on."""

from __future__ import annotations

from typing import Any

import pytest
from deploying import LIMIT_S, assert_right

PREFILL_MOMENTS = [
    ("hear Ask", 1, False),
    ("send Accept", 1, False),
    ("send Accept", 1, True),
    ("step", 1, True),
    ("write", 1, False),
    ("write", 1, True),
    ("write", 6, True),
    ("send FirstToken", 1, False),
    ("send FirstToken", 1, True),
    ("send Delivered", 1, False),
    ("send Delivered", 1, True),
    ("hear Bye", 1, False),
]
BEFORE_THE_ANSWER = [
    ("add", 1, False),
    ("send Ask", 1, False),
    ("send Ask", 1, True),
    ("hear Accept", 1, False),
    ("hear Chunk", 1, True),
    ("hear Chunk", 6, True),
    ("hear FirstToken", 1, True),
    ("hear Delivered", 1, False),
    ("send Bye", 1, False),
    ("send Bye", 1, True),
    ("step", 1, False),
]
IN_THE_ANSWER = [("step", 3, True), ("step", 4, False)]


def test_all_of_it_works(deployment: Any, plain: Any) -> None:
    for stream in (False, True):
        prompt = deployment.prompt()
        before = deployment.fetched
        assert_right(deployment.ask(prompt, stream=stream), plain(prompt, 16))
        assert deployment.fetched == before + 1


@pytest.mark.parametrize(("moment", "count", "after"), PREFILL_MOMENTS)
def test_a_prefill_worker_that_is_killed_costs_no_request(
    deployment: Any, plain: Any, moment: str, count: int, after: bool
) -> None:
    order = deployment.order("prefill", moment, "die", count=count, after=after)
    prompt = deployment.prompt()
    answer = deployment.ask(prompt, stream=count % 2 == after)
    assert_right(answer, plain(prompt, 16))
    assert answer.seconds < LIMIT_S / 2
    assert not deployment.taker("prefill", order).alive


@pytest.mark.parametrize(("moment", "count", "after"), BEFORE_THE_ANSWER)
def test_a_decode_worker_that_is_killed_before_it_answers_costs_no_request(
    deployment: Any, plain: Any, moment: str, count: int, after: bool
) -> None:
    order = deployment.order("decode", moment, "die", count=count, after=after)
    prompt = deployment.prompt()
    answer = deployment.ask(prompt, stream=count % 2 == after)
    assert_right(answer, plain(prompt, 16))
    assert answer.seconds < LIMIT_S / 2
    assert not deployment.taker("decode", order).alive


@pytest.mark.parametrize(("moment", "count", "after"), IN_THE_ANSWER)
def test_a_decode_worker_that_is_killed_while_it_generates_costs_a_whole_answer_nothing(
    deployment: Any, plain: Any, moment: str, count: int, after: bool
) -> None:
    order = deployment.order("decode", moment, "die", count=count, after=after)
    prompt = deployment.prompt()
    assert_right(deployment.ask(prompt), plain(prompt, 16))
    assert not deployment.taker("decode", order).alive


@pytest.mark.parametrize(("moment", "count", "after"), IN_THE_ANSWER)
def test_a_stream_that_was_begun_ends_with_an_error_that_names_who_was_killed(
    deployment: Any, plain: Any, moment: str, count: int, after: bool
) -> None:
    order = deployment.order("decode", moment, "die", count=count, after=after)
    prompt = deployment.prompt()
    answer = deployment.ask(prompt, stream=True)
    gone = deployment.taker("decode", order)
    assert f"the worker {gone.url} failed in the middle of the stream" in answer.error
    assert answer.tokens == plain(prompt, 16)[: len(answer.tokens)]
    assert 0 < len(answer.tokens) < 16
    assert answer.seconds < LIMIT_S / 2


def test_both_workers_of_a_hand_off_are_killed(deployment: Any, plain: Any) -> None:
    """The decode worker that is left has the prompt computed by the prefill worker that is left."""
    orders = {
        "prefill": deployment.order("prefill", "write", "die", count=3),
        "decode": deployment.order("decode", "hear Chunk", "die", count=2, after=True),
    }
    prompt = deployment.prompt()
    assert_right(deployment.ask(prompt), plain(prompt, 16))
    for role, order in orders.items():
        assert not deployment.taker(role, order).alive


def test_without_a_decode_worker_the_error_says_of_each_why(deployment: Any) -> None:
    for worker in deployment.of("decode"):
        worker.kill()
    answer = deployment.ask(deployment.prompt())
    assert answer.status == 503
    assert "no decode worker" in answer.error
    for worker in deployment.of("decode"):
        assert worker.url in answer.error
    assert answer.seconds < LIMIT_S / 2
    deployment.whole()


def test_without_a_prefill_worker_decode_workers_compute(deployment: Any, plain: Any) -> None:
    for worker in deployment.of("prefill"):
        worker.kill()
    prompt = deployment.prompt()
    answer = deployment.ask(prompt)
    assert_right(answer, plain(prompt, 16))
    assert answer.seconds < LIMIT_S / 2
