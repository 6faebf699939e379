"""The router over workers that live: whom it asks, what it passes on, what it says of itself."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fakes import event, streams, until, waits, whole

from tandemkv.serve.fleet import Timing
from tandemkv.serve.http import MAX_BODY_BYTES

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SENT = {"prompt": "hello", "max_tokens": 5}


def test_an_answer_passes_with_status_headers_and_body(worker: Any, route: Any) -> None:
    decode = worker("decode", answer=whole("no", 418, **{"x-said": "by the worker"}))
    response = route(decode).http.post(TEXT, json=SENT)
    assert response.status_code == 418
    assert response.headers["x-said"] == "by the worker"
    assert response.headers["content-type"] == "application/json"
    assert len(response.headers.get_list("date")) == 1
    assert response.json() == {"text": "no"}
    assert decode.seen == [SENT]


def test_the_prefill_worker_is_named_in_the_body_and_nothing_else_changes(
    worker: Any, route: Any
) -> None:
    decode, prefill = worker("decode"), worker("prefill", engine_id="p-7")
    content = b' {"prompt":"h\\u00e9llo" , "seed":12345678901234567890,"temperature":1e-1} \n'
    routed = route(decode, prefill)
    assert routed.http.post(TEXT, content=content).status_code == 200
    assert decode.seen[0].pop("kv_transfer_params") == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p-7",
        "remote_host": "127.0.0.9",
        "remote_port": 5600,
    }
    assert decode.seen[0] == json.loads(content)
    assert prefill.seen == []
    assert decode.headers[0]["content-length"] != str(len(content))


def test_an_empty_body_and_null_params_are_handed_on(worker: Any, route: Any) -> None:
    decode, prefill = worker("decode"), worker("prefill")
    routed = route(decode, prefill)
    routed.http.post(TEXT, json={})
    assert decode.seen == [{}]
    routed.http.post(TEXT, json={**SENT, "kv_transfer_params": None})
    assert decode.seen[1]["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.parametrize("body", [{"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}])
def test_what_cannot_be_handed_over_names_no_prefill_worker(
    worker: Any, route: Any, body: dict[str, Any]
) -> None:
    decode = worker("decode")
    route(decode, worker("prefill")).http.post(TEXT, json=body)
    assert decode.seen == [body]


def test_without_a_live_prefill_worker_the_decode_worker_computes(worker: Any, route: Any) -> None:
    decode, prefill = worker("decode"), worker("prefill")
    routed = route(decode, prefill)
    prefill.kill()
    routed.settle(1)
    assert routed.http.post(TEXT, json=SENT).status_code == 200
    assert decode.seen == [SENT]
    prefill.start()
    routed.settle(2)
    routed.http.post(TEXT, json=SENT)
    assert "kv_transfer_params" in decode.seen[1]


def test_coverage_of_both_domains_decides(worker: Any, route: Any) -> None:
    one, other = worker("decode"), worker("decode")
    holes = worker("prefill", engine_id="holes", lacks={"target": 0, "draft": 100})
    good = worker("prefill", engine_id="good", lacks={"target": 5, "draft": 5})
    other.lacks = {"target": 10, "draft": 90}
    routed = route(one, other, holes, good)
    for _ in range(3):
        routed.http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]})
    assert (len(one.seen), len(other.seen)) == (3, 0)
    assert {b["kv_transfer_params"]["remote_engine_id"] for b in one.seen} == {"good"}
    seen = routed.samples()
    assert seen['missing_rows_total{domain="target",role="prefill"}'] == 15
    assert seen['missing_rows_total{domain="draft",role="decode"}'] == 30
    assert seen[f'requests_routed_total{{role="decode",worker="{one.url}"}}'] == 3
    until(lambda: routed.samples().get('requests_total{outcome="answered"}') == 3, "the count")


def test_equals_take_turns_and_load_turns_away(worker: Any, route: Any) -> None:
    fakes = [worker("decode") for _ in range(3)]
    routed = route(*fakes)
    for _ in range(6):
        routed.http.post(TEXT, json=SENT)
    assert [len(fake.seen) for fake in fakes] == [2, 2, 2]
    fakes[0].load = {"running": 30, "waiting": 2, "queued_tokens": 0}
    for _ in range(4):
        routed.http.post(TEXT, json=SENT)
    assert [len(fake.seen) for fake in fakes] == [2, 4, 4]


def test_a_worker_that_does_not_say_what_it_holds_counts_as_one_that_holds_nothing(
    worker: Any, route: Any
) -> None:
    silent, warm = worker("decode", covers=False), worker("decode", lacks={"target": 1, "draft": 1})
    routed = route(silent, warm)
    for _ in range(3):
        assert routed.http.post(TEXT, json=SENT).status_code == 200
    assert (len(silent.seen), len(warm.seen)) == (0, 3)
    warm.covers = False
    routed.http.post(TEXT, json=SENT)
    assert routed.samples()['unknown_coverage_total{role="decode"}'] == 1


def test_events_pass_in_order_and_none_waits_for_the_next(worker: Any, route: Any) -> None:
    decode = worker("decode", answer=streams(9, gate_after=3))
    routed = route(decode)
    with routed.http.stream("POST", TEXT, json={**SENT, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        parts = response.iter_raw()
        got = b""
        while got.count(b"\n\n") < 3:
            got += next(parts)
        assert decode.produced == 3
        decode.gate.set()
        got += b"".join(parts)
    assert got == b"".join(event(str(i)) for i in range(9)) + b"data: [DONE]\n\n"


def test_a_client_that_reads_slowly_slows_the_worker_down(worker: Any, route: Any) -> None:
    """Far more than all buffers on the way hold: the worker must not have written it all."""
    decode = worker("decode", answer=streams(2000, padding=1 << 16))
    routed = route(decode)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", httpx.URL(routed.url).port))
        body = json.dumps({**SENT, "stream": True}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: decode.produced, "an event")
        before = -1
        while before != decode.produced:
            before = decode.produced
            until(lambda: routed.http.get("/health").status_code, "health")
            for _ in range(20):
                routed.http.get("/health")
        assert before < 2000
    until(lambda: decode.left == 1, "the end at the worker")


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_ends_its_request_at_the_worker(
    worker: Any, route: Any, streamed: bool
) -> None:
    """Before any byte of the answer: the worker waits."""
    decode = worker("decode", answer=waits(whole("late")))
    routed = route(decode)
    body = json.dumps({**SENT, "stream": streamed}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(routed.url).port)) as client:
        client.sendall(head + body)
        until(lambda: decode.seen, "the request")
    until(lambda: decode.left == 1, "the end at the worker")
    until(lambda: 'requests_total{outcome="client_gone"}' in routed.samples(), "the count")


def test_a_client_that_leaves_a_stream_ends_it_at_the_worker(worker: Any, route: Any) -> None:
    decode = worker("decode", answer=streams(10, gate_after=2))
    routed = route(decode)
    with routed.http.stream("POST", TEXT, json={**SENT, "stream": True}) as response:
        next(response.iter_raw())
    until(lambda: decode.left == 1, "the end at the worker")


def test_headers_of_one_connection_are_not_passed_on(worker: Any, route: Any) -> None:
    decode = worker("decode", answer=whole("x", **{"keep-alive": "timeout=99", "x-own": "1"}))
    routed = route(decode)
    headers = {
        "connection": "keep-alive, x-private",
        "x-private": "no",
        "te": "trailers",
        "proxy-authorization": "secret",
        "authorization": "Bearer key",
        "x-kept": "yes",
    }
    response = routed.http.post(TEXT, json=SENT, headers=headers)
    got = decode.headers[0]
    assert {"te", "x-private", "proxy-authorization"}.isdisjoint(got)
    assert (got["authorization"], got["x-kept"]) == ("Bearer key", "yes")
    assert got["host"] == httpx.URL(decode.url).netloc.decode()
    assert response.headers["x-own"] == "1"
    assert "keep-alive" not in response.headers


def test_a_worker_is_asked_for_the_encodings_that_the_client_takes(worker: Any, route: Any) -> None:
    decode = worker("decode")
    routed = route(decode)
    routed.http.post(TEXT, json=SENT, headers={"accept-encoding": "zstd"})
    sent = httpx.Request("POST", routed.url + TEXT, json=SENT)
    routed.http.send(sent)
    assert [h.get_list("accept-encoding") for h in decode.headers] == [["zstd"], ["identity"]]


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        (b"{", 400, None),
        (b"[1]", 400, None),
        (b"", 400, None),
        (b'{"kv_transfer_params": {"do_remote_prefill": true}}', 400, "kv_transfer_params"),
        (b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}', 413, None),
    ],
)
def test_a_body_that_cannot_be_passed_on_is_refused_in_the_apis_shape(
    worker: Any, route: Any, sent: bytes, status: int, param: str | None
) -> None:
    decode = worker("decode")
    routed = route(decode)
    response = routed.http.post(TEXT, content=sent)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert decode.seen == []
    assert routed.samples()['requests_total{outcome="refused"}'] == 1


def test_unknown_routes_and_methods_have_the_apis_shape(worker: Any, route: Any) -> None:
    routed = route(worker("decode"))
    assert routed.http.post("/v1/nothing", json={}).json()["error"]["code"] == 404
    assert routed.http.get(TEXT).json()["error"]["code"] == 405


def test_what_all_workers_answer_alike_is_asked_of_one(worker: Any, route: Any) -> None:
    decode = worker("decode")
    routed = route(decode, worker("prefill"))
    assert routed.http.get("/v1/models?a=b").json() == {"by": decode.url, "query": "a=b"}
    assert routed.http.get("/v1/models/org/na%20me").json() == {"name": "org/na me"}
    for path in ("/tokenize", "/detokenize"):
        assert routed.http.post(path, json={"prompt": "x"}).json() == {"text": "hello"}
    assert decode.seen == [{"prompt": "x"}] * 2
    assert not [name for name in routed.samples() if name.startswith("requests_routed")]


def test_the_router_says_what_it_is_and_who_is_there(worker: Any, route: Any) -> None:
    decode, prefill = worker("decode"), worker("prefill")
    routed = route(decode, prefill)
    about = routed.http.get("/worker").json()
    assert (about["role"], about["model"]) == ("router", "a/model")
    assert routed.workers()[decode.url] == {
        "url": decode.url,
        "role": "decode",
        "alive": True,
        "reason": None,
        "engine_id": "decode-1",
    }
    assert routed.samples()['workers_up{role="prefill"}'] == 1


def test_a_worker_of_another_role_is_refused_by_name(worker: Any, route: Any) -> None:
    decode, wrong = worker("decode"), worker("prefill")
    routed = route(decode, ("decode", wrong.url), alive=1)
    state = until(lambda: (s := routed.workers()[wrong.url])["engine_id"] and s, "its answer")
    assert not state["alive"]
    assert "role is prefill" in state["reason"]
    for _ in range(3):
        routed.http.post(TEXT, json=SENT)
    assert (len(decode.seen), len(wrong.seen)) == (3, 0)


def test_a_worker_of_another_model_is_refused_by_name(worker: Any, route: Any) -> None:
    first, other = worker("decode"), worker("prefill", model="another/model")
    routed = route(first, other, alive=1)
    reasons = [w["reason"] for w in routed.workers().values() if w["reason"]]
    assert len(reasons) == 1
    assert "another/model" in reasons[0]
    assert "a/model" in reasons[0]
    other.model = first.model
    routed.settle(2)


def test_a_worker_that_starts_anew_is_used_under_its_new_name(worker: Any, route: Any) -> None:
    decode, prefill = worker("decode"), worker("prefill")
    routed = route(decode, prefill)
    prefill.kill()
    routed.settle(1)
    prefill.engine_id, prefill.control = "prefill-2", {"host": "127.0.0.8", "port": 7}
    prefill.start()
    routed.settle(2)
    routed.http.post(TEXT, json=SENT)
    sent = decode.seen[0]["kv_transfer_params"]
    assert sent["remote_engine_id"] == "prefill-2"
    assert (sent["remote_host"], sent["remote_port"]) == ("127.0.0.8", 7)


def test_a_router_starts_before_its_workers(worker: Any, route: Any, caplog: Any) -> None:
    decode = worker("decode")
    decode.kill()
    routed = route(decode, alive=0)
    down = routed.http.get("/health")
    assert down.status_code == 503
    assert "cannot connect" in down.json()["error"]["message"]
    decode.start()
    routed.settle(1)
    assert routed.http.get("/health").status_code == 200
    assert routed.http.post(TEXT, json=SENT).status_code == 200
    said = [r.getMessage() for r in caplog.records if decode.url in r.getMessage()]
    assert ["not there yet" in said[0], "is there" in said[1]] == [True, True]
    assert len(said) == 2


def test_a_hundred_requests_at_once_are_each_answered_once(worker: Any, route: Any) -> None:
    fakes = [worker("decode", answer=streams(5)), worker("decode", answer=streams(5))]
    routed = route(*fakes, worker("prefill"), timing=Timing(poll=0.05, coverage=30.0))

    def one(i: int) -> bytes:
        with httpx.Client(base_url=routed.url, timeout=60) as client:
            return client.post(TEXT, json={"prompt": f"{i}", "stream": True}).content

    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(one, range(100)))
    assert set(answers) == {b"".join(event(str(i)) for i in range(5)) + b"data: [DONE]\n\n"}
    prompts = [body["prompt"] for fake in fakes for body in fake.seen]
    assert sorted(prompts, key=int) == [str(i) for i in range(100)]
    assert min(len(fake.seen) for fake in fakes) > 10
    until(lambda: routed.samples().get('requests_total{outcome="answered"}') == 100, "the count")


def test_a_router_loads_no_engine() -> None:
    """It starts in a moment, on a machine without a model."""
    check = "import sys, tandemkv.serve.router; print({'torch', 'transformers'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
