"""chain_attention against one plain softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandemkv.train import attention
from tandemkv.train.attention import chain_attention

B, H, T, HD = 2, 3, 12, 16


def plain(query, key, value, own_keys, own_values, first_row=None) -> Tensor:
    """The same function as one explicit softmax."""
    at = torch.arange(T)
    seen = (at[None] <= at[:, None])[None].expand(B, T, T)
    if first_row is not None:
        seen = seen & (at >= first_row[:, None])[:, None]
    score = (query @ key.transpose(-1, -2)).masked_fill(~seen[:, None], -1e30)
    own = [(query * k).sum(-1, keepdim=True) for k in own_keys]
    weight = (torch.cat([score, *own], -1) * HD**-0.5).softmax(-1)
    out = weight[..., :T] @ value
    for r, v in enumerate(own_values):
        out = out + weight[..., T + r : T + r + 1] * v
    return out


def case(own: int, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(B, H, T, HD, requires_grad=True) for _ in range(3 + 2 * own)]


def results(fn, tensors: list[Tensor], own: int, first_row, live: Tensor) -> list[Tensor]:
    """Output and gradients, over rows that have a context."""
    out = fn(*tensors[:3], tensors[3 : 3 + own], tensors[3 + own :], first_row) * live
    torch.manual_seed(1)
    return [out, *torch.autograd.grad((out * torch.randn_like(out)).sum(), tensors)]


def worst(own: int, first_row: Tensor | None = None) -> float:
    tensors = case(own)
    start = torch.zeros(B, dtype=torch.long) if first_row is None else first_row
    live = (torch.arange(T) >= start[:, None])[:, None, :, None].float()
    ours = results(chain_attention, tensors, own, first_row, live)
    theirs = results(plain, tensors, own, first_row, live)
    return max(
        float((a - b).detach().norm() / b.detach().norm())
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("own", [0, 1, 3])
def test_context_and_own_rows_share_one_softmax(own: int):
    assert worst(own) < 1e-5


@pytest.mark.parametrize("own", [0, 3])
def test_rows_below_the_first_one_are_not_seen(own: int):
    assert worst(own, torch.tensor([3, 0])) < 1e-5


def test_gradients_that_forget_the_own_rows_are_caught(monkeypatch: pytest.MonkeyPatch):
    """The seeded fault: the causal part's backward pass is given its own log sum."""
    kept: list[Tensor] = []
    flash, backward = attention._flash, attention._flash_backward

    def remember(*args):
        result = flash(*args)
        kept.append(result[1])
        return result

    def forgetful(grad, query, key, value, out, lse, rest, scale):
        return backward(grad, query, key, value, out, kept[-1], rest, scale)

    monkeypatch.setattr(attention, "_flash", remember)
    monkeypatch.setattr(attention, "_flash_backward", forgetful)
    assert worst(3) > 1e-2
