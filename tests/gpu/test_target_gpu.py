"""The target and its attention on CUDA: the answers of the CPU, in both precisions."""

from __future__ import annotations

import pytest
import tiny
import torch
from paging import LENGTH, Pages, prompt

from tandemkv.model.attention import KVPool
from tandemkv.model.target import ATTENTION, Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {kind: {} for kind in tiny.KINDS} | {
    "wide": {
        "hidden_size": 576,
        "intermediate_size": 256,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    }
}


def target_on(device: str, shape: str, dtype: str) -> Target:
    kind = shape if shape in tiny.KINDS else "llama"
    model = tiny.model_of(kind, attention=ATTENTION, **SHAPES[shape])
    return Target(model.to(device, getattr(torch, dtype)), fingerprint=shape)


def all_logits(target: Target) -> list[torch.Tensor]:
    """A prefill, chunks, a mixed batch, a query-only pass and a pass over a hole, on the CPU."""
    a, b = prompt(1), prompt(2, 19)
    pages = Pages(target, page_sizes=(8, 4))
    logits = [
        pages.logits(("a", a, 0, 20)),
        pages.logits(("a", a, 20, 28), ("b", b, 0, 18)),
        pages.logits(("a", a, 28, LENGTH), ("b", b, 18, 19)),
        pages.logits(("a", a, 24, 28), readable=[(0, 25)], held=25),
        pages.logits(("a", a, 28, LENGTH), readable=[(0, 3), (19, 28)]),
    ]
    return [x.cpu() for x in logits]


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_cuda_gives_the_logits_of_the_cpu_in_float32(shape):
    ours, wanted = (all_logits(target_on(d, shape, "float32")) for d in ("cuda", "cpu"))
    for x, y in zip(ours, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=0)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_cuda_stays_near_the_cpu_in_bfloat16(shape):
    ours = all_logits(target_on("cuda", shape, "bfloat16"))
    wanted = all_logits(target_on("cpu", shape, "float32"))
    for x, y in zip(ours, wanted, strict=True):
        assert (x - y).norm() < 0.06 * y.norm()


@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_chunks_and_one_pass_agree_on_cuda(shape):
    target = target_on("cuda", shape, "float32")
    tokens = prompt(3)
    whole = Pages(target).logits(("a", tokens, 0, LENGTH))
    for size in (1, 4, 7, 13, 20):
        pages = Pages(target)
        chunks = [
            pages.logits(("a", tokens, start, min(start + size, LENGTH)))
            for start in range(0, LENGTH, size)
        ]
        torch.testing.assert_close(torch.cat(chunks), whole, atol=1e-4, rtol=0)


def test_features_are_tapped_on_cuda():
    target = target_on("cuda", "llama", "bfloat16")
    output = Pages(target).run([("a", prompt(4), 0, LENGTH)], taps=(-1, 1))
    assert output.features.shape == (LENGTH, 2, 32)
    assert output.features.device.type == "cuda"
    assert output.features.isfinite().all()


def test_pages_are_copied_and_poisoned_on_cuda():
    (group,) = target_on("cuda", "llama", "bfloat16").layer_groups(8)
    pool = KVPool(group, 3, "cuda")
    pool.data.normal_()
    pool.copy(0, 2)
    pool.poison([1])
    assert torch.equal(pool.data[2], pool.data[0])
    assert pool.data[1].isnan().all()
    assert not pool.data[2].isnan().any()
