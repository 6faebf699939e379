"""Workers: an engine that hands prompts over, as a process of its own or inside a server.

    prefill   a process that computes prompts for others and ships rows, chunk by chunk
    decode    looks like an engine; what is added to it is fetched from a prefill worker, and
              computed here when there is none, or when one fails

Law: a request ends once, whatever happens to the other worker. The decode worker notices that a
prefill process is gone by its exit, goes on without it, and says so. No rule of its own: sessions
and cache decide. One thread owns all of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError, TandemError
from tandemkv.base.sampling import SamplingParams
from tandemkv.engine.channel import Channel
from tandemkv.engine.engine import Engine
from tandemkv.engine.exchange import COMPUTED_HERE, Exchange, Fetch, HandoffStats
from tandemkv.kv.keys import Namespace
from tandemkv.sched.batch import Output
from tandemkv.sched.request import FinishReason, Request
from tandemkv.transfer.offer import WorkerRole

log = logging.getLogger("tandemkv")

IDLE_S = 0.05
BUSY_S = 0.001
GREET_EVERY_S = 0.2
START_S = 300.0


class WorkerOptions(msgspec.Struct, kw_only=True):
    """A prefill process: its engine, where it listens, who it belongs to."""

    engine: EngineConfig
    address: str
    draft_transfer: bool = True


def new_engine_id(role: str) -> str:
    """New with each incarnation of a worker."""
    return f"{role}-{uuid.uuid4().hex[:12]}"


def exchange_of(
    engine: Engine, role: WorkerRole, address: str, *, draft_transfer: bool = True
) -> tuple[Exchange, Channel]:
    """An engine's hand-offs over NIXL and ZeroMQ. ConfigError where NIXL is not installed."""
    from tandemkv.transfer.nixl import Nixl

    engine_id = new_engine_id(role)
    channel = Channel(address, engine_id)
    try:
        transport = Nixl(engine_id)
    except ImportError as error:
        channel.close()
        raise ConfigError(f"--disaggregate needs nixl-cu13: {error}") from None
    exchange = Exchange(
        engine, transport, engine_id, role, channel.send, draft_transfer=draft_transfer
    )
    return exchange, channel


class PrefillProcess:
    """A prefill worker as a child of this process; it ends with it."""

    def __init__(self, config: EngineConfig, address: str, *, draft_transfer: bool = True) -> None:
        options = WorkerOptions(engine=config, address=address, draft_transfer=draft_transfer)
        self.address = address
        self.engine_id = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tandemkv.engine.worker"],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: poll() says so
            self._process.stdin.write(msgspec.json.encode(options) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it: its stdin closes, which it takes as the end; then by force."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class DecodeWorker:
    """An engine whose prompts are computed by prefill processes. Stands in for an Engine.

    num_prefill: processes to start with the same configuration. Raises ConfigError if one does not
    come up.
    """

    def __init__(self, engine: Engine, num_prefill: int, *, draft_transfer: bool = True) -> None:
        self._engine = engine
        self._directory = tempfile.TemporaryDirectory(prefix="tandemkv-")
        place = Path(self._directory.name)
        self.prefill = [
            PrefillProcess(
                engine.config, f"ipc://{place}/prefill{i}", draft_transfer=draft_transfer
            )
            for i in range(num_prefill)
        ]
        self._then = time.monotonic()
        self._ended: list[Output] = []
        self._next = 0
        try:
            self.exchange, self._channel = exchange_of(
                engine, WorkerRole.DECODE, f"ipc://{place}/decode", draft_transfer=draft_transfer
            )
            self._await_peers()
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        namespace: Namespace = Namespace(),
        request_id: str | None = None,
        priority: int = 0,
        watch: Callable[[Sequence[int]], int | None] | None = None,
    ) -> Request:
        """Fetch a request's prompt, or queue it here. Raises RequestError as Engine.add does."""
        request = self._engine.request_of(
            prompt,
            params,
            namespace=namespace,
            request_id=request_id,
            priority=priority,
            watch=watch,
        )
        peers = [p.engine_id for p in self.prefill if p.engine_id in self.exchange.peers]
        if peers:
            self._next += 1
            self.exchange.fetch(Fetch(request, peers[self._next % len(peers)]))
        else:
            self.exchange.counts[COMPUTED_HERE + "no_prefill_worker"] += 1
            self._engine.submit(request)
        return request

    @property
    def handoffs(self) -> HandoffStats:
        """What became of the prompts given to prefill workers."""
        return self.exchange.stats

    @property
    def num_prefill_workers(self) -> int:
        """Prefill processes that are alive and would be given a prompt now."""
        peers = self.exchange.peers
        return sum(process.alive and process.engine_id in peers for process in self.prefill)

    @property
    def has_work(self) -> bool:
        return bool(self._ended) or self._engine.has_work or self.exchange.busy

    def step(self) -> list[Output]:
        """One turn: frames, data plane, sessions, and a step of the engine if it has work."""
        self._turn(0.0 if self._engine.has_work else BUSY_S)
        outputs, self._ended = self._ended, []
        if self._engine.has_work:
            outputs += self._engine.step()
        return [output for output in outputs if not self.exchange.note(output)]

    def abort(self, request_id: str) -> Output | None:
        """End a request, also one that is still being fetched."""
        if self.exchange.abort(request_id):
            return Output(request_id=request_id, finished=True, finish_reason=FinishReason.ABORT)
        return self._engine.abort(request_id)

    def check(self) -> None:
        """Every law of engine and sessions. Called when idle, so it looks at the others too."""
        self._turn(0.0)
        self._engine.check()
        self.exchange.check()

    def close(self) -> None:
        """End the prefill processes, give the memory back."""
        for process in self.prefill:
            process.close()
        if hasattr(self, "exchange"):
            self.exchange.close()
            self._channel.close()
        self._directory.cleanup()

    def _turn(self, wait_s: float) -> None:
        for frame in self._channel.receive(wait_s):
            self.exchange.hear(frame)
        now = time.monotonic()
        elapsed, self._then = now - self._then, now
        self.exchange.poll(elapsed)
        for process in self.prefill:
            if process.engine_id and not process.alive:
                log.warning("prefill worker %s is gone; going on without it", process.engine_id)
                self.exchange.peer_dead(process.engine_id, "its process ended")
                process.engine_id = ""

    def _await_peers(self) -> None:
        """Greet every prefill process until it answers."""
        from tandemkv.transfer import wire

        frame = wire.encode(
            wire.Hello(offer=self.exchange.offer), source=self.exchange.engine_id, target=""
        )
        deadline = time.monotonic() + START_S
        for process in self.prefill:
            before = set(self.exchange.peers)
            while len(self.exchange.peers) == len(before):
                if self.exchange.refused:
                    raise ConfigError(
                        f"prefill worker: {next(iter(self.exchange.refused.values()))}"
                    )
                if not process.alive:
                    raise ConfigError("a prefill worker ended before it was ready")
                if time.monotonic() > deadline:
                    raise ConfigError(f"a prefill worker did not answer within {START_S:g} s")
                self._channel.send_to(process.address, frame)
                for data in self._channel.receive(GREET_EVERY_S):
                    self.exchange.hear(data)
            (process.engine_id,) = set(self.exchange.peers) - before


def run_prefill(options: WorkerOptions, ended: Callable[[], bool]) -> None:
    """A prefill worker's loop, until `ended`."""
    engine = Engine.from_config(options.engine)
    exchange, channel = exchange_of(
        engine, WorkerRole.PREFILL, options.address, draft_transfer=options.draft_transfer
    )
    then = time.monotonic()
    try:
        while not ended():
            busy = engine.has_work
            wait = 0.0 if busy else (BUSY_S if exchange.busy else IDLE_S)
            for frame in channel.receive(wait):
                exchange.hear(frame)
            now = time.monotonic()
            exchange.poll(now - then)
            then = now
            if engine.has_work:
                for output in engine.step():
                    exchange.note(output)
    finally:
        exchange.close()
        channel.close()


def main() -> None:
    """Entry of a prefill process: options as JSON on the first line of stdin; it ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    data = sys.stdin.buffer.readline()
    if not data:
        return
    options = msgspec.json.decode(data, type=WorkerOptions)
    parent = os.getppid()
    os.set_blocking(sys.stdin.fileno(), False)

    def ended() -> bool:
        try:
            closed = os.read(sys.stdin.fileno(), 1) == b""
        except BlockingIOError:
            closed = False
        return closed or os.getppid() != parent

    try:
        run_prefill(options, ended)
    except TandemError as error:
        print(f"tandemkv: prefill worker: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
