"""What one drafted chain attends to: the readable slots, copied once, and its own rows after them.

Law: proposing writes no page; a chain's own keys and values live here and end with it, so scratch
can be neither published nor read by another sequence. A slot outside `visible` is not copied, or
is copied and cut off: what it holds, NaN included, reaches no output. One layer, no window.

    keys      [ visible slots of the pages, gathered once | step 1 | step 2 | ... ]
    step j                    reads all of these ................^
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.base.errors import InvariantError
from tandemkv.base.spans import Span, SpanSet
from tandemkv.model.attention import KVPool


class ChainKeys:
    """Keys and values of a chain. num_own: how many rows of its own it may append."""

    __slots__ = ("_kv", "_stop")

    def __init__(self, pool: KVPool, pages: Sequence[int], visible: SpanSet, num_own: int) -> None:
        group = pool.group
        num = visible.count()
        shape = (2, group.num_kv_heads, num + num_own, group.head_dim)
        self._kv = torch.empty(shape, dtype=pool.data.dtype, device=pool.data.device)
        self._stop = 0
        for span in visible:
            rows = _gathered(pool, pages, span)
            stop = self._stop + rows.shape[1]
            self._kv[:, :, self._stop : stop] = rows.transpose(1, 2)
            self._stop = stop

    def append(self, k: Tensor, v: Tensor) -> None:
        """One row: k and v [Hkv, hd]."""
        self._kv[0, :, self._stop] = k
        self._kv[1, :, self._stop] = v
        self._stop += 1

    def attend(self, q: Tensor) -> Tensor:
        """The newest row's query [H, hd] over everything so far: [H, hd]."""
        keys, values = self._kv[:, :, : self._stop].unsqueeze(1).unbind(0)
        queries = q.view(1, keys.shape[1], -1, q.shape[-1])  # query heads of one key head
        return F.scaled_dot_product_attention(queries, keys, values).reshape(q.shape)


def _gathered(pool: KVPool, pages: Sequence[int], span: Span) -> Tensor:
    """[2, num, Hkv, hd]: keys and values of the slots of one span, by whole pages."""
    group, (start, stop) = pool.group, span
    size = group.page_size
    first = start // size
    numbers = pages[first : (stop - 1) // size + 1]
    if len(numbers) * size < stop - first * size or min(numbers) < 0:
        raise InvariantError(f"slots [{start}, {stop}) are read but not all of their pages held")
    stride = 2 * len(group.layers)
    index = [page * stride for page in numbers] + [page * stride + 1 for page in numbers]
    rows = pool.pages_as_rows.index_select(0, torch.tensor(index, device=pool.data.device))
    rows = rows.view(2, -1, group.num_kv_heads, group.head_dim)
    return rows[:, start - first * size : stop - first * size]
