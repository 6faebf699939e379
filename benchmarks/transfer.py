"""The hand-off of a prompt's KV between two processes of one machine, beside one contiguous copy.

    python benchmarks/transfer.py [--tokens 2048] [--repeat 21] [--json FILE]

Two processes hold KV pools of the embedded model's shape, with EAGLE-3's draft layer as a group of
its own. The first writes all rows of a prompt, target and draft, into the second's pages through
NIXL, as the exchange does; timed from `write` until the second sees the notice. The limit is one
copy of as many bytes through shared memory, until the second sees a flag. They take turns in one
run; what counts is the ratio of the medians, and the goal 0.60. "fresh": pages in the order in
which an empty pool gives them; "scattered": in none, as in a pool that has been in use.
Each round moves new bytes and compares what arrived; one wrong byte ends the run.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing as mp
import random
import statistics
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from tandemkv.base.errors import InvariantError, PeerError, TandemError
from tandemkv.base.spans import SpanSet
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.lab.provenance import write_figures
from tandemkv.lab.script import count, lines, parser, run

GOAL = 0.60
PATIENCE_S = 60.0
WARM_UP = 3
ORDERS = ("fresh", "scattered")
FLAG_BYTES = 8
END = "end"

Tables = list[list[int]]
"""A page table for each group."""


def make_layout(block: int) -> Layout:
    """The embedded model and its EAGLE-3 drafter, as served by default on a CPU."""
    target = LayerGroup(
        name="target", domain=Domain.TARGET, layers=tuple(range(30)), num_kv_heads=3, head_dim=64,
        dtype="float32", page_size=block,
    )  # fmt: skip
    draft = LayerGroup(
        name="draft", domain=Domain.DRAFT, layers=(0,), num_kv_heads=3, head_dim=64,
        dtype="float32", page_size=block, lookahead=1, pointwise=True,
    )  # fmt: skip
    return Layout(block_size=block, groups=(target, draft))


def page_tables(layout: Layout, num_blocks: int, order: str, side: int) -> Tables:
    """Pages of a prompt in pools of twice its size."""
    tables: Tables = []
    for g in range(len(layout.groups)):
        pages = list(range(2 * num_blocks))
        if order == "scattered":
            random.Random(2 * g + side).shuffle(pages)
        tables.append(pages[:num_blocks])
    return tables


def bytes_of(tensor: Any) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).numpy()).cast("B")


class Side:
    """One worker's pools, offers and data plane. side: 0 writes, 1 is written to."""

    def __init__(self, side: int, block: int, num_blocks: int) -> None:
        import torch

        from tandemkv.runner.storage import Storage
        from tandemkv.transfer.nixl import Nixl
        from tandemkv.transfer.plan import wanted
        from tandemkv.transfer.shards import group_offers
        from tandemkv.transfer.transport import Memory

        torch.set_num_threads(1)
        self.layout = make_layout(block)
        sizes = [2 * num_blocks] * len(self.layout.groups)
        self.pools = Storage(self.layout, sizes, torch.device("cpu"), debug=False).pools
        self.offers = group_offers(self.layout, sizes)
        self.tables = {o: page_tables(self.layout, num_blocks, o, side) for o in ORDERS}
        n, ahead = num_blocks * block, self.layout.lookahead
        self.spans = [wanted(g, n, SpanSet(), ahead=ahead) for g in self.layout.groups]
        self.plane = Nixl(f"benchmark-{side}")
        self.blob = self.plane.register(
            [
                Memory(
                    address=pool.data.data_ptr(),
                    num_bytes=pool.data.nbytes,
                    page_bytes=pool.group.page_bytes,
                )
                for pool in self.pools
            ]
        )

    def digest(self, order: str) -> str:
        """Of the prompt's rows, in the order of its slots, whatever pages hold them."""
        found = sha256()
        for pool, spans, pages in zip(self.pools, self.spans, self.tables[order], strict=True):
            rows = pool.data[pages].transpose(0, 1).transpose(1, 2)  # [layers, 2, pages, slots]
            slots = rows.flatten(2, 3)
            for start, stop in spans:
                found.update(bytes_of(slots[:, :, start:stop]))
        return found.hexdigest()

    def refill(self, seed: int) -> None:
        """Other bytes in every row."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        for pool in self.pools:
            pool.data.view(torch.int32).random_(generator=generator)

    def await_event(self, wanted: Callable[[Any], bool]) -> float:
        """Poll until it is there; the time then."""
        from tandemkv.transfer.transport import Disconnected, Failed

        deadline = time.perf_counter() + PATIENCE_S
        while True:
            events = self.plane.poll()
            now = time.perf_counter()
            for event in events:
                if wanted(event):
                    return now
                if isinstance(event, Failed | Disconnected):
                    raise PeerError(f"the hand-off failed: {event}")
            if now > deadline:
                raise PeerError("the hand-off does not end")


# -- the process that is written to ----------------------------------------------------------------


def serve(pipe: Connection, block: int, num_blocks: int) -> None:
    """Answers each order with what it found; an error is the last answer."""
    try:
        _serve(pipe, block, num_blocks)
    except EOFError:
        return
    except Exception as error:
        pipe.send(PeerError(f"{type(error).__name__}: {error}"))


def _serve(pipe: Connection, block: int, num_blocks: int) -> None:
    here = Side(1, block, num_blocks)
    pipe.send(here.blob)
    here.plane.connect(pipe.recv())
    shared = SharedMemory(pipe.recv())
    try:
        _answer(pipe, here, memoryview(shared.buf or b""))
    finally:
        shared.close()


def _answer(pipe: Connection, here: Side, buffer: memoryview) -> None:
    from tandemkv.transfer.transport import Notified

    num_bytes = len(buffer) - FLAG_BYTES
    pipe.send("connected")
    with buffer[:num_bytes] as view, buffer[num_bytes:] as tail, tail.cast("Q") as flag:
        while True:
            order, number = pipe.recv()
            if order == END:
                return
            notice = number.to_bytes(FLAG_BYTES, "little")

            def noticed(event: Any, notice: bytes = notice) -> bool:
                return isinstance(event, Notified) and event.message == notice

            pipe.send("ready")
            if order == "copy":
                pipe.send(_await_flag(flag, number))
                pipe.send(sha256(view).hexdigest())
            else:
                pipe.send(here.await_event(noticed))
                pipe.send(here.digest(order))


def _await_flag(flag: memoryview, number: int) -> float:
    deadline = time.perf_counter() + PATIENCE_S
    while flag[0] != number:
        if time.perf_counter() > deadline:
            raise PeerError("the copy does not end")
    return time.perf_counter()


# -- the process that writes -----------------------------------------------------------------------


class Bench:
    def __init__(self, block: int, num_blocks: int) -> None:
        from tandemkv.transfer.plan import regions, routes

        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, block, num_blocks)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.here = here = Side(0, block, num_blocks)
        self.peer = here.plane.connect(self.receive())
        self.pipe.send(here.blob)
        there = {o: page_tables(here.layout, num_blocks, o, 1) for o in ORDERS}
        self.routes = [routes(offer, offer)[0] for offer in here.offers]
        self.plan = lambda order: [
            regions(*each)
            for each in zip(self.routes, here.spans, here.tables[order], there[order], strict=True)
        ]
        self.group_bytes = [sum(size for _, _, size in found) for found in self.plan("fresh")]
        self.num_bytes = sum(self.group_bytes)
        self.shared = SharedMemory(create=True, size=self.num_bytes + FLAG_BYTES)
        buffer = ctypes.c_char.from_buffer(memoryview(self.shared.buf or b""))
        self.target, self.number = ctypes.addressof(buffer), 0
        del buffer
        self.pipe.send(self.shared.name)
        self.receive()

    def receive(self) -> Any:
        if not self.pipe.poll(PATIENCE_S):
            raise PeerError("the second process does not answer")
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise PeerError("the second process is gone") from None
        if isinstance(answer, TandemError):
            raise answer
        return answer

    def round(self, name: str) -> dict[str, float]:
        """Move new bytes one way, and check them."""
        self.number += 1
        self.here.refill(self.number)
        self.pipe.send((name, self.number))
        self.receive()
        found, digest = self._copy() if name == "copy" else self._hand_over(name)
        if self.receive() != digest:
            raise InvariantError(f"{name}: other bytes arrived than were sent")
        return found

    def _copy(self) -> tuple[dict[str, float], str]:
        """From the start of the largest pool: it holds twice the prompt."""
        source = self.here.pools[0].data
        start = time.perf_counter()
        ctypes.memmove(self.target, source.data_ptr(), self.num_bytes)
        ctypes.c_uint64.from_address(self.target + self.num_bytes).value = self.number
        seen = self.receive()
        sent = bytes_of(source)[: self.num_bytes]
        return {"copy": seen - start}, sha256(sent).hexdigest()

    def _hand_over(self, order: str) -> tuple[dict[str, float], str]:
        from tandemkv.transfer.transport import Batch, Done

        here, notice = self.here, self.number.to_bytes(FLAG_BYTES, "little")
        planned = time.perf_counter()
        batches = [Batch(g, g, found) for g, found in enumerate(self.plan(order))]
        start = time.perf_counter()
        handle = here.plane.write(self.peer, batches, notice)
        back = time.perf_counter()
        here.await_event(lambda event: isinstance(event, Done) and event.handle == handle)
        seen = self.receive()
        times = {order: seen - start, f"{order}_call": back - start}
        return {**times, f"{order}_plan": start - planned}, here.digest(order)

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send((END, 0))
        self.process.join(timeout=5)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.here.plane.close()
        self.shared.close()
        self.shared.unlink()


def measure(tokens: int, block: int, repeat: int) -> dict[str, float]:
    bench = Bench(block, -(-tokens // block))
    names = [*ORDERS, "copy"]
    times: dict[str, list[float]] = {}
    try:
        for i in range(repeat + WARM_UP):
            shift = i % len(names)
            for name in names[shift:] + names[:shift]:
                for key, value in bench.round(name).items():
                    times.setdefault(key, [])
                    if i >= WARM_UP:
                        times[key].append(value)
        found = {name: statistics.median(values) for name, values in times.items()}
        num_regions = {o: sum(map(len, bench.plan(o))) for o in ORDERS}
        figures: dict[str, float] = {
            "tokens": tokens,
            "bytes": bench.num_bytes,
            "draft_share_of_bytes": bench.group_bytes[1] / bench.num_bytes,
            "copy_ms": 1e3 * found["copy"],
            "copy_gb_per_s": bench.num_bytes / found["copy"] / 1e9,
        }
        for order in ORDERS:
            figures[f"{order}_regions"] = num_regions[order]
            figures[f"{order}_plan_ms"] = 1e3 * found[f"{order}_plan"]
            figures[f"{order}_write_call_ms"] = 1e3 * found[f"{order}_call"]
            figures[f"{order}_handoff_ms"] = 1e3 * found[order]
            figures[f"{order}_share_of_one_contiguous_copy"] = found["copy"] / found[order]
        return figures
    finally:
        bench.close()


def main(args: argparse.Namespace) -> None:
    figures = measure(args.tokens, args.block, args.repeat)
    for name, line in zip(figures, lines(figures), strict=True):
        goal = ""
        if name.endswith("_share_of_one_contiguous_copy"):
            goal = f"  {'reaches' if figures[name] >= GOAL else 'misses'} the goal of {GOAL:.2f}"
        print(line + goal)
    if args.json:
        write_figures(args.json, {**figures, "goal": GOAL})


def options() -> argparse.ArgumentParser:
    found = parser(__doc__)
    add = found.add_argument
    add("--tokens", type=count, default=2048, help="tokens of the prompt (default: %(default)s)")
    add("--block", type=count, default=16, help="tokens per block (default: %(default)s)")
    add("--repeat", type=count, default=21, help="rounds of each (default: %(default)s)")
    return found


if __name__ == "__main__":
    sys.exit(run(main, options()))
