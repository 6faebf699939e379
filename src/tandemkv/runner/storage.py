"""The pools in memory: one tensor per layer group, and the page copies a plan asks for.

Law: a page's bytes change only by a copy that a claim planned or by a pass that writes its own
slots. In debug mode a freed page is filled with NaN, so a read outside coverage cannot go unseen.
This module decides nothing: which page, which slot, when, all come from the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tandemkv.base.ids import GroupId, PageId
from tandemkv.kv.layout import Layout
from tandemkv.kv.manager import PageCopy
from tandemkv.model.attention import KVPool


class Storage:
    """A KVPool per layer group of the layout, in its order."""

    def __init__(
        self, layout: Layout, num_pages: Sequence[int], device: torch.device, *, debug: bool
    ) -> None:
        self.layout, self.device = layout, device
        self._debug = debug
        self.pools = [
            KVPool(group, pages, device, poison=debug)
            for group, pages in zip(layout.groups, num_pages, strict=True)
        ]

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Run whole-page copies; sources are pinned by the cache until this is done."""
        for copy in copies:
            self.pools[copy.group].copy(copy.src, copy.dst)

    def freed(self, freed: Sequence[Sequence[PageId]]) -> None:
        """Pages that no one holds any more, per group; poisoned in debug mode."""
        if not self._debug:
            return
        for pool, pages in zip(self.pools, freed, strict=True):
            if pages:
                pool.poison(list(pages))

    def sync(self) -> None:
        """Until all passes and copies that were queued are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def device_index(self) -> int | None:
        """Of the GPU that the pools lie on; None for the CPU's memory."""
        return self.pools[0].data.device.index if self.device.type == "cuda" else None

    def read(self, group: GroupId, pages: Sequence[int], slots: Sequence[int]) -> Tensor:
        """Rows at `slots` of a page table: [slots, layers, 2, heads, head_dim]."""
        return self.pools[group].read(pages, slots)
