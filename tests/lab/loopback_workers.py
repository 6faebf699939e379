"""Prefill workers in this process: tiny engines, sessions and frames, a loopback data plane.

Stands in for lab.disaggregated.workers, whose processes load models of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engines import used_pages
from labs import make_engine

from tandemkv.base.config import EngineConfig
from tandemkv.base.sampling import SamplingParams
from tandemkv.engine.engine import Engine
from tandemkv.engine.exchange import Exchange, HandoffStats
from tandemkv.engine.fetching import Fetch
from tandemkv.kv.keys import Namespace
from tandemkv.lab import disaggregated
from tandemkv.sched.batch import Output
from tandemkv.sched.request import FinishReason, Request
from tandemkv.transfer.loopback import Loopback, Network
from tandemkv.transfer.offer import WorkerRole

TURN_S = 0.01


def twin(engine: Engine) -> Engine:
    """Another tiny engine with the same target, drafter and K."""
    method = engine.drafter.spec.method if engine.drafter else "none"
    return make_engine(EngineConfig(drafter=method, num_draft_tokens=engine.plan.num_draft_tokens))


class LoopbackWorker:
    """A decode worker on this engine; its prefill workers turn when it does."""

    def __init__(self, engine: Engine, num_prefill: int, *, draft_transfer: bool) -> None:
        self._engine, self._next = engine, 0
        self._network = Network()
        self._frames: dict[str, deque[bytes]] = {"decode": deque()}
        self.exchange = self._exchange(engine, "decode", WorkerRole.DECODE, draft_transfer)
        self.prefill: list[Exchange] = []
        for i in range(num_prefill):
            name = f"prefill{i}"
            self._frames[name] = deque()
            self.prefill.append(
                self._exchange(twin(engine), name, WorkerRole.PREFILL, draft_transfer)
            )
            self.exchange.greet(name)
        while len(self.exchange.peers.known) < num_prefill:
            assert not self.exchange.peers.refused, self.exchange.peers.refused
            self._turn()

    def _exchange(self, engine: Engine, name: str, role: WorkerRole, transfer: bool) -> Exchange:
        data_plane = Loopback(self._network, name)
        return Exchange(engine, data_plane, name, role, self._send, draft_transfer=transfer)

    def _send(self, peer: str, frame: bytes) -> None:
        self._frames[peer].append(frame)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(
        self, prompt: Sequence[int], params: SamplingParams, *, namespace: Namespace = Namespace()
    ) -> Request:
        request = self._engine.request_of(prompt, params, namespace=namespace)
        if self.prefill:
            self._next += 1
            peer = self.prefill[self._next % len(self.prefill)].engine_id
            self.exchange.fetch(Fetch(request, peer))
        else:
            self.exchange.fetching.compute_here(request, "no_prefill_worker")
        return request

    def lose_prefill_workers(self) -> None:
        """All of them end, and the decode worker knows."""
        for worker in self.prefill:
            self._network.kill(worker.engine_id)
            self.exchange.peer_dead(worker.engine_id, "it ended")
        self.prefill = []

    @property
    def handoffs(self) -> HandoffStats:
        return self.exchange.stats

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or self.exchange.busy

    def step(self) -> list[Output]:
        self._turn()
        outputs = self._engine.step() if self._engine.has_work else []
        return [output for output in outputs if self.exchange.note(output) is not None]

    def abort(self, request_id: str) -> Output | None:
        if self.exchange.abort(request_id):
            return Output(request_id=request_id, finished=True, finish_reason=FinishReason.ABORT)
        return self._engine.abort(request_id)

    def settle(self, turns: int = 2000) -> None:
        """Turn until no prefill worker has anything under way, and look at every law."""
        for _ in range(turns):
            if not any(w.busy or w.engine.has_work for w in (self.exchange, *self.prefill)):
                break
            self._turn()
        else:
            raise AssertionError("still busy")
        for worker in (self.exchange, *self.prefill):
            worker.engine.check()
            worker.check()
            assert not any(used_pages(worker.engine)), worker.engine_id

    def _turn(self) -> None:
        for worker in (self.exchange, *self.prefill):
            frames = self._frames[worker.engine_id]
            while frames:
                worker.hear(frames.popleft())
            worker.poll(TURN_S)
        for worker in self.prefill:
            if worker.engine.has_work:
                for output in worker.engine.step():
                    worker.note(output)


@contextmanager
def workers(engine: Engine, num_prefill: int) -> Iterator[disaggregated.Decode]:
    @contextmanager
    def decode(*, draft_transfer: bool) -> Iterator[LoopbackWorker]:
        worker = LoopbackWorker(engine, num_prefill, draft_transfer=draft_transfer)
        try:
            yield worker
            worker.settle()
        finally:
            for exchange in (worker.exchange, *worker.prefill):
                exchange.close()

    yield decode
