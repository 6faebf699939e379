"""Hand-offs between pools in a GPU's memory, over NIXL: no drafter notices."""

from __future__ import annotations

import time

import pytest
import torch
from drafting import tiny_target
from engines import TARGET_SEED, drafts_by_anchor, greedy, prompt, run, tiny_engine
from pairs import Pair

from tandemkv.engine.engine import Engine, completion_of
from tandemkv.model.target import Target

pytest.importorskip("nixl_cu13", reason="NIXL is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def engine(drafter: str, **options: object) -> Engine:
    target = Target(tiny_target(TARGET_SEED).model.to("cuda"), fingerprint="tiny on cuda")
    return tiny_engine(drafter, target=target, device="cuda", **options)


@pytest.mark.parametrize("drafter", ["eagle3", "self"])
def test_a_request_drafts_from_its_first_step_as_on_one_worker(drafter: str) -> None:
    from tandemkv.transfer.nixl import Nixl

    prefill, decode = engine(drafter, max_batch_tokens=9), engine(drafter, draft_page_size=2)
    pair = Pair(prefill=prefill, decode=decode, transport=Nixl)
    wanted = {f"r{n}": prompt(n, seed=n) for n in (5, 17, 41)}
    for name, tokens in wanted.items():
        pair.fetch(tokens, greedy(), name)
    until = time.monotonic() + 20
    while any(request.finish_reason is None for request in pair.requests.values()):
        assert time.monotonic() < until
        pair.turn(0.001)
    assert pair.workers["d"].stats.computed_here == {}
    assert pair.workers["d"].stats.fetched == len(wanted)
    for name, tokens in wanted.items():
        cold = run(engine(drafter), [tokens], greedy())[0]
        assert pair.requests[name].output == cold.tokens
        assert drafts_by_anchor(completion_of(pair.requests[name])) == drafts_by_anchor(cold)
    for worker in pair.workers.values():
        worker.close()
