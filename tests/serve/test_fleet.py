"""What a router believes of a worker, by what it heard and when. Times are the test's own."""

from __future__ import annotations

import pytest

from tandemkv.serve.fleet import Address, Fleet, Flight, Info, Timing, Worker
from tandemkv.serve.routing import Load

TIMING = Timing(silent=3.0, lost=8.0, lost_refusing=60.0, rest=1.0, max_rest=4.0)


def info(role: str = "decode", engine: str = "one", **fields: object) -> Info:
    control = Address("127.0.0.1", 5600) if role == "prefill" else None
    return Info(**{"role": role, "engine_id": engine, "model": "m", "control": control, **fields})


def heard(at: float = 0.0) -> Worker:
    worker = Worker("http://a", "decode", TIMING)
    worker.heard_from(info(), at, at)
    return worker


def ended(worker: Worker, now: float, *, byte_at: float = 0.0) -> list[str]:
    """What the requests there are told at a time, if anything."""
    causes: list[str] = []
    worker.flights = {Flight(byte_at, causes.append)}
    worker.end_lost(now)
    return causes


def test_a_worker_is_gone_when_silent_for_long_and_at_once_when_it_refuses() -> None:
    worker = heard()
    worker.gone("silent", "does not answer", 2.9)
    assert worker.alive
    worker.gone("silent", "does not answer", 3.0)
    assert not worker.alive
    worker.heard_from(info(), 3.5, 3.6)
    assert worker.alive
    worker.gone("refused", "cannot connect", 3.7)
    assert not worker.alive
    assert worker.state()["reason"] == "cannot connect"


def test_requests_at_a_silent_worker_end_unless_their_bytes_come() -> None:
    worker = heard()
    worker.gone("silent", "does not answer", 7.9)
    assert ended(worker, 7.9) == []
    assert ended(worker, 8.0) == ["it is gone: does not answer"]
    assert ended(worker, 8.0, byte_at=0.1) == []
    worker.heard_from(info(), 8.1, 8.2)
    assert ended(worker, 9.0) == []


def test_requests_at_a_worker_that_drains_have_longer() -> None:
    worker = heard()
    worker.gone("refused", "cannot connect", 1.0)
    assert ended(worker, 59.9) == []
    assert len(ended(worker, 60.0)) == 1


def test_what_was_sent_counts_until_a_report_that_was_asked_for_later() -> None:
    worker = heard()
    worker.sent(1.0, 100)
    worker.sent(2.0, 30)
    assert worker.view(2.0).load == Load(running=0, waiting=2, queued_tokens=130)
    worker.report(Load(running=1), asked_at=1.5)
    assert worker.view(2.0).load == Load(running=1, waiting=1, queued_tokens=30)
    worker.report(Load(running=2), asked_at=2.5)
    assert worker.view(3.0).load == Load(running=2)
    assert worker.view(3.0).used == 2.0


def test_one_that_fails_rests_for_twice_as_long_each_time_until_it_answers() -> None:
    worker, rests = heard(), []
    for _ in range(4):
        worker.failed(100.0)
        rests.append(sum(worker.view(100.0 + s / 10).resting for s in range(100)) / 10)
    assert rests == [1.0, 2.0, 4.0, 4.0]
    worker.answered()
    worker.failed(200.0)
    assert not worker.view(201.0).resting


def test_a_prefill_worker_without_a_control_address_is_refused() -> None:
    fleet = Fleet(["http://p"], ["http://d"], TIMING)
    fleet.heard_from(fleet["http://p"], info("prefill", control=None), 0.0, 0.0)
    assert not fleet["http://p"].alive
    assert "control" in fleet["http://p"].reason
    fleet.heard_from(fleet["http://p"], info("prefill"), 1.0, 1.0)
    assert fleet["http://p"].alive


def test_the_model_is_that_of_who_is_alive() -> None:
    """All may be started anew with another model, one after the other."""
    fleet = Fleet(["http://p"], ["http://d"], TIMING)
    prefill, decode = fleet.workers
    fleet.heard_from(decode, info(model="old"), 0.0, 0.0)
    fleet.heard_from(prefill, info("prefill", model="new"), 0.0, 0.0)
    assert (decode.alive, prefill.alive) == (True, False)
    assert "new" in prefill.reason
    assert "old" in prefill.reason
    decode.gone("refused", "cannot connect", 1.0)
    fleet.heard_from(prefill, info("prefill", model="new"), 2.0, 2.0)
    assert prefill.alive
    fleet.heard_from(decode, info(model="old"), 3.0, 3.0)
    assert not decode.alive


def test_a_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker("http://a", "decode", TIMING)
    for now in (1.0, 2.0):
        worker.gone("refused", f"cannot connect, {now}", now)
    for now in (3.0, 4.0):
        worker.heard_from(info(), now, now)
    worker.heard_from(info(engine="two"), 5.0, 5.0)
    for now in (6.0, 7.0):
        worker.gone("refused", "cannot connect", now)
    said = [
        record.getMessage().removeprefix("decode worker http://a ") for record in caplog.records
    ]
    assert said == [
        "is not there yet: cannot connect, 1.0",
        "is there, engine one",
        "is there, engine two, started anew",
        "is gone: cannot connect",
    ]
