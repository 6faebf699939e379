"""Training on CUDA: its kernels against plain torch, and chain attention in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


@pytest.mark.parametrize("width", [1000, 16384, 49152])
@pytest.mark.parametrize("mix", [(1.0, 0.0), (0.0, 1.0), (0.3, 0.7)])
def test_the_loss_kernel_is_the_plain_loss(width: int, mix: tuple[float, float]) -> None:
    from tandemkv.train import kernels
    from tandemkv.train.loss import soft_targets

    torch.manual_seed(0)
    student, teacher = noise(32, width, scale=3), noise(32, width, scale=3)
    weight = torch.rand(32, device="cuda")
    wanted = soft_targets(student, teacher, weight, mix)
    got = kernels.soft_targets(student.clone(), teacher, kernels.log_sum(teacher), weight, mix)
    assert all(error(a, b) < 1e-3 for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("step", [0, 63, 64, 130])
def test_the_decode_kernel_is_plain_attention(step: int, window: int | None) -> None:
    from tandemkv.train import kernels

    torch.manual_seed(0)
    query, keys, values = noise(5, 9, 64), noise(5, 3, 160, 64), noise(5, 3, 160, 64)
    first = max(0, step + 1 - (window or 1000))
    seen = slice(first, step + 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.view(5, 3, 3, 64).float(), keys[:, :, seen].float(), values[:, :, seen].float()
    )
    at = torch.tensor([step], device="cuda")
    got = kernels.decode_attention(query, keys, values, at, 64**-0.5, window)
    assert error(got.view(5, 3, 3, 64), wanted) < 1e-2


@pytest.mark.parametrize("dropped", [False, True])
def test_chain_attention_on_the_gpu_is_that_of_the_cpu(dropped: bool) -> None:
    from tandemkv.train.attention import chain_attention

    torch.manual_seed(0)
    tensors = [noise(2, 3, 192, 64) for _ in range(7)]
    first = torch.tensor([0, 50]) if dropped else None
    live = (torch.arange(192) >= torch.tensor([0, 50 * dropped])[:, None])[:, None, :, None]

    def results(device: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(device, dtype).requires_grad_() for t in tensors]
        start = first.to(device) if first is not None else None
        out = chain_attention(*leaves[:3], leaves[3:5], leaves[5:], start) * live.to(device)
        slope = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape).to(dtype)
        return [out.cpu(), *(g.cpu() for g in torch.autograd.grad((out * slope).sum(), leaves))]

    pairs = zip(results("cuda", torch.bfloat16), results("cpu", torch.float32), strict=True)
    assert all(error(a, b) < 2e-2 for a, b in pairs)
