"""Bytes between the pools of two processes, a GPU each where there are two, over NIXL.

The same rounds run over the CPU's memory where there is no GPU, so that they cannot rot.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tandemkv.transfer.transport import CPU, Batch, Disconnected, Done, Failed, Memory, Notified

pytest.importorskip("nixl_cu13", reason="NIXL is not installed")

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
PAGE = 2**16
NUM_PAGES = (48, 24)
PATIENCE_S = 30
ROUNDS: dict[str, list[Batch]] = {
    "whole pages, none beside another": [
        Batch(0, 0, [(2 * i * PAGE, (47 - 2 * i) * PAGE, PAGE) for i in range(20)]),
        Batch(1, 1, [(5 * PAGE, 9 * PAGE, PAGE)]),
    ],
    "neighbours, backwards": [Batch(0, 0, [(i * PAGE, i * PAGE, PAGE) for i in range(30, 3, -1)])],
    "parts of pages, between pools": [
        Batch(0, 1, [(100, 7, 3333), (PAGE - 1, PAGE, 2)]),
        Batch(1, 0, [(0, 48 * PAGE - 512, 512)]),
    ],
}


class End:
    """A process's pools and data plane. side: which of the GPUs, and which bytes to begin with."""

    def __init__(self, device: str, side: int) -> None:
        from tandemkv.transfer.nixl import Nixl

        index = side % max(1, torch.cuda.device_count())
        self.device = torch.device(device, index) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(self.device)
        self.pools = [
            _bytes(pages * PAGE, 10 * side + i).to(self.device) for i, pages in enumerate(NUM_PAGES)
        ]
        self.sync()
        self.plane = Nixl(f"end-{side}")
        self.blob = self.plane.register(
            [
                Memory(
                    address=pool.data_ptr(),
                    num_bytes=pool.numel(),
                    page_bytes=PAGE,
                    device=CPU if self.device.index is None else self.device.index,
                )
                for pool in self.pools
            ]
        )

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def content(self) -> list[torch.Tensor]:
        self.sync()
        return [pool.cpu() for pool in self.pools]

    def await_event(self, wanted: Callable[[Any], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            events = self.plane.poll()
            assert not [e for e in events if isinstance(e, Failed | Disconnected)]
            if any(wanted(event) for event in events):
                return
        raise TimeoutError("the transfer does not end")


def _bytes(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def _serve(pipe: Connection, device: str) -> None:
    """The process that is written to and read from: on each order it polls until it is told."""
    try:
        end = End(device, 1)
        pipe.send(end.blob)
        end.plane.connect(pipe.recv())
        pipe.send(end.plane.name)
        while True:
            notice = pipe.recv()
            if not notice:
                end.plane.close()
                return

            def told(event: Any, notice: bytes = notice) -> bool:
                return isinstance(event, Notified) and event.message == notice

            end.await_event(told)
            pipe.send([pool.numpy() for pool in end.content()])
    except Exception as error:
        pipe.send(error)


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(2 * PATIENCE_S), "the other process does not answer"
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.mark.parametrize("device", DEVICES)
def test_exactly_the_named_bytes_move_between_pools_of_two_processes(device: str) -> None:
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, device), daemon=True)
    process.start()
    theirs.close()
    try:
        end = End(device, 0)
        blob = _receive(pipe)
        pipe.send(end.blob)
        peer = end.plane.connect(blob)
        assert _receive(pipe) == peer
        here, there = end.content(), [_bytes(n * PAGE, 10 + i) for i, n in enumerate(NUM_PAGES)]
        for reading in (False, True):
            for name, batches in ROUNDS.items():
                notice = f"{name} {reading}".encode()
                source, target = (there, here) if reading else (here, there)
                for batch in batches:
                    for x, y, size in batch.regions:
                        target[batch.dst][y : y + size] = source[batch.src][x : x + size]
                pipe.send(notice)
                move = end.plane.read if reading else end.plane.write
                handle = move(peer, batches, notice)
                end.await_event(lambda event, handle=handle: event == Done(handle))
                found = [torch.from_numpy(pool) for pool in _receive(pipe)]
                for ours, wanted in zip([*end.content(), *found], [*here, *there], strict=True):
                    assert torch.equal(ours, wanted), notice
        pipe.send(b"")
        process.join(10)
        end.plane.close()
    finally:
        process.kill()
        process.join()
        pipe.close()
