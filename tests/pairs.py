"""Two workers in one process, sessions and frames and a loopback data plane between them.

The control channel is a queue that can lose, repeat and reorder frames. Engines are tiny and debug
mode is on: free pages hold NaN, every law is checked after every step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import msgspec
from engines import drafts_by_anchor, greedy, run, tiny_engine, used_pages

from tandemkv.base.sampling import SamplingParams
from tandemkv.engine.engine import Engine, completion_of
from tandemkv.engine.exchange import Exchange
from tandemkv.engine.fetching import Fetch
from tandemkv.transfer.loopback import Faults, Loopback, Network
from tandemkv.transfer.offer import WorkerRole
from tandemkv.transfer.transport import Transport

DRAFTERS = ("eagle3", "dflash", "dspark", "self", "ngram", "none")


class Pair:
    """A prefill and a decode worker."""

    def __init__(
        self,
        drafter: str = "eagle3",
        *,
        prefill: Engine | None = None,
        decode: Engine | None = None,
        loss: float = 0.0,
        seed: int = 0,
        prefill_transfer: bool = True,
        faults: Faults | None = None,
        transport: Callable[[str], Transport] | None = None,
    ) -> None:
        self.random, self.loss = random.Random(seed), loss
        self.network = Network()
        self.frames: dict[str, deque[bytes]] = {"p": deque(), "d": deque()}
        engines = {
            "p": prefill or tiny_engine(drafter, max_batch_tokens=9),
            "d": decode or tiny_engine(drafter, draft_page_size=2),
        }
        self.workers = {
            name: Exchange(
                engine,
                transport(name) if transport else Loopback(self.network, name, faults),
                name,
                WorkerRole.PREFILL if name == "p" else WorkerRole.DECODE,
                self.send,
                draft_transfer=prefill_transfer or name == "d",
            )
            for name, engine in engines.items()
        }
        self.requests: dict[str, object] = {}
        self.down: set[str] = set()
        self.workers["d"].greet("p")

    def send(self, peer: str, frame: bytes) -> None:
        if self.random.random() < self.loss:
            return
        copies = 2 if self.random.random() < self.loss else 1
        for _ in range(copies):
            if self.random.random() < self.loss:
                self.frames[peer].appendleft(frame)
            else:
                self.frames[peer].append(frame)

    def turn(self, elapsed_s: float = 0.3) -> None:
        for name, worker in self.workers.items():
            if name in self.down:
                continue
            while self.frames[name]:
                worker.hear(self.frames[name].popleft())
            worker.poll(elapsed_s)
            worker.check()
            if worker.engine.has_work:
                for output in worker.engine.step():
                    worker.note(output)

    def settle(self, turns: int = 600) -> None:
        """Run until nothing is under way on either side."""
        for _ in range(turns):
            self.turn()
            idle = all(
                not w.busy and not w.engine.has_work
                for n, w in self.workers.items()
                if n not in self.down
            )
            if idle and not any(self.frames[n] for n in self.workers if n not in self.down):
                break
        else:
            raise AssertionError("still busy")
        for name, worker in self.workers.items():
            if name not in self.down:
                worker.engine.check()
                held = used_pages(worker.engine)
                assert held == [0] * len(worker.engine.layout.groups), name

    def fetch(self, tokens: list[int], params: SamplingParams, name: str, seed: int = 3) -> None:
        worker = self.workers["d"]
        params = msgspec.structs.replace(params, seed=seed)
        request = self.requests[name] = worker.engine.request_of(tokens, params, request_id=name)
        worker.fetch(Fetch(request, "p"))


def assert_as_on_one_worker(pair: Pair, name: str, tokens: list[int], drafter: str) -> None:
    request = pair.requests[name]
    cold = run(tiny_engine(drafter), [tokens], greedy())[0]
    assert request.output == cold.tokens
    assert drafts_by_anchor(completion_of(request)) == drafts_by_anchor(cold)
