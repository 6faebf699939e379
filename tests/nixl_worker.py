"""A process with a NIXL data plane and memory, driven through a pipe; it polls all the time."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tandemkv.transfer.transport import DataEvent, Memory

PATIENCE_S = 60


def pattern(size: int, seed: int) -> bytes:
    """Bytes that differ from one place, and one seed, to the next."""
    return random.Random(seed).randbytes(size)


class Worker:
    """The parent's end. call(...) runs a method of Nixl, or of _Server, in the process."""

    def __init__(self, name: str, pages: list[tuple[int, int]], seed: int) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name, pages, seed), daemon=True)
        self.process.start()
        theirs.close()
        self.events: list[DataEvent] = []
        self.name, self.blob = self.receive()

    def receive(self) -> Any:
        if not self.pipe.poll(PATIENCE_S):
            raise TimeoutError("the worker does not answer")
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, method: str, *args: Any) -> Any:
        self.pipe.send((method, args))
        return self.receive()

    def wait(self, wanted: Callable[[list[DataEvent]], bool]) -> list[DataEvent]:
        """Events so far, once they are as wanted. TimeoutError if they never are."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.events += self.call("news")
            if wanted(self.events):
                return self.events
            time.sleep(0.005)
        raise TimeoutError(f"events: {self.events}")

    def wait_for(self, *events: DataEvent) -> list[DataEvent]:
        return self.wait(lambda seen: all(event in seen for event in events))

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self.kill()
        self.pipe.close()


class _Server:
    def __init__(self, name: str, pages: list[tuple[int, int]], seed: int) -> None:
        from tandemkv.transfer.nixl import Nixl

        self.plane = Nixl(name)
        self.buffers = [
            bytearray(pattern(number * size, seed + i)) for i, (number, size) in enumerate(pages)
        ]
        memories = [
            Memory.of(buffer, size) for buffer, (_, size) in zip(self.buffers, pages, strict=True)
        ]
        self.blob = self.plane.register(memories)
        self.events: list[DataEvent] = []

    def news(self) -> list[DataEvent]:
        events, self.events = self.events, []
        return events

    def bytes_of(self, index: int) -> bytes:
        return bytes(self.buffers[index])

    def poll(self) -> None:
        if not self.plane.closed:
            self.events += self.plane.poll()
            self.plane.check()


def _serve(pipe: Connection, name: str, pages: list[tuple[int, int]], seed: int) -> None:
    server = _Server(name, pages, seed)
    pipe.send((server.plane.name, server.blob))
    while True:
        server.poll()
        if not pipe.poll(0.001):
            continue
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            owner = server if hasattr(server, method) else server.plane
            answer = getattr(owner, method)(*args)
        except Exception as error:
            answer = error
        pipe.send(answer)
