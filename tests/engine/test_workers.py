"""Workers that were started one by one: met by address, held prompts, ends of the other one.

Two workers in this process, each with a data plane and a control channel of its own: NIXL moves the
rows, ZeroMQ the words. The drafter is the target itself: every draft is accepted if and only if
rows, positions and masks are right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from engines import greedy, prompt, run, tiny_engine, used_pages

from tandemkv.base.errors import ConfigError, RequestError
from tandemkv.base.transfer_params import KVTransferParams
from tandemkv.engine import fetching
from tandemkv.engine.channel import host_and_port
from tandemkv.engine.worker import Worker
from tandemkv.sched.batch import Output
from tandemkv.transfer.offer import WorkerRole
from tandemkv.transfer.session import Timing

pytest.importorskip("nixl_cu13", reason="NIXL is not installed")

LOCAL = "tcp://127.0.0.1:0"
SECRET = b"a secret of the deployment"


def made(role: WorkerRole, address: str = LOCAL, **how) -> Worker:
    return Worker(tiny_engine("self", max_batch_tokens=9), role, address, **how)


class Two:
    """A prefill and a decode worker, and what their clients hear."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.heard: dict[str, list[Output]] = {}

    def start(self, role: WorkerRole, address: str = LOCAL, **how) -> Worker:
        worker = made(role, address, **how)
        self.workers.append(worker)
        return worker

    def end(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.close()

    def until(self, done, limit_s: float = 30.0) -> None:
        end = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < end, "it takes too long"
            self.turn()

    def turn(self) -> None:
        for worker in self.workers:
            for output in worker.step() if worker.has_work else (worker.turn(0.0) or ()):
                self.heard.setdefault(output.request_id, []).append(output)

    def finished(self, name: str) -> bool:
        return name in self.heard and self.heard[name][-1].finished

    def idle(self) -> bool:
        return not any(worker.has_work for worker in self.workers)

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.heard[name] for token in output.tokens]


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    yield two
    two.until(two.idle)
    for worker in two.workers:
        worker.check()
        assert used_pages(worker._engine) == [0] * len(worker.layout.groups)
        worker.close()


def there(worker: Worker, **changes) -> KVTransferParams:
    host, port = host_and_port(worker.address)
    values = {
        "do_remote_prefill": True,
        "remote_engine_id": worker.engine_id,
        "remote_host": host,
        "remote_port": port,
    }
    return KVTransferParams(**(values | changes))


def plain(tokens: list[int]) -> list[int]:
    return run(tiny_engine("none"), [tokens], greedy())[0].tokens


def assert_nothing_was_lost(two: Two, name: str, tokens: list[int]) -> None:
    assert two.tokens(name) == plain(tokens)
    last = two.heard[name][-1]
    assert last.num_accepted == last.num_drafts > 0


def test_a_worker_that_was_never_met_is_greeted_and_asked(two):
    p, d = two.start(WorkerRole.PREFILL), two.start(WorkerRole.DECODE)
    tokens = prompt(40, seed=1)
    d.add(tokens, greedy(), request_id="r", transfer=there(p))
    two.until(lambda: two.finished("r"))
    assert_nothing_was_lost(two, "r", tokens)
    assert (d.handoffs.fetched, d.handoffs.computed_here) == (1, {})
    assert d.scheduler.stats.num_prefill_rows == 0


def test_a_prompt_that_was_computed_first_is_held_and_fetched(two):
    p, d = two.start(WorkerRole.PREFILL), two.start(WorkerRole.DECODE)
    tokens = prompt(40, seed=2)
    p.add(tokens, greedy(1), request_id="a", transfer=KVTransferParams(do_remote_decode=True))
    two.until(lambda: two.finished("a"))
    held = two.heard["a"][-1].transfer
    assert held == there(p, remote_request_id="a")
    assert two.tokens("a") == plain(tokens)[:1]
    assert any(used_pages(p._engine))
    d.add(tokens, greedy(), request_id="b", transfer=held)
    two.until(lambda: two.finished("b"))
    assert_nothing_was_lost(two, "b", tokens)
    assert d.handoffs.fetched == 1
    assert p.scheduler.stats.num_prefill_rows == len(tokens)  # not computed again


def test_a_request_that_names_no_worker_is_computed_by_the_decode_worker_and_counted(two):
    d = two.start(WorkerRole.DECODE)
    tokens = prompt(20, seed=1)
    d.add(tokens, greedy(), request_id="r")
    two.until(lambda: two.finished("r"))
    assert_nothing_was_lost(two, "r", tokens)
    assert d.handoffs.computed_here == {"not_asked": 1}


def test_what_is_held_and_asked_for_by_nobody_is_given_back():
    two = Two()
    p = two.start(WorkerRole.PREFILL, timing=Timing(lease_s=0.2))
    p.add(prompt(20), greedy(1), request_id="a", transfer=KVTransferParams(do_remote_decode=True))
    two.until(lambda: two.finished("a"))
    two.until(two.idle)
    assert used_pages(p._engine) == [0] * len(p.layout.groups)
    two.end(p)


def test_a_held_prompt_is_not_given_for_another_one(two):
    p, d = two.start(WorkerRole.PREFILL), two.start(WorkerRole.DECODE)
    p.add(prompt(20), greedy(1), request_id="a", transfer=KVTransferParams(do_remote_decode=True))
    two.until(lambda: two.finished("a"))
    other = prompt(20, seed=5)
    d.add(other, greedy(), request_id="b", transfer=two.heard["a"][-1].transfer)
    two.until(lambda: two.finished("b"))
    assert_nothing_was_lost(two, "b", other)
    assert d.handoffs.computed_here == {"given_up": 1}


def test_a_client_that_leaves_a_held_prompt_leaves_nothing(two):
    p = two.start(WorkerRole.PREFILL)
    p.add(prompt(40), greedy(1), request_id="a", transfer=KVTransferParams(do_remote_decode=True))
    two.turn()
    assert p.abort("a") is not None
    two.until(two.idle)


def test_an_id_that_holds_a_prompt_cannot_hold_another(two):
    p = two.start(WorkerRole.PREFILL)
    asked = KVTransferParams(do_remote_decode=True)
    p.add(prompt(10), greedy(1), request_id="a", transfer=asked)
    two.until(lambda: two.finished("a"))
    with pytest.raises(RequestError, match="in use"):
        p.add(prompt(10), greedy(1), request_id="a", transfer=asked)
    p.abort("a")


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13])
def test_a_prefill_worker_that_goes_at_any_moment_costs_no_request(two, turns):
    p, d = two.start(WorkerRole.PREFILL), two.start(WorkerRole.DECODE)
    tokens = prompt(60, seed=3)
    d.add(tokens, greedy(), request_id="r", transfer=there(p))
    for _ in range(turns):
        two.turn()
    two.end(p)
    two.until(lambda: two.finished("r"), fetching.ANSWER_S - 1)
    assert_nothing_was_lost(two, "r", tokens)


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 8, 13])
def test_a_decode_worker_that_goes_at_any_moment_leaves_nothing_behind(two, turns):
    p, d = two.start(WorkerRole.PREFILL), two.start(WorkerRole.DECODE)
    d.add(prompt(60, seed=3), greedy(), request_id="r", transfer=there(p))
    for _ in range(turns):
        two.turn()
    two.end(d)
    two.until(two.idle, Timing().lease_s - 1)


def test_the_process_that_took_an_address_is_asked_in_the_others_place(two):
    p, d = two.start(WorkerRole.PREFILL), two.start(WorkerRole.DECODE)
    d.add(prompt(20, seed=4), greedy(), request_id="before", transfer=there(p))
    two.until(lambda: two.finished("before"))
    stale, address = there(p, remote_request_id="held there"), p.address
    two.end(p)
    two.start(WorkerRole.PREFILL, address)
    tokens = prompt(30, seed=6)
    d.add(tokens, greedy(), request_id="after", transfer=stale)
    two.until(lambda: two.finished("after"))
    assert_nothing_was_lost(two, "after", tokens)
    assert d.handoffs.fetched + sum(d.handoffs.computed_here.values()) == 2
    d.add(tokens[:17], greedy(), request_id="later", transfer=stale)
    two.until(lambda: two.finished("later"))
    assert d.handoffs.fetched >= 2


@pytest.mark.parametrize("theirs", [None, b"another secret of sixteen"])
def test_a_worker_that_does_not_know_the_secret_is_not_heard(two, monkeypatch, theirs):
    monkeypatch.setattr(fetching, "ANSWER_S", 0.5)
    p = two.start(WorkerRole.PREFILL, secret=theirs)
    d = two.start(WorkerRole.DECODE, secret=SECRET)
    tokens = prompt(20, seed=7)
    d.add(tokens, greedy(), request_id="r", transfer=there(p))
    two.until(lambda: two.finished("r"))
    assert_nothing_was_lost(two, "r", tokens)
    assert d.handoffs.computed_here == {"no_answer": 1}
    assert sum(p.exchange.undecodable.values()) > 0


def test_workers_that_share_a_secret_exchange(two):
    p = two.start(WorkerRole.PREFILL, secret=SECRET)
    d = two.start(WorkerRole.DECODE, secret=SECRET)
    tokens = prompt(20, seed=8)
    d.add(tokens, greedy(), request_id="r", transfer=there(p))
    two.until(lambda: two.finished("r"))
    assert d.handoffs.fetched == 1


def test_a_secret_that_keeps_nobody_out_and_an_address_in_use_are_refused():
    with pytest.raises(ConfigError, match="at least 16"):
        made(WorkerRole.PREFILL, secret=b"short")
    first = made(WorkerRole.PREFILL)
    with pytest.raises(ConfigError, match="in use"):
        made(WorkerRole.PREFILL, first.address)
    first.close()
