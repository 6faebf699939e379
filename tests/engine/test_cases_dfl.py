"""Engines with DFlash and DSpark: hits, branches, suspended and preempted requests, full pools.

Context rows are compared with those of an engine that has computed the same text at once, drafts
with those of a cold engine, output with plain decoding. Pages that are free hold NaN.
"""

from __future__ import annotations

import drafting
import pytest
import torch
from engines import TARGET_SEED, drafts_by_anchor, greedy, prompt, run, tiny_engine, used_pages
from torch import Tensor

from tandemkv.engine.engine import Completion, Engine
from tandemkv.kv.coverage import HOLES
from tandemkv.model.dflash import DFlash
from tandemkv.model.drafter import DraftInputs, Drafts
from tandemkv.sched.request import Request

TARGET = drafting.tiny_target(TARGET_SEED)
K = 3
Windows = tuple[int | None, int | None]
BOTH: Windows = (8, 8)
ONE: Windows = (None, 8)

pytestmark = pytest.mark.parametrize("method", ["dflash", "dspark"])


def counted(length: int) -> list[int]:
    return [i % 61 + 2 for i in range(1, length + 1)]


def drafter(method: str, windows: Windows = BOTH) -> DFlash:
    config = drafting.block_config(method, windows=windows, num_draft_tokens=K)
    return DFlash(TARGET, config, drafting.block_weights(config))


def engine(method: str, windows: Windows = BOTH, **options: object) -> Engine:
    return tiny_engine(drafter(method, windows), target=TARGET, **{"block_size": 16} | options)


def plainly(tokens: list[int], num: int) -> list[int]:
    return run(tiny_engine("none", target=TARGET), [tokens], greedy(num))[0].tokens


def started(e: Engine, tokens: list[int]) -> Request:
    """A request whose prompt has been run."""
    request = e.add(tokens, greedy(4))
    while not request.output:
        e.step()
    return request


def rows(e: Engine, request: Request) -> list[tuple[int, int, Tensor]]:
    """Per draft group, the slots that drafting reads now, all of them covered, and their rows."""
    found, seq = [], request.seq
    assert seq is not None
    for g in e.layout.draft_groups:
        low, n = e.layout.groups[g].first_needed(seq.committed), seq.committed
        assert seq.coverage[g].covers(low, n)
        found.append((low, n, e.read_rows(request, g, list(range(low, n)))))
    return found


def check_rows(e: Engine, request: Request, method: str, windows: Windows) -> None:
    """They are those of a cold engine that is given the committed text as a prompt."""
    assert request.seq is not None
    text = [*request.prompt, *request.output][: request.seq.committed]
    cold = engine(method, windows)
    wanted = rows(cold, started(cold, text))
    for (low, n, ours), (low_cold, n_cold, theirs) in zip(rows(e, request), wanted, strict=True):
        assert (low, n) == (low_cold, n_cold)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def check_drafts(done: Completion, cold: Completion) -> None:
    assert done.tokens == cold.tokens
    assert drafts_by_anchor(done) == drafts_by_anchor(cold)
    assert not done.request.draft_use.gaps


def holes_paid(done: Completion) -> int:
    return done.request.draft_use.recomputed.get(HOLES, 0)


@pytest.mark.parametrize("page", [4, 8, 16])
def test_two_turns_on_recycled_pages_hold_the_rows_of_a_cold_run(method, page):
    e = engine(method, draft_page_size=page, kv_cache_tokens=128, max_model_len=96)
    run(e, [prompt(70, seed=4)], greedy(10))
    e.reset_cache()
    first = run(e, [counted(40)], greedy(10))[0]
    for text in (counted(40), [*counted(40), *first.tokens, *prompt(8, seed=5)]):
        request = started(e, text)
        check_rows(e, request, method, BOTH)
        assert not request.draft_use.gaps
        e.abort(request.id)
    e.check()


def test_the_same_prompt_twice_drafts_the_same_and_recomputes_one_row(method):
    e = engine(method, ONE)
    first, second = (run(e, [counted(64)], greedy(10))[0] for _ in range(2))
    assert second.cached_tokens == 63
    check_drafts(second, first)
    assert holes_paid(second) == 0


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, None])
def test_rows_after_every_step_are_those_of_a_cold_run(method, accepted):
    """Whatever number of drafts is accepted; None: each number in turn."""
    plain = plainly(counted(21), 24)
    text, made, steps = [*counted(21), *plain], drafter(method, ONE), 0
    propose = made.run

    def oracle(inputs: DraftInputs) -> Drafts:
        """Drafts of which as many are right as are to be accepted."""
        nonlocal steps
        out = propose(inputs)
        for i, segment in enumerate(inputs.segments):
            right = steps % 4 if accepted is None else accepted
            steps += 1
            ahead = text[segment.num_rows + 1 :][: len(out.tokens[i])]
            out.tokens[i] = [t if j < right else (t + 1) % 50 for j, t in enumerate(ahead)]
        return out

    made.run = oracle  # type: ignore[method-assign]
    e = tiny_engine(made, target=TARGET)
    request = e.add(counted(21), greedy(24))
    while e.has_work:
        e.step()
        if request.seq is not None and request.output:
            check_rows(e, request, method, ONE)
    assert request.output == plain


def test_a_suspended_request_comes_back_to_its_rows_and_goes_on_as_if_alone(method):
    e = engine(method, ONE)
    request, _ = e.add(counted(20), greedy(30)), e.add(prompt(20, 1), greedy(30))
    for _ in range(6):
        e.step()
    e.suspend(request.id)
    assert request.seq is None
    while request.seq is None:
        e.step()
    check_rows(e, request, method, ONE)
    while e.has_work:
        e.step()
    assert request.output == plainly(counted(20), 30)
    assert not request.draft_use.gaps


@pytest.mark.parametrize("page", [4, 8, 16])
@pytest.mark.parametrize("tail", [3, 6])
def test_branches_of_a_prefix_draft_as_cold_ones_and_the_first_pays(method, page, tail):
    e, paid = engine(method, draft_page_size=page), []
    for branch in range(3):
        text = [*counted(48), *prompt(tail, 50 + branch)]
        done = run(e, [text], greedy(8))[0]
        check_drafts(done, run(engine(method), [text], greedy(8))[0])
        assert branch == 0 or done.cached_tokens >= 48
        paid.append(holes_paid(done))
    assert paid[0] == paid[2] == 0
    assert paid[1] <= 7


@pytest.mark.parametrize("page", [4, 8, 16])
def test_a_hit_that_ends_inside_a_page_loses_no_row(method, page):
    e = engine(method, (16, 16), draft_page_size=page)
    run(e, [counted(50)], greedy(1))
    text = [*counted(50), *prompt(10, 9)]
    text[50] = (counted(51)[50] + 1) % 60
    done = run(e, [text], greedy(8))[0]
    assert done.cached_tokens == 50
    check_drafts(done, run(engine(method, (16, 16)), [text], greedy(8))[0])


def test_dropping_what_is_behind_the_window_changes_no_draft(method):
    windows: Windows = (8, None)
    kept = run(engine(method, windows), [counted(40)], greedy(40))[0]
    bare = engine(method, windows, prefix_caching=False, block_size=4, draft_page_size=1)
    check_drafts(run(bare, [counted(40)], greedy(40))[0], kept)


@pytest.mark.parametrize("length", [6, 7, 8, 9, 20])
def test_output_that_crosses_the_window_is_that_of_plain_decoding(method, length):
    done = run(engine(method), [counted(length)], greedy(20))[0]
    assert done.tokens == plainly(counted(length), 20)


def test_drafts_rejected_across_a_page_boundary_leave_nothing_behind(method):
    e = engine(method)
    text = [*counted(15), *run(e, [counted(15)], greedy(2))[0].tokens, *prompt(4, 1)]
    done = run(e, [text], greedy(8))[0]
    assert done.cached_tokens == 16
    check_drafts(done, run(engine(method), [text], greedy(8))[0])


def test_requests_that_end_anywhere_leave_no_page_held(method):
    e = engine(
        method, ONE, block_size=4, max_batch_tokens=12, kv_cache_tokens=200, max_model_len=60
    )
    for i in range(50):
        request = e.add(prompt(5 + i % 20, i), greedy(10))
        for _ in range(i % 9):
            e.step()
        if i % 2:
            e.abort(request.id)
        assert all(u.free + u.held + u.cached == u.total for u in e.kv.usage())
    while e.has_work:
        e.step()
    assert used_pages(e) == [0, 0, 0]


def test_preempted_requests_draft_as_cold_ones(method):
    prompts = [prompt(20, i) for i in range(4)]
    e = engine(method, ONE, block_size=4, kv_cache_tokens=100, max_model_len=70)
    done = run(e, prompts, greedy(30))
    assert sum(each.request.num_preemptions for each in done) > 0
    for each, text in zip(done, prompts, strict=True):
        cold = run(engine(method, ONE, block_size=4), [text], greedy(30))[0]
        assert each.tokens == cold.tokens
        ours, theirs = drafts_by_anchor(each), drafts_by_anchor(cold)
        shared = ours.keys() & theirs.keys()
        assert shared
        for anchor in shared:  # a step may have had room for fewer drafts
            assert all(a == b for a, b in zip(ours[anchor], theirs[anchor], strict=False))


def test_speculation_costs_less_than_a_block_of_hits_per_request(method):
    def hits(k: int) -> int:
        e = engine(method, block_size=4, kv_cache_tokens=240, max_model_len=120, max_running=4)
        texts, total = [prompt(16, i) for i in range(4)], 0
        for turn in range(3):
            done = run(e, texts, greedy(8, num_draft_tokens=k))
            total += sum(each.cached_tokens for each in done)
            texts = [
                [*text, *each.tokens, *prompt(5, 99 + turn)]
                for text, each in zip(texts, done, strict=True)
            ]
        return total

    assert hits(K) >= hits(0) - 3 * 4


def test_a_claim_that_one_full_pool_refuses_holds_nothing_in_the_others(method):
    e = engine(method, ONE, block_size=4)
    g = e.layout.draft_groups[0]
    taken = e.kv.pools[g].take(e.kv.usage()[g].total)
    assert e.kv.claim(counted(20)) is None
    assert [usage.held for i, usage in enumerate(e.kv.usage()) if i != g] == [0, 0]
    e.kv.pools[g].give(taken)
    assert e.kv.claim(counted(20)) is not None


def test_requests_of_unlike_salts_share_nothing(method):
    e = engine(method, ONE)
    done = [run(e, [counted(40)], greedy(4), salts=[salt])[0] for salt in "aba"]
    assert [each.cached_tokens for each in done] == [0, 0, 39]
    assert e.kv.stats.prefix_hit_tokens == 39
