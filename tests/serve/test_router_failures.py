"""Workers that fail, at every point of a request: the client has one answer, or one error."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest
from fakes import EVENTS, QUICK, FakeWorker, Routed, dies, event, half, streams, until, waits, whole

from tandemkv.serve.fleet import Timing

TEXT = "/v1/completions"
SENT = {"prompt": "hello", "max_tokens": 5}
NEAR = {"target": 0, "draft": 0}
UNWATCHED = Timing(poll=60.0, silent=60.0, coverage=5.0)
"""Only requests find out what fails: no poll is faster."""


def counted(routed: Routed, prefix: str) -> dict[str, float]:
    """A metric with one label, by that, without zeros."""
    found = (item for item in routed.samples().items() if item[0].startswith(prefix))
    return {name.removeprefix(prefix)[:-2]: count for name, count in found}


def has_ended(routed: Routed, **outcomes: int) -> None:
    """A request is counted after its last byte was sent."""
    name = 'requests_total{outcome="'
    until(lambda: counted(routed, name) == outcomes, f"{outcomes}")


def let_down(routed: Routed) -> dict[str, float]:
    return counted(routed, 'let_down_total{reason="')


def test_a_worker_that_refuses_the_connection_costs_a_try(worker: Any, route: Any) -> None:
    """It was the less busy one, when it was last heard of."""
    gone = worker("decode")
    other = worker("decode", load={"running": 40, "waiting": 0, "queued_tokens": 0})
    routed = route(gone, other, timing=UNWATCHED)
    gone.kill()
    assert routed.http.post(TEXT, json=SENT).json() == {"text": "hello"}
    assert let_down(routed) == {"refused": 1}
    has_ended(routed, answered=1)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (dies, "broken"),
        (whole("busy", 503), "unavailable"),
        (half(b'{"text": "hel'), "broken"),
        (half(b"", EVENTS), "broken"),
        (half(b'data: {"half": "an event', EVENTS), "broken"),
        (half(b'data: {"error":{"code":503,"message":"ending"}}\n\n', EVENTS), "unavailable"),
        (streams(0), None),
    ],
)
def test_before_the_client_has_a_byte_another_worker_answers(
    worker: Any, route: Any, answer: Any, reason: str | None, streamed: bool
) -> None:
    """Cut before headers, refused, cut in the body, cut before and in the first event."""
    bad, good = worker("decode", answer=answer, lacks=NEAR), worker("decode")
    good.answer = streams(2) if streamed else whole("hello")
    bad.gate.set()
    routed = route(bad, good, timing=UNWATCHED)
    response = routed.http.post(TEXT, json={**SENT, "stream": streamed})
    assert response.status_code == 200
    assert len(bad.seen) == 1
    if reason is None:  # an empty stream is an answer too
        assert response.content == b"data: [DONE]\n\n"
        return
    expected = event("0") + event("1") + b"data: [DONE]\n\n" if streamed else b'{"text":"hello"}'
    assert response.content == expected
    assert len(good.seen) == 1
    assert let_down(routed) == {reason: 1}


def test_each_worker_is_tried_once_and_the_error_names_all_causes(worker: Any, route: Any) -> None:
    one, two = worker("decode", answer=dies), worker("decode", answer=whole("busy", 503))
    three = worker("decode")
    routed = route(one, two, three, timing=UNWATCHED)
    three.kill()
    response = routed.http.post(TEXT, json=SENT)
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["type"] == "service_unavailable_error"
    for url, cause in ((one.url, "broke"), (two.url, "503"), (three.url, "cannot connect")):
        assert url in error["message"]
        assert cause in error["message"]
    assert (len(one.seen), len(two.seen)) == (1, 1)
    has_ended(routed, unavailable=1)


def test_when_all_are_dead_the_answer_is_at_once(worker: Any, route: Any) -> None:
    decode, prefill = worker("decode"), worker("prefill")
    routed = route(decode, prefill)
    decode.kill()
    routed.settle(1)
    for path in (TEXT, "/tokenize"):
        response = routed.http.post(path, json=SENT, timeout=5)
        assert response.status_code == 503
        assert decode.url in response.json()["error"]["message"]
    assert routed.http.get("/v1/models", timeout=5).status_code == 503
    decode.start()
    routed.settle(2)
    assert routed.http.post(TEXT, json=SENT).status_code == 200


def test_a_stream_that_breaks_ends_with_one_error_that_names_the_cause(
    worker: Any, route: Any
) -> None:
    beginning = event("0") + event("1") + b'data: {"half'
    bad, good = worker("decode", answer=half(beginning, EVENTS), lacks=NEAR), worker("decode")
    routed = route(bad, good)
    with routed.http.stream("POST", TEXT, json={**SENT, "stream": True}) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: ")) == {"text": "0"}
        bad.gate.set()
        rest = [line for line in lines if line]
    assert rest[0] == event("1").decode().strip()
    error = json.loads(rest[1].removeprefix("data: "))["error"]
    assert bad.url in error["message"]
    assert "broke" in error["message"]
    assert error["code"] == 503
    assert rest[2:] == ["data: [DONE]"]
    assert good.seen == []
    has_ended(routed, broken=1)


def test_a_connection_that_breaks_after_the_last_event_breaks_nothing(
    worker: Any, route: Any
) -> None:
    said = event("0") + b"data: [DONE]\n\n"
    decode = worker("decode", answer=half(said, EVENTS))
    decode.gate.set()
    routed = route(decode)
    assert routed.http.post(TEXT, json={**SENT, "stream": True}).content == said
    has_ended(routed, answered=1)


def test_an_error_that_is_not_of_the_worker_begins_a_stream_and_passes(
    worker: Any, route: Any
) -> None:
    said = b'data: {"error":{"code":400,"message":"bad"}}\n\ndata: [DONE]\n\n'
    one, two = worker("decode", answer=half(said, EVENTS), lacks=NEAR), worker("decode")
    one.gate.set()
    routed = route(one, two)
    assert routed.http.post(TEXT, json={**SENT, "stream": True}).content == said
    assert two.seen == []


def test_errors_of_a_worker_pass_and_are_not_retried(worker: Any, route: Any) -> None:
    one, two = worker("decode", answer=whole("mine", 500), lacks=NEAR), worker("decode")
    routed = route(one, two)
    assert routed.http.post(TEXT, json=SENT).json() == {"text": "mine"}
    one.answer = whole("bad", 400)
    assert routed.http.post(TEXT, json=SENT).status_code == 400
    assert two.seen == []
    has_ended(routed, failed=1, refused=1)


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(work()), daemon=True)
    thread.start()
    return thread, out


def test_a_worker_that_falls_silent_ends_its_requests(worker: Any, route: Any) -> None:
    """It accepts connections and says nothing any more: no broken connection tells of it."""
    bad, good = worker("decode", answer=waits(whole("late")), lacks=NEAR), worker("decode")
    routed = route(bad, good)
    asking, answers = in_thread(lambda: routed.http.post(TEXT, json=SENT))
    until(lambda: bad.seen, "the request")
    bad.frozen = True
    asking.join(30)
    assert answers[0].json() == {"text": "hello"}
    assert let_down(routed) == {"lost": 1}
    until(lambda: bad.left == 1, "the end at the worker")
    assert "does not answer" in routed.workers()[bad.url]["reason"]
    bad.frozen = False
    routed.settle(2)


def test_a_stream_of_a_worker_that_falls_silent_ends_with_an_error(worker: Any, route: Any) -> None:
    bad = worker("decode", answer=streams(9, gate_after=1))
    routed = route(bad)
    with routed.http.stream("POST", TEXT, json={**SENT, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        bad.frozen = True
        rest = [line for line in lines if line]
    assert "gone" in json.loads(rest[0].removeprefix("data: "))["error"]["message"]
    assert rest[1:] == ["data: [DONE]"]


def test_a_worker_that_drains_finishes_what_it_has(worker: Any, route: Any) -> None:
    """It refuses connections, and goes on answering for longer than a silent one is waited for."""
    old = worker("decode", answer=waits(whole("last")), lacks=NEAR, grace_s=60.0)
    routed = route(old, worker("decode"))
    asking, answers = in_thread(lambda: routed.http.post(TEXT, json=SENT))
    until(lambda: old.seen, "the request")
    old.served.server.stop()
    routed.settle(1)
    time.sleep(2 * QUICK.lost)
    assert not answers
    assert routed.http.post(TEXT, json=SENT).json() == {"text": "hello"}
    old.gate.set()
    asking.join(30)
    assert answers[0].json() == {"text": "last"}
    assert let_down(routed) == {}


def test_one_that_failed_rests_and_is_used_again(worker: Any, route: Any) -> None:
    flaky, other = worker("decode", answer=whole("busy", 503), lacks=NEAR), worker("decode")
    routed = route(flaky, other, timing=Timing(poll=0.05, coverage=5.0, rest=0.5))
    routed.http.post(TEXT, json=SENT)
    flaky.answer = whole("well")
    until(lambda: routed.http.post(TEXT, json=SENT).json() == {"text": "well"}, "its turn")
    assert let_down(routed) == {"unavailable": 1}


def test_one_that_rests_is_used_if_it_is_the_last(worker: Any, route: Any) -> None:
    only = worker("decode", answer=whole("busy", 503))
    routed = route(only, timing=Timing(poll=0.05, coverage=5.0, rest=60.0))
    assert routed.http.post(TEXT, json=SENT).status_code == 503
    only.answer = whole("well")
    assert routed.http.post(TEXT, json=SENT).json() == {"text": "well"}


def test_a_prefill_worker_that_is_gone_is_not_named(worker: Any, route: Any) -> None:
    decode, one = worker("decode"), worker("prefill", engine_id="one", lacks=NEAR)
    two = worker("prefill", engine_id="two")
    routed = route(decode, one, two)
    named = lambda: decode.seen[-1]["kv_transfer_params"]["remote_engine_id"]  # noqa: E731
    routed.http.post(TEXT, json=SENT)
    assert named() == "one"
    one.kill()
    routed.settle(2)
    routed.http.post(TEXT, json=SENT)
    assert named() == "two"


@pytest.mark.parametrize("started", [True, False])
def test_a_router_that_stops_ends_its_requests_with_an_error(worker: Any, started: bool) -> None:
    decode = FakeWorker("decode", answer=streams(9, gate_after=int(started)))
    routed = Routed([decode], grace_s=0.2)
    routed.settle(1)
    out: list[Any] = []

    def ask() -> None:
        with httpx.Client(base_url=routed.url, timeout=60) as client:
            out.append(client.post(TEXT, json={**SENT, "stream": True}))

    asking, _ = in_thread(ask)
    until(lambda: decode.produced if started else decode.seen, "the request")
    routed.stop()
    asking.join(30)
    assert "the router is shutting down" in out[0].text
    assert out[0].status_code == (200 if started else 503)
    until(lambda: decode.left == 1, "the end at the worker")
    decode.stop()


def test_a_router_that_stops_lets_short_requests_end(worker: Any) -> None:
    decode = worker("decode", answer=waits(whole("in time")))
    routed = Routed([decode], grace_s=30.0)
    routed.settle(1)
    asking, answers = in_thread(lambda: httpx.post(routed.url + TEXT, json=SENT, timeout=60))
    until(lambda: decode.seen, "the request")
    stopping, _ = in_thread(routed.stop)
    decode.gate.set()
    asking.join(30)
    stopping.join(30)
    assert not stopping.is_alive()
    assert answers[0].json() == {"text": "in time"}
