"""Workers and routers in processes of their own that die, stop or err at a moment a test names.

    python mortal.py    imports all of it once, then forks a child for every line of JSON on its
                        stdin and says its pid; when stdin closes, all of them are killed

A child runs the product's own entry. What goes wrong is put around it from outside: around frames
that are sent and heard, writes that are posted, steps, requests that come. Orders lie in a file
for each role, so that a child can be given one at any time; of several children of a role, the
first whose moment comes takes it. Law: an order is carried out by one process; without orders a
child is what a user starts, except that reading its /metrics checks every law it has.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

FLUSH_S = 0.05
"""From a frame that was sent until the sender dies: ZeroMQ sends in a thread of its own."""
PAUSE_S = 10.0


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """At the count-th `moment`, before it or `after` it, `deed` is done; `times` in a row.

    deed: die, stop (SIGSTOP), pause (until it is let go on), slow (by seconds), drop, twice, skew
    (the wall clock, by `seconds`).
    """

    id: str
    moment: str
    deed: str
    count: int = 1
    after: bool = False
    times: int = 1
    seconds: float = 0.0


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A child. worker: its ServingOptions; or router: its workers' urls and where it answers.

    timing: of hand-offs, or of the router. place: of orders and logs.
    """

    name: str
    role: str
    place: str
    timing: dict[str, float]
    worker: dict[str, Any] | None = None
    router: dict[str, Any] | None = None


class Orders:
    """The orders of one role, as files of a directory that tests and children share."""

    def __init__(self, place: Path, role: str) -> None:
        self._place, self._file = place, place / f"{role}.orders"

    def give(self, orders: list[Order]) -> None:
        new = self._file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(orders))
        new.rename(self._file)

    def read(self) -> list[Order]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=list[Order])
        except FileNotFoundError:
            return []

    def taken(self, order: Order) -> Path:
        """Says who took it, once it is taken."""
        return self._place / f"{order.id}.taken"

    def done(self, order: Order) -> Path:
        """Is there when a pause is to end."""
        return self._place / f"{order.id}.done"


class Fate:
    """What becomes of one child at its moments; all of them are on its engine's thread."""

    def __init__(self, name: str, orders: Orders) -> None:
        self._name, self._orders = name, orders
        self._counts: Counter[str] = Counter()
        self._mine: set[str] = set()

    def meet(self, moment: str, do: Callable[[], Any]) -> Any:
        """Do what happens at a moment, and what was ordered for it."""
        for order in self._orders.read():
            if order.moment != moment:
                continue
            self._counts[order.id] += 1
            now = self._counts[order.id]
            if order.count <= now < order.count + order.times and self._takes(order):
                return self._obey(order, do)
        return do()

    def _takes(self, order: Order) -> bool:
        if order.id in self._mine:
            return True
        try:
            with self._orders.taken(order).open("x") as file:
                file.write(self._name)
        except FileExistsError:
            return False
        self._mine.add(order.id)
        return True

    def _obey(self, order: Order, do: Callable[[], Any]) -> Any:
        if order.deed == "drop":
            return None
        result = do() if order.after or order.deed == "twice" else None
        if order.deed == "die":
            time.sleep(FLUSH_S if order.after else 0.0)
            os.kill(os.getpid(), signal.SIGKILL)
        elif order.deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif order.deed == "pause":
            until = time.monotonic() + PAUSE_S
            while not self._orders.done(order).exists() and time.monotonic() < until:
                time.sleep(0.005)
        elif order.deed == "slow":
            time.sleep(order.seconds)
        elif order.deed == "skew":
            _skew(order.seconds)
        return result if order.after else do()


def _skew(seconds: float) -> None:
    """Set the wall clock of this process to another time."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)


def _around(owner: Any, name: str, fate: Fate, moment: Callable[..., str]) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        return fate.meet(moment(*args), lambda: real(self, *args, **options))

    setattr(owner, name, wrapped)


def _bind(fate: Fate) -> None:
    """Put fate around what a worker does."""
    from tandemkv.engine.channel import Channel
    from tandemkv.engine.engine import Engine
    from tandemkv.engine.exchange import Exchange
    from tandemkv.engine.worker import Worker
    from tandemkv.transfer import wire
    from tandemkv.transfer.nixl import Nixl

    def kind(frame: bytes) -> str:
        return type(getattr(wire.decode(frame), "message", None)).__name__

    _around(Channel, "send_to", fate, lambda address, frame: f"send {kind(frame)}")
    _around(Exchange, "hear", fate, lambda frame: f"hear {kind(frame)}")
    _around(Nixl, "write", fate, lambda *_: "write")
    _around(Nixl, "fence", fate, lambda *_: "fence")
    _around(Engine, "step", fate, lambda: "step")
    _around(Worker, "add", fate, lambda *_: "add")


def _check_when_read() -> None:
    """Whoever reads /metrics of a worker has its laws checked, and hears whether it is busy."""
    from tandemkv.serve import metrics

    real_snapshot, real_render = metrics.snapshot_of, metrics.render
    busy: list[bool] = [True]

    def snapshot_of(engine: Any) -> Any:
        engine.check()
        busy[0] = engine.has_work
        return real_snapshot(engine)

    def render(*args: Any) -> bytes:
        return real_render(*args) + f"test:busy {int(busy[0])}\n".encode()

    metrics.snapshot_of, metrics.render = snapshot_of, render


def _run_worker(spec: Spec) -> None:
    from tandemkv.engine import fetching
    from tandemkv.serve import worker
    from tandemkv.transfer.session import Timing

    parent = os.getppid()
    options = msgspec.convert(spec.worker, worker.ServingOptions)
    _bind(Fate(spec.name, Orders(Path(spec.place), spec.role)))
    _check_when_read()
    fetching.ANSWER_S = spec.timing["patience_s"]
    timed: Any = functools.partial(worker.Worker, timing=Timing(**spec.timing))
    worker.Worker = timed
    worker.options_of = lambda kind: (options, lambda: os.getppid() != parent)
    worker.main()


def _run_router(spec: Spec) -> None:
    from tandemkv.serve.fleet import Timing
    from tandemkv.serve.router import Router, router_server

    assert spec.router is not None
    router = Router(spec.router["prefill"], spec.router["decode"], Timing(**spec.timing))
    router_server(router, ("127.0.0.1", spec.router["port"]), grace_s=1.0).run()


def _fork(spec: Spec) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(Path(spec.place) / f"{spec.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd, to in ((0, nothing), (1, log), (2, log)):
            os.dup2(to, fd)
        _run_worker(spec) if spec.worker else _run_router(spec)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    import tandemkv.serve.router
    import tandemkv.serve.worker
    import tandemkv.transfer.nixl

    tandemkv.transfer.nixl.find_nixl()
    from transformers import AutoConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave nothing behind
    pids: list[int] = []
    for line in sys.stdin.buffer:
        pids.append(_fork(msgspec.json.decode(line, type=Spec)))
        print(pids[-1], flush=True)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
