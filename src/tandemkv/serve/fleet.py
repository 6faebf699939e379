"""The workers behind a router: who is there, how busy they said they are, what was sent since.

    not heard of --an answer--> alive --refused, or silent for silent_s--> gone --an answer--> alive
                 --an answer of another role or model--> refused by name --a right one--> alive

Law: a worker is chosen only while it is alive; who comes and who goes is logged once per change; a
request at a worker that is gone is ended with a cause, unless its bytes still come: a worker that
drains refuses connections and goes on writing. Pure but for the log: times are passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec

from tandemkv.serve.routing import Load, Missing, View

log = logging.getLogger("tandemkv")


class Timing(msgspec.Struct, frozen=True):
    """Seconds. poll: between two looks at a worker. silent: without an answer, then it is gone.

    lost: gone and silent for so long, then its requests end; lost_refusing: the same of one whose
    host still refuses connections, which breaks those of a process that ended by itself, so that
    this is for one that drains. coverage: at most waited for what workers hold. rest, max_rest: how
    long one that failed is left out, the first time and at most; it doubles.
    """

    poll: float = 0.5
    silent: float = 3.0
    lost: float = 8.0
    lost_refusing: float = 60.0
    coverage: float = 0.2
    rest: float = 0.5
    max_rest: float = 8.0


class Address(msgspec.Struct, frozen=True):
    """Where a prefill worker's control channel listens."""

    host: str
    port: int


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself: the body of GET /worker."""

    role: str
    engine_id: str
    model: str
    control: Address | None = None
    max_model_len: int = 0
    load: Load = Load()


class Flight:
    """A request at a worker. end(cause): ends it from outside. heard: when its last byte came."""

    __slots__ = ("end", "heard")

    def __init__(self, now: float, end: Callable[[str], None]) -> None:
        self.heard = now
        self.end = end


class Worker:
    """One url, and the role that it was named for."""

    def __init__(self, url: str, role: str, timing: Timing) -> None:
        self.url = url
        self.role = role
        self.alive = False
        self.reason = "has not answered yet"
        self.info: Info | None = None
        self.flights: set[Flight] = set()
        self._timing = timing
        self._load = Load()
        self._sent: list[tuple[float, int]] = []
        self._used = 0.0
        self._heard: float | None = None
        self._refusing = False
        self._rest_s = 0.0
        self._rests_until = 0.0
        self._said = ""

    def heard_from(self, info: Info, asked_at: float, now: float, wrong: str = "") -> None:
        """It answered. wrong: why it is not used all the same."""
        again = self.info is not None and self.info.engine_id != info.engine_id
        self.info, self._heard, self._refusing = info, now, False
        self.report(info.load, asked_at)
        if wrong:
            self._turn(False, wrong, f"is refused: {wrong}", once_per=wrong)
            return
        said = f"is there, engine {info.engine_id}{', started anew' * again}"
        self._turn(True, "", said, once_per=info.engine_id)

    def gone(self, kind: str, why: str, now: float) -> None:
        """It did not answer. kind: silent, and it may be busy; else it is gone at once."""
        self._refusing = kind != "silent"
        if self._heard is None:
            self._heard = now
        if self._refusing or not self.alive or now - self._heard >= self._timing.silent:
            where = "is gone" if self.info is not None else "is not there yet"
            self._turn(False, why, f"{where}: {why}", once_per=where)

    def report(self, load: Load, asked_at: float) -> None:
        """Its load, as it was some time after asked_at; what was sent later is added to it."""
        self._load = load
        self._sent = [sent for sent in self._sent if sent[0] >= asked_at]

    def sent(self, now: float, num_tokens: int) -> None:
        """A request was given to it, with so many tokens to compute."""
        self._sent.append((now, num_tokens))
        self._used = now

    def failed(self, now: float) -> None:
        """It let a request down: it rests, each time for twice as long."""
        self._rest_s = min(max(2 * self._rest_s, self._timing.rest), self._timing.max_rest)
        self._rests_until = now + self._rest_s

    def answered(self) -> None:
        """It answered a request: what was before is forgiven."""
        self._rest_s = 0.0

    def view(self, now: float, missing: Missing | None = None) -> View:
        """What the choice of workers sees of it."""
        load = self._load
        waiting = load.waiting + len(self._sent)
        queued = load.queued_tokens + sum(tokens for _, tokens in self._sent)
        return View(
            url=self.url,
            role=self.role,
            alive=self.alive,
            resting=now < self._rests_until,
            load=Load(load.running, waiting, queued),
            missing=missing,
            used=self._used,
        )

    def end_lost(self, now: float) -> None:
        """End the requests of a worker that is gone for long."""
        limit = self._timing.lost_refusing if self._refusing else self._timing.lost
        if self.alive or self._heard is None or now - self._heard < limit:
            return
        for flight in list(self.flights):
            if now - flight.heard >= limit:
                flight.end(f"it is gone: {self.reason}")

    def state(self) -> dict[str, Any]:
        """For /health. reason: why it is not used, None if it is."""
        return {
            "url": self.url,
            "role": self.role,
            "alive": self.alive,
            "reason": self.reason or None,
            "engine_id": self.info and self.info.engine_id,
        }

    def _turn(self, alive: bool, reason: str, said: str, *, once_per: str) -> None:
        self.alive, self.reason = alive, reason
        if once_per != self._said:
            self._said = once_per
            log.warning("%s worker %s %s", self.role, self.url, said)


class Fleet:
    """All workers of a router. They serve one model: that of the first that is alive."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], timing: Timing) -> None:
        self.workers = [Worker(url, "prefill", timing) for url in prefill]
        self.workers += [Worker(url, "decode", timing) for url in decode]

    def __getitem__(self, url: str) -> Worker:
        return next(worker for worker in self.workers if worker.url == url)

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive]

    def heard_from(self, worker: Worker, info: Info, asked_at: float, now: float) -> None:
        """A worker answered; it is used if it fits the role it was named for, and the others."""
        worker.heard_from(info, asked_at, now, self._wrong(worker, info))

    def why_none(self, besides: Container[str] = ()) -> str:
        """Why no decode worker can be had, worker by worker; besides: URLs that were tried."""
        rest = [w for w in self.workers if w.role == "decode" and w.url not in besides]
        return "; ".join(f"{w.url} {w.reason or 'was not tried'}" for w in rest)

    def _wrong(self, worker: Worker, info: Info) -> str:
        if info.role != worker.role:
            return f"its role is {info.role}, but it was named as a {worker.role} worker"
        if worker.role == "prefill" and info.control is None:
            return "it says no control address, so that no decode worker can reach it"
        others = [w for w in self.alive if w is not worker and w.info is not None]
        for other in others[:1]:
            if other.info is not None and other.info.model != info.model:
                return f"it serves {info.model}, but {other.url} serves {other.info.model}"
        return ""
