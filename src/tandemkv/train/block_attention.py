"""Attention of draft blocks that are trained together: context rows before the anchor, own block.

Law: a row sees the context slots [max(0, first, position - window + 1), anchor - 1] and every row
of its own block, in one softmax; so many blocks of one token row, each with its own anchor, see
what a server shows them one by one. On CUDA the gradient pass runs torch's flex_attention, which
skips what no row sees, once it gave the values and gradients of the masked form on a first batch of
that shape; everything else is the masked form. This module knows no weights.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_TOLERANCE = 3e-2
"""Relative difference in bf16 from which on flex_attention is not trusted."""
_trusted: dict[tuple[int, ...], bool] = {}


class BlockSight:
    """What the rows of draft blocks see; one for all layers of a window.

    anchors [B, A]: position of each block's first row, which has no context row of its own. size:
    rows of a block. length: context slots T. window None: everything. first [B, A] or [B, 1]:
    context slots below it are absent. Keys are the T context slots, then the A * size block rows.
    """

    def __init__(
        self,
        anchors: Tensor,
        size: int,
        length: int,
        window: int | None,
        first: Tensor | None = None,
    ) -> None:
        self.size, self.length = size, length
        ahead = torch.arange(size, device=anchors.device)
        self.positions = (anchors[..., None] + ahead).flatten(1)
        self.stop = anchors.repeat_interleave(size, 1)
        self.start = torch.zeros_like(self.positions)
        if window is not None:
            self.start = (self.positions - window + 1).clamp_min(0)
        if first is not None:
            absent = first.expand_as(anchors).repeat_interleave(size, 1)
            self.start = torch.maximum(self.start, absent)

    @functools.cached_property
    def mask(self) -> Tensor:
        """bool [B, 1, R, T + R], R = A * size."""
        slot = torch.arange(self.length, device=self.stop.device)
        context = (slot >= self.start[..., None]) & (slot < self.stop[..., None])
        block = torch.arange(self.stop.shape[1], device=slot.device) // self.size
        own = (block[:, None] == block).expand(len(context), -1, -1)
        return torch.cat([context, own], -1)[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, H, R, hd] over key, value [B, H, T + R, hd] -> [B, H, R, hd]."""
        if query.is_cuda and torch.is_grad_enabled() and self._flex_is_trusted(query):
            try:
                return self._flex(query, key, value)
            except Exception as error:
                _distrust(error)
        return self._masked(query, key, value)

    @functools.cached_property
    def _bias(self) -> Tensor:
        """The mask as scores in bf16, so that no layer makes it anew."""
        bias = torch.zeros(self.mask.shape, device=self.mask.device, dtype=torch.bfloat16)
        return bias.masked_fill_(~self.mask, -torch.inf)

    def _masked(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not query.is_cuda or query.dtype != torch.bfloat16:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
        bias = self._bias.expand(-1, query.shape[1], -1, -1)
        with sdpa_kernel(_KERNELS):  # cuDNN plans anew for every shape
            return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    @functools.cached_property
    def _block_mask(self) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        start, stop, length, size = self.start, self.stop, self.length, self.size

        def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            context = (key >= start[row, query]) & (key < stop[row, query]) & (key < length)
            own = (key >= length) & ((key - length) // size == query // size)
            return context | own

        rows, queries = stop.shape
        return create_block_mask(
            sees, rows, None, queries, length + queries, device=str(stop.device)
        )

    def _flex(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = (x.contiguous() for x in (query, key, value))  # other strides, other kernels
        return _compiled()(*parts, block_mask=self._block_mask)

    def _flex_is_trusted(self, query: Tensor) -> bool:
        """Whether flex_attention agreed with the masked form on a batch of this shape."""
        shape = (*query.shape, self.length, self.size)
        if shape not in _trusted:
            _trusted[shape] = all(_trusted.values()) and self._flex_agrees(query)
        return all(_trusted.values())

    def _flex_agrees(self, query: Tensor) -> bool:
        keys = (*query.shape[:2], self.length + query.shape[2], query.shape[3])
        try:
            leaves = [
                torch.randn(shape, device=query.device, dtype=query.dtype).requires_grad_()
                for shape in (query.shape, keys, keys)
            ]
            slope = torch.randn_like(leaves[0])
            ours, theirs = (_with_gradients(f, leaves, slope) for f in (self._flex, self._masked))
            worst = max(_difference(a, b) for a, b in zip(ours, theirs, strict=True))
        except Exception as error:
            _distrust(error)
            return False
        if not worst < _TOLERANCE:
            _distrust(f"it differs by {worst:.3f} from the masked form")
        return worst < _TOLERANCE


def _distrust(reason: object) -> None:
    """Use the masked form from now on: it needs no compiler, which may raise anything."""
    _trusted[()] = False
    said = " ".join(str(reason).split())
    warnings.warn(f"training without flex_attention: {said[:200]}", stacklevel=3)


def _with_gradients(attend: Any, leaves: list[Tensor], slope: Tensor) -> list[Tensor]:
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope)]


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@functools.cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
