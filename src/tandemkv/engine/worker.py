"""Workers: an engine that hands prompts over, as a process of its own or inside a server.

    prefill   a process that computes prompts for others and ships rows, chunk by chunk
    decode    looks like an engine; what is added to it is fetched from a prefill worker, and
              computed here when there is none, or when one fails

Law: a request ends once, whatever happens to the other worker. The decode worker notices that a
prefill process is gone by its exit, goes on without it, says so, and starts another. No rule of its
own: sessions and cache decide. One thread owns all of it.
"""

from __future__ import annotations

import contextlib
import itertools
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
from tandemkv.engine.exchange import Exchange, HandoffStats
from tandemkv.engine.fetching import Fetch
from tandemkv.kv.keys import Namespace
from tandemkv.sched.batch import Output
from tandemkv.sched.request import FinishReason, Request
from tandemkv.transfer import wire
from tandemkv.transfer.offer import WorkerRole

log = logging.getLogger("tandemkv")

IDLE_S = 0.05
BUSY_S = 0.001
GREET_EVERY_S = 0.2
START_S = 300.0
RESTART_S, MAX_RESTART_S = 0.5, 60.0
"""Wait before a prefill process is started again; doubled each time one ends before it greets."""


class WorkerOptions(msgspec.Struct, kw_only=True):
    """A prefill process: its engine, where it listens, who it belongs to."""

    engine: EngineConfig
    address: str
    engine_id: str
    draft_transfer: bool = True


def new_engine_id(role: str) -> str:
    """New with each incarnation of a worker."""
    return f"{role}-{uuid.uuid4().hex[:12]}"


def exchange_of(
    engine: Engine, role: WorkerRole, address: str, engine_id: str, *, draft_transfer: bool = True
) -> tuple[Exchange, Channel]:
    """An engine's hand-offs over NIXL and ZeroMQ. ConfigError where NIXL is not installed."""
    from tandemkv.transfer.nixl import Nixl

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
        self.address, self.engine_id = address, new_engine_id(WorkerRole.PREFILL)
        self.ended = False
        """Whether its end has been noticed."""
        options = WorkerOptions(
            engine=config,
            address=address,
            engine_id=self.engine_id,
            draft_transfer=draft_transfer,
        )
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

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()

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

    num_prefill: processes to start with the same configuration. restart: start another for one that
    has ended. Raises ConfigError if one does not come up at first.
    """

    def __init__(
        self, engine: Engine, num_prefill: int, *, draft_transfer: bool = True, restart: bool = True
    ) -> None:
        self._engine = engine
        self._draft_transfer, self._restart = draft_transfer, restart
        self._directory = tempfile.TemporaryDirectory(prefix="tandemkv-")
        place = Path(self._directory.name)
        self._addresses = (f"ipc://{place}/prefill{n}" for n in itertools.count())
        self.prefill = [self._spawn() for _ in range(num_prefill)]
        self._then = self._greeted = time.monotonic()
        self._due = [0.0] * num_prefill
        self._failures = [0] * num_prefill
        self._ended: list[Output] = []
        self._next = 0
        try:
            self.exchange, self._channel = exchange_of(
                engine,
                WorkerRole.DECODE,
                f"ipc://{place}/decode",
                new_engine_id(WorkerRole.DECODE),
                draft_transfer=draft_transfer,
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
        peers = [p.engine_id for p in self.prefill if p.engine_id in self.exchange.peers.known]
        if peers:
            self._next += 1
            self.exchange.fetch(Fetch(request, peers[self._next % len(peers)]))
        else:
            self.exchange.fetching.compute_here(request, "no_prefill_worker")
        return request

    @property
    def idle_s(self) -> float:
        """How long it may be left alone while it has no work: less while a process is starting."""
        return 1.0 if self.num_prefill_workers == len(self.prefill) else GREET_EVERY_S

    @property
    def handoffs(self) -> HandoffStats:
        """What became of the prompts given to prefill workers."""
        return self.exchange.stats

    @property
    def num_prefill_workers(self) -> int:
        """Prefill processes that are alive and would be given a prompt now."""
        peers = self.exchange.peers.known
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
        self._look_after(now)

    def _spawn(self) -> PrefillProcess:
        return PrefillProcess(
            self._engine.config, next(self._addresses), draft_transfer=self._draft_transfer
        )

    def _look_after(self, now: float) -> None:
        """Notice prefill processes that have ended, start others, and greet those."""
        greet = now - self._greeted >= GREET_EVERY_S
        for i, process in enumerate(self.prefill):
            if process.alive:
                if greet and process.engine_id not in self.exchange.peers.known:
                    self._greet(process)
                continue
            if not process.ended:
                process.ended = True
                self._note_end(i, process, now)
            if self._restart and now >= self._due[i]:
                self.prefill[i] = self._spawn()
                self._greet(self.prefill[i])
        if greet:
            self._greeted = now

    def _note_end(self, i: int, process: PrefillProcess, now: float) -> None:
        known = process.engine_id in self.exchange.peers.known
        self._failures[i] = 0 if known else self._failures[i] + 1
        wait = min(MAX_RESTART_S, RESTART_S * 2 ** self._failures[i])
        self._due[i] = now + wait
        then = f"another starts in {wait:g} s" if self._restart else "going on without it"
        log.warning("prefill worker %s is gone; %s", process.engine_id, then)
        self.exchange.peer_dead(process.engine_id, "its process ended")
        process.close()

    def _greet(self, process: PrefillProcess) -> None:
        peers = self.exchange.peers
        frame = peers.frame(wire.Hello(offer=peers.offer), process.engine_id)
        self._channel.send_to(process.address, frame)

    def _await_peers(self) -> None:
        """Greet every prefill process until it answers."""
        deadline = time.monotonic() + START_S
        for process in self.prefill:
            while process.engine_id not in self.exchange.peers.known:
                if self.exchange.peers.refused:
                    raise ConfigError(
                        f"prefill worker: {next(iter(self.exchange.peers.refused.values()))}"
                    )
                if not process.alive:
                    raise ConfigError("a prefill worker ended before it was ready")
                if time.monotonic() > deadline:
                    raise ConfigError(f"a prefill worker did not answer within {START_S:g} s")
                self._greet(process)
                for data in self._channel.receive(GREET_EVERY_S):
                    self.exchange.hear(data)


def run_prefill(options: WorkerOptions, ended: Callable[[], bool]) -> None:
    """A prefill worker's loop, until `ended`."""
    engine = Engine.from_config(options.engine)
    exchange, channel = exchange_of(
        engine,
        WorkerRole.PREFILL,
        options.address,
        options.engine_id,
        draft_transfer=options.draft_transfer,
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
