"""What a draft block attends to: context rows gathered once from pages, and the block's own rows.

Law: a row at position q reads covered context slots in [q - W + 1, n) and rows of its own draft
block, nothing else; what a page holds elsewhere, NaN included, reaches no output. Proposing writes
no page: the block's keys and values end with the pass. Sequences are padded to the longest context
of the pass; a padded place is masked. This module knows no weights.

    keys of sequence s   | covered slots in its window | padding | row 0 .. row B-1 |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.base.spans import Span
from tandemkv.model.attention import KVPool


class BlockContext:
    """The context of P draft blocks of B rows each in one layer group.

    pages, spans: per sequence, its page table and the covered slots below its anchor. anchors: n.
    causal: per layer of the pool, whether a row is kept from later rows of its draft block.
    """

    def __init__(
        self,
        pool: KVPool,
        pages: Sequence[Sequence[int]],
        spans: Sequence[Sequence[Span]],
        anchors: Sequence[int],
        num_rows: int,
        causal: Sequence[bool],
    ) -> None:
        group = pool.group
        low = [0 if group.window is None else max(0, n - group.window + 1) for n in anchors]
        seen = [
            [(max(a, first), min(b, n)) for a, b in each if a < n and b > first]
            for each, first, n in zip(spans, low, anchors, strict=True)
        ]
        slots = [_slots(each) for each in seen]
        longest = max(len(each) for each in slots)
        index = torch.zeros(len(slots), longest, dtype=torch.long)
        at = torch.full((len(slots), longest), -1, dtype=torch.long)
        for i, (table, each, own) in enumerate(zip(pages, seen, slots, strict=True)):
            if len(own):
                rows = pool.rows(table, each)
                index[i, : len(own)] = rows
                index[i, len(own) :] = rows[0]
                at[i, : len(own)] = own
        self._rows = num_rows
        self._kv = _gather(pool, index)
        blind = [i for i, own in enumerate(slots) if not len(own)]
        if blind and longest:
            self._kv[:, :, blind] = 0.0
        masks = {
            flag: _mask(at, anchors, num_rows, group.window, flag).to(pool.data.device)
            for flag in set(causal)
        }
        self._masks = [masks[flag] if not bool(masks[flag].all()) else None for flag in causal]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [P, B, H, hd]; k, v [P, B, Hkv, hd] of the block's own rows -> [P, B, H, hd].

        layer counts within the pool.
        """
        num, rows, heads, dim = q.shape
        keys = torch.cat((self._kv[layer, 0], k), 1).transpose(1, 2)
        values = torch.cat((self._kv[layer, 1], v), 1).transpose(1, 2)
        kv_heads = k.shape[2]
        queries = q.view(num, rows, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
        mask = self._masks[layer]
        if mask is not None:
            mask = mask[:, None, None].expand(-1, 1, heads // kv_heads, -1, -1).flatten(2, 3)
        out = F.scaled_dot_product_attention(queries.flatten(2, 3), keys, values, attn_mask=mask)
        return out.view(num, kv_heads, -1, rows, dim).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _gather(pool: KVPool, index: Tensor) -> Tensor:
    """[L, 2, P, T, Hkv, hd] of the slot rows index [P, T] of layer 0's keys."""
    group = pool.group
    layers, size = len(group.layers), group.page_size
    step = torch.arange(2 * layers).view(layers, 2, 1, 1) * size
    rows = (index + step).flatten().to(pool.data.device)
    shape = (layers, 2, *index.shape, group.num_kv_heads, group.head_dim)
    return pool.slots_as_rows.index_select(0, rows).view(shape)


def _slots(spans: Sequence[Span]) -> Tensor:
    if not spans:
        return torch.empty(0, dtype=torch.long)
    return torch.cat([torch.arange(a, b) for a, b in spans])


def _mask(
    at: Tensor, anchors: Sequence[int], num_rows: int, window: int | None, causal: bool
) -> Tensor:
    """bool [P, B, T + B]: which keys a row sees. at [P, T]: slots, -1 for padding."""
    rows = torch.arange(num_rows)
    position = torch.tensor(anchors)[:, None, None] + rows[:, None]
    slots = at[:, None, :]
    context = (slots >= 0).expand(-1, num_rows, -1)
    own = torch.ones(len(anchors), num_rows, num_rows, dtype=torch.bool)
    if causal:
        own &= rows <= rows[:, None]
    if window is not None:
        context = context & (slots > position - window)
        own &= (rows[:, None] - rows).abs() < window
    return torch.cat((context, own), -1)
