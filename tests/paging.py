"""A target over poisoned pools with shuffled page tables: passes of any sequences and spans."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import torch

from tandemkv.base.spans import Span
from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool
from tandemkv.model.target import Target, TargetOutput

LENGTH = 29
"""Tokens of a prompt: more than twice the tiny sliding window."""


class Pages:
    """A target's poisoned pools and, per sequence and group, a shuffled page table."""

    def __init__(self, target: Target, page_sizes: Sequence[int] = (4, 8)) -> None:
        groups = target.layer_groups(4)
        self.target = target
        self.groups = [
            msgspec.structs.replace(g, page_size=size)
            for g, size in zip(groups, page_sizes, strict=False)
        ]
        self.pools = [KVPool(g, 128, target.spec.device, poison=True) for g in self.groups]
        self.free = [random.Random(i).sample(range(128), 128) for i in range(len(self.groups))]
        self.tables: dict[str, list[list[int]]] = {}

    def tables_of(self, name: str, slots: int) -> list[list[int]]:
        tables = self.tables.setdefault(name, [[] for _ in self.groups])
        for group, table, free in zip(self.groups, tables, self.free, strict=True):
            while len(table) * group.page_size < slots:
                table.append(free.pop())
        return tables

    def run(
        self,
        parts: Sequence[tuple[str, Sequence[int], int, int]],
        readable: Sequence[Span] | None = None,
        held: int | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """One pass over parts (sequence, tokens, start, stop). readable: [0, start) unless given;
        held: rows below this slot are not written."""
        segments: list[list[AttentionSegment]] = [[] for _ in self.groups]
        ids, positions = [], []
        for name, tokens, start, stop in parts:
            row = len(ids)
            ids += tokens[start:stop]
            positions += range(start, stop)
            covered = [(0, start)] if readable is None else readable
            write = (start if held is None else held, stop)
            for listed, table in zip(segments, self.tables_of(name, stop), strict=True):
                listed.append(AttentionSegment(row, len(ids), start, table, covered, [write]))
        rows = [GroupRows(p, s) for p, s in zip(self.pools, segments, strict=True)]
        device = self.target.spec.device
        return self.target.forward(
            torch.tensor(ids, device=device), torch.tensor(positions, device=device), rows, taps
        )

    def logits(self, *parts: tuple[str, Sequence[int], int, int], **kinds) -> torch.Tensor:
        return self.target.logits(self.run(parts, **kinds).hidden)


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(256) for i in range(length)]
