"""A decode worker with prefill processes of its own, which it starts and looks after.

Law: a prefill process that dies, or hangs for so long that nobody waits for it any more, costs no
request: what it had is computed here, the process is ended if it has not, and another takes its
place. This module decides nothing about what is fetched.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
from pathlib import Path

from tandemkv.base.errors import ConfigError
from tandemkv.engine.engine import Engine
from tandemkv.engine.fetching import Fetch
from tandemkv.engine.processes import Child, Places
from tandemkv.engine.worker import GREET_EVERY_S, Worker, WorkerOptions, new_engine_id
from tandemkv.sched.request import Request
from tandemkv.transfer.offer import WorkerRole
from tandemkv.transfer.session import Timing

log = logging.getLogger("tandemkv")

START_S = 300.0
HUNG_S = 30.0
"""A process that was silent for as long as a session is patient has so long again to say a word."""


class PrefillProcess(Child):
    """A prefill worker as a child of this process."""

    def __init__(self, engine: Engine, address: str, *, draft_transfer: bool = True) -> None:
        self.address, self.engine_id = address, new_engine_id(WorkerRole.PREFILL)
        self.silent_s: float | None = None
        super().__init__(
            "tandemkv.engine.worker",
            WorkerOptions(
                engine=engine.config,
                address=address,
                engine_id=self.engine_id,
                draft_transfer=draft_transfer,
            ),
        )


class Prefills:
    """Prefill processes of one configuration; outlive the decode workers that use them, in turn."""

    def __init__(
        self, engine: Engine, count: int, *, draft_transfer: bool = True, restart: bool = True
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tandemkv-")
        self.place = Path(self._directory.name)
        addresses = (f"ipc://{self.place}/prefill{n}" for n in itertools.count())

        def spawn(_: int) -> PrefillProcess:
            return PrefillProcess(engine, next(addresses), draft_transfer=draft_transfer)

        self.places = Places(count, spawn, restart=restart)

    @property
    def processes(self) -> list[PrefillProcess]:
        return self.places.children

    def close(self) -> None:
        """End them."""
        self.places.close()
        self._directory.cleanup()


class DecodeWorker(Worker):
    """A worker whose prompts are computed by prefill processes.

    num_prefill: processes to start with the same configuration, or those that are there already,
    which are not ended with it. restart: start another for one that has ended. Raises ConfigError
    if one does not come up at first.
    """

    def __init__(
        self,
        engine: Engine,
        num_prefill: int | Prefills,
        *,
        draft_transfer: bool = True,
        restart: bool = True,
        timing: Timing | None = None,
        hung_s: float = HUNG_S,
    ) -> None:
        self._own = isinstance(num_prefill, int)
        self._prefills = (
            Prefills(engine, num_prefill, draft_transfer=draft_transfer, restart=restart)
            if isinstance(num_prefill, int)
            else num_prefill
        )
        self._hung_s, self._next = hung_s, 0
        engine_id = new_engine_id(WorkerRole.DECODE)
        try:
            super().__init__(
                engine,
                WorkerRole.DECODE,
                f"ipc://{self._prefills.place}/{engine_id}",
                engine_id=engine_id,
                draft_transfer=draft_transfer,
                timing=timing,
            )
        except BaseException:
            self._end_prefills()
            raise
        try:
            self._await_peers()
        except BaseException:
            self.close()
            raise

    @property
    def prefill(self) -> list[PrefillProcess]:
        """The processes, those that have ended included."""
        return self._prefills.processes

    @property
    def idle_s(self) -> float:
        """How long it may be left alone while it has no work: less while a process is starting."""
        return 1.0 if self.num_prefill_workers == len(self.prefill) else GREET_EVERY_S

    @property
    def num_prefill_workers(self) -> int:
        """Prefill processes that are alive and would be given a prompt now."""
        return len(self._ready())

    def close(self) -> None:
        """End the prefill processes it started, give the memory back."""
        self._end_prefills()
        super().close()

    def _end_prefills(self) -> None:
        if self._own:
            self._prefills.close()

    def _ready(self) -> list[str]:
        known, silent = self.exchange.peers.known, self.exchange.fetching.silent
        names = [process.engine_id for process in self.prefill if process.alive]
        return [name for name in names if name in known and name not in silent]

    def _start(self, request: Request) -> None:
        """Fetch a request's prompt, or queue it here."""
        ready = self._ready()
        if ready:
            self._next += 1
            self.exchange.fetch(Fetch(request, ready[self._next % len(ready)]))
        else:
            self.exchange.fetching.compute_here(request, "no_prefill_worker")

    def _look(self, now: float) -> None:
        """Notice processes that have ended, kill those that hang, greet those that started."""
        for process, wait in self._prefills.places.look(now):
            restart = self._prefills.places.restart
            then = f"another starts in {wait:g} s" if restart else "going on without it"
            log.warning("prefill worker %s is gone; %s", process.engine_id, then)
            self.exchange.peer_dead(process.engine_id, "its process ended")
            self._channel.forget(process.engine_id)
        for process in self.prefill:
            if not process.alive:
                continue
            if process.engine_id not in self.exchange.peers.known:
                self.greet(process.address, process.engine_id)
            else:
                process.useful = True
            self._look_at_silence(process, now)
        super()._look(now)

    def _look_at_silence(self, process: PrefillProcess, now: float) -> None:
        if process.engine_id not in self.exchange.fetching.silent:
            process.silent_s = None
            return
        self.greet(process.address, process.engine_id)  # its answer ends the silence
        process.silent_s = process.silent_s or now
        if now - process.silent_s >= self._hung_s:
            log.warning("prefill worker %s hangs; it is killed", process.engine_id)
            process.kill()
            process.wait()

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
                self.greet(process.address, process.engine_id)
                for data in self._channel.receive(GREET_EVERY_S):
                    self.exchange.hear(data)
