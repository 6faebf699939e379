"""Attention over pages on CPU: what it copies beside what it reads, and its time beside SDPA.

Law: the peer is torch's own attention over a contiguous cache of the same keys, given for free, in
the faster of two forms (grouped heads, and query heads packed onto their key head by hand); the
times of both are of one run, one thread, turn by turn. `copied_per_read` is bytes gathered from
pages over bytes of readable slots: 1.0 means that nothing else was touched, the rest is the unread
part of the first and last page. `step_per_sdpa` counts the write, the gather and the plan, shared
by the layers as in a model. This script measures no model.

    python benchmarks/paged_attention.py [--repeat N] [--json FILE]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tandemkv.base.spans import Span
from tandemkv.kv.layout import Domain, LayerGroup
from tandemkv.lab.provenance import write_figures
from tandemkv.lab.script import count, parser, run
from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool

LAYERS, HEADS, KV_HEADS, DIM, PAGE = 30, 9, 3, 64, 16  # the embedded default


class Shape(NamedTuple):
    """A step: sequences of `context` slots, `rows` new rows each."""

    name: str
    context: int
    rows: int = 1
    sequences: int = 1
    window: int | None = None
    hole: Span | None = None


SHAPES = (
    Shape("decode_256", 256),
    Shape("decode_1k", 1024),
    Shape("decode_4k", 4096),
    Shape("verify5_1k", 1024, rows=5),
    Shape("batch8_decode_1k", 1024, sequences=8),
    Shape("chunk256_1k", 1024, rows=256),
    Shape("window512_decode_4k", 4096, window=512),
    Shape("hole_decode_4k", 4096, hole=(512, 3584)),
)


class Step:
    """One shape: a pool with shuffled pages, and the contiguous cache the peer reads."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        name = str(dtype).removeprefix("torch.")
        group = LayerGroup(
            name="target", domain=Domain.TARGET, layers=tuple(range(LAYERS)), num_kv_heads=KV_HEADS,
            head_dim=DIM, page_size=PAGE, window=shape.window, dtype=name,
        )  # fmt: skip
        slots = shape.context + shape.rows
        num_pages = -(-slots // PAGE)
        self.pool = KVPool(group, num_pages * shape.sequences)
        self.pool.data.normal_()
        pages = random.Random(0).sample(range(self.pool.num_pages), self.pool.num_pages)
        self.tables = [pages[i :: shape.sequences] for i in range(shape.sequences)]
        num_rows = shape.rows * shape.sequences
        self.q = torch.randn(num_rows, HEADS, DIM).to(dtype)
        self.k, self.v = torch.randn(2, num_rows, KV_HEADS, DIM).to(dtype)
        first = 0 if shape.window is None else max(0, shape.context - shape.window + 1)
        self.seen = slots - first
        self.readable = [(0, shape.context)]
        if shape.hole is not None:
            start, stop = shape.hole
            self.seen -= stop - start
            self.readable = [(0, start), (stop, shape.context)]
        self.cache = torch.randn(2, LAYERS, shape.sequences, KV_HEADS, self.seen, DIM).to(dtype)
        self.mask = None
        if shape.rows > 1:
            seen = torch.ones(shape.rows, self.seen, dtype=torch.bool)
            seen.tril_(self.seen - shape.rows)
            self.mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)

    def plan(self) -> GroupRows:
        shape = self.shape
        slots = (shape.context, shape.context + shape.rows)
        return GroupRows(
            self.pool,
            [
                AttentionSegment(
                    i * shape.rows, (i + 1) * shape.rows, slots[0], table, self.readable, [slots]
                )
                for i, table in enumerate(self.tables)
            ],
        )

    def ours(self) -> None:
        rows = self.plan()
        for layer in range(LAYERS):
            rows.attend(layer, self.q, self.k, self.v)

    def grouped(self) -> None:
        """The same products over keys that lie in a row, for every sequence and layer."""
        for q, k, v in self._products():
            F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)

    def packed(self) -> None:
        """The same, each key head read once for all of its query heads."""
        mask = None if self.mask is None else self.mask.repeat(HEADS // KV_HEADS, 1)
        for q, k, v in self._products():
            q = q.reshape(1, KV_HEADS, -1, DIM)
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(1, HEADS, -1, DIM)

    def _products(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        for layer in range(LAYERS):
            for i in range(self.shape.sequences):
                rows = slice(i * self.shape.rows, (i + 1) * self.shape.rows)
                k, v = self.cache[:, layer, i : i + 1]
                yield self.q[rows].transpose(0, 1).unsqueeze(0), k, v

    def copied_per_read(self) -> float:
        rows = self.plan()
        rows.attend(0, self.q, self.k, self.v)
        per_slot = self.pool.group.slot_bytes // LAYERS
        return rows.bytes_gathered / (self.seen * self.shape.sequences * per_slot)


def seconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


@torch.inference_mode()
def measure(repeat: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            step = Step(shape, dtype)
            works = (step.ours, step.grouped, step.packed)
            times = [[seconds(work) for work in works] for _ in range(repeat + 1)]
            ours, *peers = (statistics.median(column) for column in zip(*times[1:], strict=True))
            peer = min(peers)
            name = f"{str(dtype).removeprefix('torch.')}_{shape.name}"
            figures[f"{name}_ms"] = ours * 1e3
            figures[f"{name}_sdpa_ms"] = peer * 1e3
            figures[f"{name}_step_per_sdpa"] = ours / peer
            figures[f"{name}_copied_per_read"] = step.copied_per_read()
            print(
                f"{name:32} {ours * 1e3:8.2f} ms, SDPA on a contiguous cache {peer * 1e3:8.2f} ms,"
                f" ratio {ours / peer:5.2f}, copied per read"
                f" {figures[f'{name}_copied_per_read']:.3f}"
            )
    return figures


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    figures = measure(args.repeat)
    if args.json:
        write_figures(args.json, figures)


def options() -> argparse.ArgumentParser:
    found = parser(__doc__)
    found.add_argument(
        "--repeat",
        type=count,
        default=15,
        help="runs of each; medians are told (default: %(default)s)",
    )
    return found


if __name__ == "__main__":
    sys.exit(run(main, options()))
