"""A worker: an engine that exchanges KV with others, in a process of its own.

    step   frames, data plane, sessions, then a step of the engine
    add    computed here; or fetched from another worker; or computed and held for another one

Law: a request ends once, whatever happens to the other worker. A worker that was asked and whose
address refuses connections, or belongs to another process now, is gone: everything with it ends. No
rule of its own: sessions and cache decide. One thread owns all of it.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError, TandemError
from tandemkv.base.sampling import SamplingParams
from tandemkv.base.transfer_params import KVTransferParams
from tandemkv.engine.channel import Channel, host_and_port, tcp
from tandemkv.engine.engine import Engine
from tandemkv.engine.exchange import Exchange, HandoffStats
from tandemkv.engine.fetching import Fetch
from tandemkv.engine.processes import options_of
from tandemkv.kv.keys import Namespace
from tandemkv.sched.batch import Output
from tandemkv.sched.request import FinishReason, Request
from tandemkv.sched.stats import Load
from tandemkv.transfer import wire
from tandemkv.transfer.offer import WorkerRole
from tandemkv.transfer.session import Timing

log = logging.getLogger("tandemkv")

IDLE_S = 0.05
BUSY_S = 0.001
GREET_EVERY_S = 0.2


class WorkerOptions(msgspec.Struct, kw_only=True):
    """A prefill process without HTTP: its engine, where it listens, what it is called."""

    engine: EngineConfig
    address: str
    engine_id: str
    draft_transfer: bool = True


def new_engine_id(role: str) -> str:
    """New with each incarnation of a worker."""
    return f"{role}-{uuid.uuid4().hex[:12]}"


class Worker:
    """Stands in for an Engine. address: of its control channel, ipc:// or tcp://.

    draft_transfer False: the drafter's rows are neither sent nor taken. secret: frames are signed
    with it, and others dropped. Raises ConfigError where NIXL is not installed, or the address
    cannot be bound.
    """

    def __init__(
        self,
        engine: Engine,
        role: WorkerRole,
        address: str,
        *,
        engine_id: str | None = None,
        draft_transfer: bool = True,
        secret: bytes | None = None,
        timing: Timing | None = None,
    ) -> None:
        from tandemkv.transfer.nixl import Nixl

        if secret is not None:
            wire.check_secret(secret)
        self._engine, self.role = engine, role
        self.engine_id = engine_id or new_engine_id(role)
        self._then = self._looked = time.monotonic()
        self._channel = Channel(address, self.engine_id)
        try:
            transport = Nixl(self.engine_id)
        except ConfigError:
            self._channel.close()
            raise
        self.exchange = Exchange(
            engine,
            transport,
            self.engine_id,
            role,
            self._channel.send,
            draft_transfer=draft_transfer,
            secret=secret,
            timing=timing,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def address(self) -> str:
        """Of the control channel, as bound."""
        return self._channel.address

    @property
    def worker_info(self) -> dict[str, Any]:
        """Who it is to a router; control: host and port of its control channel, if it has one."""
        control = None
        if self.address.startswith("tcp://"):
            host, port = host_and_port(self.address)
            control = {"host": host, "port": port}
        return {"role": str(self.role), "engine_id": self.engine_id, "control": control}

    @property
    def load(self) -> Load:
        """How busy it is; requests on their way here wait."""
        load = self._engine.load
        under_way = self.exchange.fetching.num_under_way
        return msgspec.structs.replace(load, waiting=load.waiting + under_way)

    @property
    def handoffs(self) -> HandoffStats:
        """What became of the prompts given to prefill workers."""
        return self.exchange.stats

    @property
    def num_prefill_workers(self) -> int:
        """Prefill workers that it has met and that are not silent."""
        known, silent = self.exchange.peers.known, self.exchange.fetching.silent
        return sum(
            peer.offer.role == WorkerRole.PREFILL and name not in silent
            for name, peer in known.items()
        )

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        namespace: Namespace = Namespace(),
        request_id: str | None = None,
        priority: int = 0,
        watch: Callable[[Sequence[int]], int | None] | None = None,
        transfer: KVTransferParams | None = None,
    ) -> Request:
        """Queue a request as `transfer` says. Raises RequestError as Engine.add does."""
        request = self._engine.request_of(
            prompt,
            params,
            namespace=namespace,
            request_id=request_id,
            priority=priority,
            watch=watch,
        )
        if transfer is None:
            self._start(request)
        elif transfer.do_remote_decode:
            self.exchange.park(request)
        else:
            self._fetch(request, transfer)
        return request

    def step(self) -> list[Output]:
        """One turn, and a step of the engine if it has work."""
        self.turn(0.0 if self._engine.has_work else BUSY_S)
        if not self._engine.has_work:
            return []
        noted = (self.exchange.note(output) for output in self._engine.step())
        return [self._told(output) for output in noted if output is not None]

    def turn(self, wait_s: float) -> None:
        """Frames, waiting so long for the first; data plane, sessions, other workers' ends."""
        for frame in self._channel.receive(wait_s):
            self.exchange.hear(frame)
        for peer in self._channel.replaced:
            self._gone(peer, "another process has its address")
        self._channel.replaced.clear()
        now = time.monotonic()
        elapsed, self._then = now - self._then, now
        self.exchange.poll(elapsed)
        if now - self._looked >= GREET_EVERY_S:
            self._looked = now
            self._look(now)

    def wait(self, fd: int, wait_s: float) -> None:
        """When idle: until a frame comes, or the file descriptor has something, or so long."""
        self._channel.wait(fd, min(wait_s, self.idle_s))
        self.turn(0.0)

    @property
    def idle_s(self) -> float:
        """How long it may be left alone while it has no work."""
        return 1.0

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or self.exchange.busy

    def abort(self, request_id: str) -> Output | None:
        """End a request, also one that is still being fetched."""
        if self.exchange.abort(request_id):
            return Output(request_id=request_id, finished=True, finish_reason=FinishReason.ABORT)
        return self._engine.abort(request_id)

    def check(self) -> None:
        """Every law of engine and sessions."""
        self._engine.check()
        self.exchange.check()

    def close(self) -> None:
        """Give memory and address back."""
        self.exchange.close()
        self._channel.close()

    def greet(self, address: str, engine_id: str) -> None:
        """Say hello to a worker that was not heard before; its answer makes it a peer."""
        peers = self.exchange.peers
        self._channel.send_to(address, peers.frame(wire.Hello(offer=peers.offer), engine_id))

    # -- what may be otherwise -----------------------------------------------------------------

    def _start(self, request: Request) -> None:
        """Queue a request that says nothing of another worker; a decode worker counts it."""
        if self.role is WorkerRole.DECODE:
            self.exchange.fetching.compute_here(request, "not_asked")
        else:
            self._engine.submit(request)

    def _told(self, output: Output) -> Output:
        """With our address, where the rows of a prompt are held here."""
        if output.transfer is None:
            return output
        control = self.worker_info["control"] or {"host": self.address, "port": None}
        there = msgspec.structs.replace(
            output.transfer, remote_host=control["host"], remote_port=control["port"]
        )
        return msgspec.structs.replace(output, transfer=there)

    def _fetch(self, request: Request, transfer: KVTransferParams) -> None:
        """From the worker named, or from the process that has its address now."""
        address = tcp(transfer.remote_host or "", transfer.remote_port or 0)
        peer, parked = transfer.remote_engine_id or "", transfer.remote_request_id or ""
        now_there = self._channel.engine_at(address)
        if now_there is not None and now_there != peer:
            peer, parked = now_there, ""
        if peer not in self.exchange.peers.known:
            self.greet(address, peer)
        self.exchange.fetch(Fetch(request, peer, parked, address))

    def _look(self, now: float) -> None:
        """Greet who has not answered; notice who is gone."""
        for fetch in self.exchange.fetching.unknown:
            there = self._channel.engine_at(fetch.address)
            if there is not None and there != fetch.peer:
                fetch.peer, fetch.parked = there, ""
            self.greet(fetch.address, fetch.peer)
            if self._channel.refused(fetch.address):
                self.exchange.fetching.give_up_waiting(fetch.peer, "peer_dead")
        for peer in self.exchange.waits_for:
            address = self._channel.address_of(peer)
            if address is not None and self._channel.refused(address):
                self._gone(peer, "nobody listens at its address")

    def _gone(self, peer: str, why: str) -> None:
        log.warning("worker %s is gone: %s", peer, why)
        self.exchange.peer_dead(peer, why)
        self._channel.forget(peer)


def run_prefill(options: WorkerOptions, ended: Callable[[], bool]) -> None:
    """A prefill worker's loop, until `ended`."""
    engine = Engine.from_config(options.engine)
    worker = Worker(
        engine,
        WorkerRole.PREFILL,
        options.address,
        engine_id=options.engine_id,
        draft_transfer=options.draft_transfer,
    )
    with contextlib.closing(worker):
        while not ended():
            if worker.has_work:
                worker.step()
            else:
                worker.turn(IDLE_S)


def main() -> None:
    """Entry of a prefill process, for whoever started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    told = options_of(WorkerOptions)
    if told is None:
        return
    try:
        run_prefill(*told)
    except TandemError as error:
        print(f"tandemkv: prefill worker: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
