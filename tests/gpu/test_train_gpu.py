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


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("size", [7, 8])
def test_attention_of_draft_blocks_on_the_gpu_is_that_of_the_cpu(
    size: int, dropped: bool, window: int | None
) -> None:
    """The sparse form, which a gradient pass runs here, against the masked form in float32."""
    from tandemkv.train import block_attention

    torch.manual_seed(0)
    anchors = torch.stack([torch.randperm(192)[:16].sort().values for _ in range(2)])
    first = (torch.rand(2, 16) * (anchors + 1)).long() if dropped else None
    rows = 16 * size
    tensors = [noise(2, 3, n, 64) for n in (rows, 192 + rows, 192 + rows)]

    def results(device: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(device, dtype).requires_grad_() for t in tensors]
        low = first.to(device) if first is not None else None
        sight = block_attention.BlockSight(anchors.to(device), size, 192, window, low)
        out = sight.attend(*leaves)
        slope = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape).to(dtype)
        return [out.cpu(), *(g.cpu() for g in torch.autograd.grad((out * slope).sum(), leaves))]

    pairs = zip(results("cuda", torch.bfloat16), results("cpu", torch.float32), strict=True)
    assert all(error(a, b) < 2e-2 for a, b in pairs)
    assert block_attention._trusted
    assert all(block_attention._trusted.values())


def test_new_blocks_of_a_shape_compile_nothing_anew() -> None:
    from torch._dynamo.utils import counters

    from tandemkv.train.block_attention import BlockSight

    seen = []
    for seed in range(3):
        torch.manual_seed(seed)
        anchors = torch.stack([torch.randperm(192)[:16].sort().values for _ in range(2)]).cuda()
        sight = BlockSight(anchors, 7, 192, 60)
        query, key, value = (noise(2, 3, n, 64).requires_grad_() for n in (112, 304, 304))
        sight.attend(query, key, value).sum().backward()
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[0] == seen[1] == seen[2]


def test_the_loss_of_draft_blocks_on_the_gpu_is_that_of_the_cpu() -> None:
    from tandemkv.train.loss import soft_loss

    torch.manual_seed(0)
    hidden, teacher, head = noise(1, 500, 80), noise(500, 64), noise(2000, 64, scale=0.3)
    table, weight = noise(2000, 16, scale=0.3).float(), torch.rand(1, 500, device="cuda")

    def results(device: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [hidden.to(device, dtype).requires_grad_(), table.to(device).requires_grad_()]
        rest = [x.to(device, dtype) for x in (teacher, head)]
        loss, ce, l1, _ = soft_loss(leaves[0], *rest, weight.to(device), (0.4, 0.6), leaves[1])
        return [x.detach().cpu() for x in (loss, ce, l1, *torch.autograd.grad(loss, leaves))]

    pairs = zip(results("cuda", torch.bfloat16), results("cpu", torch.float32), strict=True)
    assert all(error(a, b) < 2e-2 for a, b in pairs)
