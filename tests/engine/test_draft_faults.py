"""A drafter that computes nonsense, and contexts too large for one pass: nobody's text changes."""

from __future__ import annotations

import drafting
import pytest
import torch
from engines import TARGET_SEED, drafts_by_anchor, greedy, prompt, run, tiny_engine, used_pages

from tandemkv.base.sampling import SamplingParams
from tandemkv.model import dflash
from tandemkv.model.dflash import DFlash
from tandemkv.model.eagle3 import Eagle3

PROMPTS = [prompt(n, seed=n) for n in (5, 17, 33)]


def broken(method: str, target) -> DFlash | Eagle3:
    """A drafter whose states are not finite; weights like these are refused when they are read."""
    if method == "eagle3":
        config = drafting.eagle_config()
        weights = drafting.eagle_weights(config)
        weights["fc.weight"][0, 0] = float("nan")
        return Eagle3(target, config, weights, num_draft_tokens=3)
    shape = drafting.block_config(method, windows=(8, 8))
    weights = drafting.block_weights(shape)
    weights["fc.weight"][0, 0] = float("nan")
    return DFlash(target, shape, weights, num_draft_tokens=3)


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_that_are_not_finite_end_no_request(method: str, temperature: float) -> None:
    target = drafting.tiny_target(TARGET_SEED)
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=3)
    engine = tiny_engine(broken(method, target), target=target)
    done = run(engine, PROMPTS, params)
    assert [c.finish_reason for c in done] == ["length"] * len(PROMPTS)
    assert used_pages(engine) == [0] * len(engine.layout.groups)
    if not temperature:
        plain = run(tiny_engine("none"), PROMPTS, params)
        assert [c.tokens for c in done] == [c.tokens for c in plain]


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_contexts_that_do_not_fit_one_pass_are_drafted_in_several(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [drafts_by_anchor(c) for c in run(tiny_engine(method), PROMPTS, greedy())]
    passes: list[int] = []
    forward = dflash.Trunk.forward

    def counted(self, tokens, anchors, contexts) -> torch.Tensor:
        passes.append(len(anchors))
        return forward(self, tokens, anchors, contexts)

    monkeypatch.setattr(dflash.Trunk, "forward", counted)
    monkeypatch.setattr(dflash, "CONTEXT_BYTES", 1)
    apart = [drafts_by_anchor(c) for c in run(tiny_engine(method), PROMPTS, greedy())]
    assert apart == whole
    assert set(passes) == {1}
