"""The hand-off of a long prompt's KV from GPU to GPU, beside one plain copy of as many bytes.

    python benchmarks/transfer_gpu.py [--tokens 8192] [--repeat 15] [--json FILE]

Two processes, a GPU each (or the same one, where there is one), hold KV pools of an 8B model's
shape: a target of 32 layers, 8 KV heads of 128, bf16, in pages of 128 slots, and a drafter of one
such layer in pages of 32. The first writes all rows of a prompt into the second's pages through
NIXL, planned as the exchange plans it, from the call until the second sees the notice. The limit is
one copy of as many bytes between the two GPUs by the driver, in the same run; the goal 200 GB/s.
"fresh": pages in the order in which an empty pool gives them, neighbours merged; "scattered": in
none; "recut": the second's target pages are half as large. What arrived is compared with what was
sent in the first rounds and the last.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import random
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tandemkv.base.errors import ConfigError, InvariantError, PeerError, TandemError
from tandemkv.base.spans import SpanSet
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.lab.provenance import write_figures
from tandemkv.lab.script import count, lines, parser, run

GOAL_GB_PER_S = 200.0
PATIENCE_S = 60.0
WARM_UP = 2
BLOCK = 128
PAGES = {"fresh": (128, 32), "scattered": (128, 32), "recut": (64, 32)}
"""Page sizes of the second side, target and draft."""
NOTICE_BYTES = 8
END = "end"
MODULUS = 2_147_483_629


def make_layout(layers: int, pages: tuple[int, int]) -> Layout:
    """An 8B model's target, or as many layers as asked for, and a drafter of one layer."""
    shape: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    target = LayerGroup(
        name="target", domain=Domain.TARGET, layers=tuple(range(layers)), page_size=pages[0],
        **shape,
    )  # fmt: skip
    draft = LayerGroup(
        name="draft", domain=Domain.DRAFT, layers=(0,), page_size=pages[1], lookahead=1,
        pointwise=True, **shape,
    )  # fmt: skip
    return Layout(block_size=BLOCK, groups=(target, draft))


class Side:
    """One worker's pools and data plane. side: 0 writes, 1 is written to."""

    def __init__(self, side: int, device: str, layers: int, tokens: int, order: str) -> None:
        import torch

        from tandemkv.runner.storage import Storage
        from tandemkv.transfer.nixl import Nixl
        from tandemkv.transfer.shards import group_offers
        from tandemkv.transfer.transport import CPU, Memory

        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.layout = make_layout(layers, PAGES[order] if side else PAGES["fresh"])
        sizes = [-(-tokens // g.page_size) for g in self.layout.groups]
        self.pools = Storage(self.layout, sizes, self.device, debug=False).pools
        self.offers = group_offers(self.layout, sizes)
        self.tables = page_tables(sizes, order, side)
        self.tokens = tokens
        self.plane = Nixl(f"benchmark-{side}-{order}")
        index = self.device.index if self.device.type == "cuda" else CPU
        self.blob = self.plane.register(
            [
                Memory(
                    address=pool.data.data_ptr(),
                    num_bytes=pool.data.nbytes,
                    page_bytes=pool.group.page_bytes,
                    device=index or 0 if index != CPU else CPU,
                )
                for pool in self.pools
            ]
        )

    def sync(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fill(self, seed: int | None) -> None:
        """Other bytes in every row; None: zero."""
        import torch

        for pool in self.pools:
            words = pool.data.view(torch.int16)
            if seed is None:
                words.zero_()
            else:
                generator = torch.Generator(self.device).manual_seed(seed)
                words.random_(generator=generator)
        self.sync()

    def checksum(self) -> int:
        """Of the prompt's rows in the order of their slots, whatever pages hold them."""
        import torch

        total = 0
        for g, (pool, pages) in enumerate(zip(self.pools, self.tables, strict=True)):
            first = self.layout.groups[g].lookahead
            for layer in range(pool.data.shape[1]):
                rows = pool.data[pages, layer].transpose(0, 1).flatten(1, 2)  # [2, slots, ...]
                words = rows[:, first : self.tokens].contiguous().view(-1).view(torch.int16)
                weights = torch.arange(words.numel(), device=self.device) % 8191 + 1
                total = (total * 31 + int((words.long() * weights).sum())) % MODULUS
        return total

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


def page_tables(sizes: list[int], order: str, side: int) -> list[list[int]]:
    """Pages of a prompt that fills the pools."""
    tables: list[list[int]] = []
    for g, size in enumerate(sizes):
        pages = list(range(size))
        if order == "scattered":
            random.Random(2 * g + side).shuffle(pages)
        tables.append(pages)
    return tables


# -- the process that is written to ----------------------------------------------------------------


def serve(pipe: Connection, device: str, layers: int, tokens: int, order: str) -> None:
    """Answers each round with the time of its notice; an error is the last answer."""
    try:
        here = Side(1, device, layers, tokens, order)
        pipe.send((here.blob, here.offers, here.tables))
        here.plane.connect(pipe.recv())
        here.fill(None)
        pipe.send("connected")
        _answer(pipe, here)
        here.plane.close()
    except EOFError:
        return
    except Exception as error:
        pipe.send(PeerError(f"{type(error).__name__}: {error}"))


def _answer(pipe: Connection, here: Side) -> None:
    from tandemkv.transfer.transport import Notified

    while True:
        number, check = pipe.recv()
        if number == END:
            return
        notice = number.to_bytes(NOTICE_BYTES, "little")

        def noticed(event: Any, notice: bytes = notice) -> bool:
            return isinstance(event, Notified) and event.message == notice

        pipe.send("ready")
        pipe.send(here.await_event(noticed))
        if check:
            pipe.send(here.checksum())


# -- the process that writes -----------------------------------------------------------------------


class Bench:
    def __init__(self, devices: tuple[str, str], layers: int, tokens: int, order: str) -> None:
        from tandemkv.transfer.plan import regions, routes, wanted

        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, devices[1], layers, tokens, order)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.here = here = Side(0, devices[0], layers, tokens, order)
        blob, offers, tables = self.receive()
        self.peer = here.plane.connect(blob)
        self.pipe.send(here.blob)
        self.receive()
        ahead = here.layout.lookahead
        spans = [wanted(g, tokens, SpanSet(), ahead=ahead) for g in here.layout.groups]
        ways = [routes(a, b)[0] for a, b in zip(here.offers, offers, strict=True)]
        self.plan = lambda: [
            regions(*each) for each in zip(ways, spans, here.tables, tables, strict=True)
        ]
        found = self.plan()
        self.group_bytes = [sum(size for _, _, size in part) for part in found]
        self.num_regions = sum(map(len, found))
        self.number = 0

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

    def round(self, *, check: bool) -> float:
        """Seconds of one hand-off. check: of new bytes, compared when they have arrived."""
        from tandemkv.transfer.transport import Batch, Done

        self.number += 1
        if check:
            self.here.fill(self.number)
        self.pipe.send((self.number, check))
        self.receive()
        notice = self.number.to_bytes(NOTICE_BYTES, "little")
        start = time.perf_counter()
        batches = [Batch(g, g, found) for g, found in enumerate(self.plan())]
        handle = self.here.plane.write(self.peer, batches, notice)
        self.here.await_event(lambda event: isinstance(event, Done) and event.handle == handle)
        seconds = self.receive() - start
        if check and self.receive() != self.here.checksum():
            raise InvariantError("other bytes arrived than were sent")
        return seconds

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send((END, False))
        self.process.join(timeout=10)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.here.plane.close()


def plain_copy(devices: tuple[str, str], num_bytes: int, repeat: int) -> float:
    """Seconds of one copy of as many bytes from device to device."""
    import torch

    source = torch.ones(num_bytes // 2, dtype=torch.int16, device=devices[0])
    target = torch.empty_like(source, device=devices[1])
    times: list[float] = []
    for _ in range(repeat + WARM_UP):
        start = time.perf_counter()
        target.copy_(source)
        for device in devices if devices[0] != "cpu" else ():
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def measure(args: argparse.Namespace, devices: tuple[str, str]) -> dict[str, float]:
    figures: dict[str, float] = {"tokens": args.tokens}
    for order in args.orders.split(","):
        bench = Bench(devices, args.layers, args.tokens, order)
        try:
            for _ in range(WARM_UP):
                bench.round(check=True)
            seconds = statistics.median(bench.round(check=False) for _ in range(args.repeat))
            bench.round(check=True)
        finally:
            bench.close()
        num_bytes = sum(bench.group_bytes)
        if "bytes" not in figures:
            figures["bytes"] = num_bytes
            figures["draft_share_of_bytes"] = bench.group_bytes[1] / num_bytes
            copy = plain_copy(devices, num_bytes, args.repeat)
            figures["copy_gb_per_s"] = num_bytes / copy / 1e9
        figures[f"{order}_regions"] = bench.num_regions
        figures[f"{order}_ms"] = 1e3 * seconds
        figures[f"{order}_gb_per_s"] = num_bytes / seconds / 1e9
        figures[f"{order}_share_of_a_plain_copy"] = (
            figures[f"{order}_gb_per_s"] / figures["copy_gb_per_s"]
        )
        for line in lines({k: v for k, v in figures.items() if k.startswith(order)}):
            print(line, flush=True)
    return figures


def pick_devices(asked: str) -> tuple[str, str]:
    """Of the two processes. ConfigError without a GPU."""
    import torch

    if asked == "cpu":
        return "cpu", "cpu"
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available; benchmarks/transfer.py measures on the CPU")
    second = 1 if torch.cuda.device_count() > 1 else 0
    return "cuda:0", f"cuda:{second}"


def main(args: argparse.Namespace) -> None:
    unknown = [order for order in args.orders.split(",") if order not in PAGES]
    if unknown:
        raise ConfigError(f"--orders: {unknown[0]!r} is not one of {', '.join(PAGES)}")
    devices = pick_devices(args.device)
    print(f"from {devices[0]} to {devices[1]}", flush=True)
    figures = measure(args, devices)
    for line in lines(figures):
        print(line)
    reached = figures.get("fresh_gb_per_s", 0.0)
    if "fresh_gb_per_s" in figures:
        word = "reaches" if reached >= GOAL_GB_PER_S else "misses"
        print(f"fresh: {reached:.0f} GB/s {word} the goal of {GOAL_GB_PER_S:.0f} GB/s")
    if args.json:
        write_figures(args.json, {**figures, "goal_gb_per_s": GOAL_GB_PER_S})


def options() -> argparse.ArgumentParser:
    found = parser(__doc__)
    add = found.add_argument
    add("--tokens", type=count, default=8192, help="tokens of the prompt (default: %(default)s)")
    add("--layers", type=count, default=32, help="target layers (default: %(default)s)")
    add("--repeat", type=count, default=15, help="rounds of each (default: %(default)s)")
    add("--orders", default=",".join(PAGES), help="which page orders (default: %(default)s)")
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu tries the script where there is no GPU (default: %(default)s)",
    )
    return found


if __name__ == "__main__":
    sys.exit(run(main, options()))
