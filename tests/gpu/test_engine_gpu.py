"""The same engine on CUDA: parity on every path, and agreement with the CPU."""

from __future__ import annotations

import pytest
import torch
from drafting import VOCAB, tiny_target
from engines import TARGET_SEED, drafts_by_anchor, greedy, prompt, run, tiny_engine

from tandemkv.engine.engine import Engine
from tandemkv.model.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cuda_engine(drafter: str, dtype: str, **options: object) -> Engine:
    model = tiny_target(TARGET_SEED).model.to("cuda", getattr(torch, dtype))
    target = Target(model, fingerprint="tiny on cuda")
    return tiny_engine(drafter, target=target, device="cuda", dtype=dtype, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", ["eagle3", "self", "ngram"])
def test_warm_and_suspended_runs_draft_as_cold_ones_on_cuda(drafter: str, dtype: str) -> None:
    wanted = [prompt(n, seed=n) for n in (5, 17, 33)]
    engine = cuda_engine(drafter, dtype)
    first, second = run(engine, wanted), run(engine, wanted)
    requests = [engine.add(p, greedy()) for p in wanted]
    while engine.has_work:
        engine.step()
        for request in list(engine.scheduler.running)[:1]:
            if request.decoding and request.num_preemptions < 2:
                engine.suspend(request.id)
    for a, b, c in zip(first, second, requests, strict=True):
        if dtype == "float32":
            assert a.tokens == b.tokens == c.output
            assert drafts_by_anchor(a) == drafts_by_anchor(b)
        same = sum(x == y == z for x, y, z in zip(a.tokens, b.tokens, c.output, strict=True))
        assert same >= 0.5 * len(a.tokens)  # bf16 may part at a near tie; fp32 may not part


def test_cuda_and_cpu_agree_in_fp32() -> None:
    wanted = [prompt(n, seed=n) for n in (5, 17, 33)]
    torch.backends.cuda.matmul.allow_tf32 = False
    on_gpu = [c.tokens for c in run(cuda_engine("eagle3", "float32"), wanted)]
    assert on_gpu == [c.tokens for c in run(tiny_engine("eagle3"), wanted)]
    assert max(max(t) for t in on_gpu) < VOCAB
