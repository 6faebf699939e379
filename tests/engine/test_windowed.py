"""Targets with sliding windows: the window's pages come and go, the drafter notices nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import drafting
import pytest
import torch
from engines import BLOCK_WINDOWS, drafts_by_anchor, greedy, run, tiny_engine, used_pages
from tiny import EOS_TOKEN_ID, WINDOW

from tandemkv.engine.engine import Engine
from tandemkv.kv.layout import Domain
from tandemkv.model.dflash import DFlash
from tandemkv.model.draft_lm import DraftModel
from tandemkv.model.eagle3 import Eagle3

DRAFTERS = ("eagle3", "self", "dflash", "dspark")
CASES = [(kind, name) for kind in ("mistral", "gemma3") for name in DRAFTERS]
LENGTHS = (3, WINDOW - 1, WINDOW, WINDOW + 1, 30, 61)
OUTPUT = greedy(20, ignore_eos=True)

Make = Callable[..., Engine]


@pytest.fixture
def windowed(tiny_target: Callable[..., Any]) -> Make:
    """windowed(kind, drafter, **options): an engine on a tiny model with a sliding window."""

    def engine(kind: str, drafter: str, **options: Any) -> Engine:
        target = tiny_target(kind)
        if drafter == "none":
            return tiny_engine("none", target=target, **options)
        if drafter == "self":
            return tiny_engine(
                DraftModel(target, target, num_draft_tokens=3), target=target, **options
            )
        vocab = target.spec.vocab_size
        if drafter in ("dflash", "dspark"):
            block = drafting.block_config(
                drafter, vocab_size=vocab, taps=(-1, 0, 1), windows=BLOCK_WINDOWS[drafter]
            )
            weights = drafting.block_weights(block)
            return tiny_engine(
                DFlash(target, block, weights, num_draft_tokens=3), target=target, **options
            )
        shape = drafting.eagle_config(vocab_size=vocab, draft_vocab_size=vocab, taps=(-1, 0, 1))
        made = Eagle3(target, shape, drafting.eagle_weights(shape), num_draft_tokens=3)
        return tiny_engine(made, target=target, **options)

    return engine


def text(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, EOS_TOKEN_ID - 2, (length,), generator=generator).tolist()


def prompts() -> list[list[int]]:
    return [text(n, seed=n) for n in LENGTHS]


def assert_same(found: dict, reference: dict) -> None:
    shared = found.keys() & reference.keys()
    assert shared
    for anchor in shared:
        pairs = zip(found[anchor], reference[anchor], strict=False)
        assert all(a == b for a, b in pairs), anchor


@pytest.mark.parametrize(("kind", "drafter"), CASES)
def test_warm_second_turn_and_resumed_runs_draft_as_cold_ones(
    windowed: Make, kind: str, drafter: str
) -> None:
    wanted = prompts()
    plain = [c.tokens for c in run(windowed(kind, "none"), wanted, OUTPUT)]
    engine = windowed(kind, drafter, max_batch_tokens=24)
    assert any(g.window == WINDOW for g in engine.layout.groups if g.domain is Domain.TARGET)
    cold = [run(windowed(kind, drafter), [p], OUTPUT)[0] for p in wanted]
    first, second = run(engine, wanted, OUTPUT), run(engine, wanted, OUTPUT)
    assert [c.tokens for c in first] == [c.tokens for c in second] == plain
    for a, b, reference in zip(first, second, cold, strict=True):
        assert_same(drafts_by_anchor(a), drafts_by_anchor(reference))
        assert_same(drafts_by_anchor(b), drafts_by_anchor(reference))
    turns = [
        [*p, *c.tokens, *text(5, seed=70 + len(p))] for p, c in zip(wanted, first, strict=True)
    ]
    for completion, turn in zip(run(engine, turns, OUTPUT), turns, strict=True):
        reference = run(windowed(kind, drafter), [turn], OUTPUT)[0]
        assert completion.tokens == reference.tokens
        assert_same(drafts_by_anchor(completion), drafts_by_anchor(reference))
    requests = [engine.add(p, OUTPUT) for p in wanted]
    for step in range(300):
        if not engine.has_work:
            break
        engine.step()
        if step % 4 == 2 and engine.scheduler.running:
            engine.suspend(engine.scheduler.running[0].id)
            if step % 8 == 2:
                engine.reset_cache()
    assert [r.output for r in requests] == plain
    for request, reference in zip(requests, cold, strict=True):
        assert_same({s.anchor: s.drafts for s in request.steps}, drafts_by_anchor(reference))
    assert used_pages(engine) == [0] * len(engine.layout.groups)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark"])
def test_a_long_request_is_charged_its_window(windowed: Make, kind: str, drafter: str) -> None:
    engine = windowed(kind, drafter, max_batch_tokens=16)
    run(engine, [text(120, seed=1)], OUTPUT)
    block = engine.layout.block_size
    for group, usage in zip(engine.layout.groups, engine.kv.usage(), strict=True):
        if group.window is not None:
            assert usage.peak_held * group.page_size <= group.window + 16 + 3 * block + 4


@pytest.mark.parametrize(("kind", "drafter"), CASES)
def test_small_pools_change_no_word(windowed: Make, kind: str, drafter: str) -> None:
    wanted = [text(25, seed=i) for i in range(5)]
    plain = [c.tokens for c in run(windowed(kind, "none"), wanted, OUTPUT)]
    engine = windowed(kind, drafter, kv_cache_tokens=100, max_model_len=70, max_batch_tokens=16)
    assert [c.tokens for c in run(engine, wanted, OUTPUT)] == plain
    assert [c.tokens for c in run(engine, wanted, OUTPUT)] == plain


@pytest.mark.parametrize("page", [None, 1, 2, 4])
@pytest.mark.parametrize("drafter", ["dflash", "dspark"])
def test_a_branch_point_is_filled_once_and_drafts_as_if_never_lost(
    windowed: Make, drafter: str, page: int | None
) -> None:
    """A system prompt of 45 and tails of 3; the drafter's rows at its end are gone."""
    prefix, ends = text(45, seed=1), [text(3, seed=i) for i in range(2, 6)]
    engine = windowed("llama", drafter, draft_page_size=page)
    run(engine, [prefix + ends[0]], OUTPUT)
    for g in engine.layout.draft_groups:
        engine.kv._make_room(g, engine.kv.usage()[g].total)
    paid = []
    for end in ends[1:]:
        cold = run(windowed("llama", drafter), [prefix + end], OUTPUT)[0]
        warm = run(engine, [prefix + end], OUTPUT)[0]
        assert warm.tokens == cold.tokens
        assert_same(drafts_by_anchor(warm), drafts_by_anchor(cold))
        paid.append(warm.request.draft_use.recomputed.get("holes", 0))
        assert warm.cached_tokens >= 45
        assert not warm.request.draft_use.gaps
    whole = any(g.window is None for g in engine.layout.groups if g.domain is Domain.DRAFT)
    assert paid == [45 if whole else 7, 0, 0]
