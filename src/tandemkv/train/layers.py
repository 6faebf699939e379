"""Parts that every trained drafter is built of: matrices, norms, SwiGLU, rotary positions.

Law: master weights are float32 and a layer computes in the dtype of its input. This module knows no
drafter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Matrix(nn.Module):
    """A bias-free linear map: float32 master weight, computed in the input's dtype."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm over the last dimension; weight [*lead, d], one norm per leading index."""

    def __init__(self, size: int, eps: float, *lead: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*lead, size))
        self.eps = eps

    def forward(self, x: Tensor, index: int | None = None) -> Tensor:
        weight = self.weight if index is None else self.weight[index]
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), self.eps)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Matrix(size, inner, 0.02)
        self.up_proj = Matrix(size, inner, 0.02)
        self.down_proj = Matrix(inner, size, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation RoPE of x [..., T, hd] by cos, sin that broadcast to it."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def angles(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos, sin [*positions, head_dim] of plain RoPE."""
    half = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions[..., None].float() * theta ** (-half / head_dim)
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def split_heads(x: Tensor, count: int) -> Tensor:
    """[B, T, count * hd] -> [B, count, T, hd]."""
    return x.view(*x.shape[:-1], count, -1).transpose(1, 2)
