"""Attention of the training-time test: causal over step-0 rows, plus each row's own later rows.

Law: one softmax over both parts, so the result is what a serving chain computes with its draft
cache (step-0 keys up to the row, then the keys it has just written). The causal part runs in
torch's flash kernel; the few own keys are merged by their log sums. The backward pass hands that
kernel the merged output and log sum, which makes its gradients those of the whole softmax. This
module knows no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FAR = 8000.0
"""Score (before scale) that hides a key; exact in bf16."""


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, Any]:
    """Causal attention [B, H, T, hd]: output, log sum exp [B, H, T] float32, what backward needs"""
    if query.is_cuda:
        out, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True, False, scale=scale
        )
        return out, lse[..., : query.shape[2]], rest
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True, scale=scale
    )
    return out, lse, None


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    rest: Any, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if query.is_cuda:
        cum_q, cum_k, max_q, max_k, philox_seed, philox_offset, _ = rest
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True,
            philox_seed, philox_offset, scale=scale,
        )  # fmt: skip
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, 0.0, True, scale=scale
    )


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, query: Tensor, key: Tensor, value: Tensor, *own: Tensor):
        out, lse, rest = _flash(query, key, value, scale)
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        scores = [_dot(query, k) * scale for k in keys]
        total = torch.logsumexp(torch.stack([lse, *scores]), 0) if scores else lse
        if scores:
            out = out * torch.exp(lse - total)[..., None].to(out.dtype)
            for score, v in zip(scores, values, strict=True):
                out = out + torch.exp(score - total)[..., None].to(out.dtype) * v
        ctx.save_for_backward(query, key, value, out, total, *own, *scores)
        ctx.scale, ctx.rest, ctx.count = scale, rest, len(keys)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        grad = grads[0]
        query, key, value, out, total, *saved = ctx.saved_tensors
        keys, values, scores = (saved[i * ctx.count : (i + 1) * ctx.count] for i in range(3))
        d_query, d_key, d_value = _flash_backward(
            grad, query, key, value, out, total.contiguous(), ctx.rest, ctx.scale
        )
        mean = _dot(grad, out)
        d_keys, d_values = [], []
        for k, v, score in zip(keys, values, scores, strict=True):
            weight = torch.exp(score - total)
            slope = (weight * (_dot(grad, v) - mean) * ctx.scale)[..., None].to(query.dtype)
            d_query = d_query + slope * k
            d_keys.append(slope * query)
            d_values.append(weight[..., None].to(grad.dtype) * grad)
        return None, d_query, d_key, d_value, *d_keys, *d_values


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.sum(a * b, -1, dtype=torch.float32)


def chain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    first_row: Tensor | None = None,
) -> Tensor:
    """All tensors [B, H, T, hd] -> [B, H, T, hd]; scores are scaled by hd ** -0.5.

    Row i sees key, value rows <= i and row i of each of own_keys, own_values. first_row [B]: key
    rows below it are absent; rows i < first_row then see their own keys only, or nothing.
    """
    dim = query.shape[-1]
    scale = dim**-0.5
    if first_row is None:
        return _ChainAttention.apply(scale, query, key, value, *own_keys, *own_values)
    hidden = torch.arange(key.shape[2], device=key.device) < first_row[:, None]
    query, value = F.pad(query, (0, 8)), F.pad(value, (0, 8))
    query[..., dim] = 1.0
    key = F.pad(key, (0, 8))
    key[..., dim] = (-_FAR * hidden).to(key.dtype)[:, None]
    own_keys = [F.pad(k, (0, 8)) for k in own_keys]
    own_values = [F.pad(v, (0, 8)) for v in own_values]
    out = _ChainAttention.apply(scale, query, key, value, *own_keys, *own_values)
    return out[..., :dim]
