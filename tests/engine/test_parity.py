"""On every path a drafter proposes what it proposes cold: tiny models, real scheduler and pages."""

from __future__ import annotations

import pytest
import torch
from engines import (
    drafts_by_anchor,
    greedy,
    prompt,
    run,
    tiny_engine,
    used_pages,
)

from tandemkv.engine.engine import Engine, GenerateRequest

DRAFTERS = ("eagle3", "dflash", "dspark", "self", "ngram")
LENGTHS = (1, 4, 5, 17, 33)


def prompts() -> list[list[int]]:
    return [prompt(n, seed=n) for n in LENGTHS]


def plain(wanted: list[list[int]], max_tokens: int = 24) -> list[list[int]]:
    return [c.tokens for c in run(tiny_engine("none"), wanted, greedy(max_tokens))]


def cold(drafter: str, wanted: list[list[int]], max_tokens: int = 24) -> list[dict]:
    """Drafts by anchor of each prompt, alone in an engine of its own."""
    return [drafts_by_anchor(run(tiny_engine(drafter), [p], greedy(max_tokens))[0]) for p in wanted]


def assert_same_drafts(found: dict, expected: dict) -> None:
    shared = found.keys() & expected.keys()
    assert shared
    for anchor in shared:
        both = zip(found[anchor], expected[anchor], strict=False)  # K may be cut at the end
        assert all(a == b for a, b in both), anchor


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_cold_and_warm_runs_draft_alike_and_equal_plain_decoding(drafter: str) -> None:
    wanted = prompts()
    engine = tiny_engine(drafter)
    first, second = run(engine, wanted), run(engine, wanted)
    assert [c.tokens for c in first] == [c.tokens for c in second] == plain(wanted)
    for a, b, c in zip(first, second, cold(drafter, wanted), strict=True):
        assert drafts_by_anchor(a) == drafts_by_anchor(b)
        assert_same_drafts(drafts_by_anchor(a), c)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("page", [1, 2, 4])
def test_draft_page_size_changes_nothing(drafter: str, page: int) -> None:
    wanted = prompts()
    engine = tiny_engine(drafter, draft_page_size=page)
    first, second = run(engine, wanted), run(engine, wanted)
    for a, b, c in zip(first, second, cold(drafter, wanted), strict=True):
        assert drafts_by_anchor(a) == drafts_by_anchor(b)
        assert_same_drafts(drafts_by_anchor(b), c)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_second_turn_drafts_as_a_cold_run_of_the_whole_conversation(drafter: str) -> None:
    engine = tiny_engine(drafter)
    turns = []
    for i, turn in enumerate(run(engine, prompts())):
        turns.append([*prompts()[i], *turn.tokens, *prompt(6, seed=90 + i)])
    second = run(engine, turns)
    for completion, whole, reference in zip(second, turns, cold(drafter, turns), strict=True):
        published = len(whole) - 6 - 1  # all but the new message and the last token's row
        assert completion.cached_tokens == published
        assert_same_drafts(drafts_by_anchor(completion), reference)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("flush", [False, True])
def test_a_suspended_request_drafts_on_as_if_nothing_had_happened(
    drafter: str, flush: bool
) -> None:
    wanted = prompts()
    engine = tiny_engine(drafter)
    requests = [engine.add(p, greedy()) for p in wanted]
    for step in range(200):
        if not engine.has_work:
            break
        engine.step()
        if step % 3 == 1:
            for request in list(engine.scheduler.running)[:2]:
                engine.suspend(request.id)
            if flush:
                engine.reset_cache()
    assert not engine.has_work
    assert sum(r.num_preemptions for r in requests) >= 5
    assert [r.output for r in requests] == plain(wanted)
    for request, reference in zip(requests, cold(drafter, wanted), strict=True):
        assert_same_drafts({s.anchor: s.drafts for s in request.steps}, reference)
        empty = [s for s in request.steps[:-1] if not s.drafts]
        assert drafter == "ngram" or not empty, "a resumed request must not lose a proposal"
    assert used_pages(engine) == [0] * len(engine.layout.groups)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("chunk", [5, 7, 16])
def test_chunked_prefill_mixed_with_decoding_changes_nothing(drafter: str, chunk: int) -> None:
    wanted = prompts()
    engine = tiny_engine(drafter, max_batch_tokens=chunk)
    found = run(engine, wanted)
    assert [c.tokens for c in found] == plain(wanted)
    for completion, reference in zip(found, cold(drafter, wanted), strict=True):
        assert_same_drafts(drafts_by_anchor(completion), reference)


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_a_pool_that_forces_suspension_changes_nothing(drafter: str) -> None:
    wanted = [prompt(20, seed=i) for i in range(4)]
    engine = tiny_engine(drafter, kv_cache_tokens=100, max_model_len=70)
    found = run(engine, wanted, greedy(30))
    assert sum(c.request.num_preemptions for c in found) > 0
    assert [c.tokens for c in found] == plain(wanted, 30)
    if drafter == "self":
        assert all(c.request.acceptance.num_accepted for c in found)


def test_a_perfect_drafter_accepts_everything_on_every_path() -> None:
    engine = tiny_engine("self", kv_cache_tokens=120, max_model_len=90)
    wanted = [prompt(20, seed=i) for i in range(4)]
    for _ in range(2):
        for completion in run(engine, wanted, greedy(32)):
            full = [s for s in completion.steps if len(s.drafts) == 3]
            assert full
            assert all(s.num_accepted == 3 for s in full)


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark", "self"])
def test_draft_rows_of_a_hit_equal_those_of_a_cold_run(drafter: str) -> None:
    tokens = prompt(41, seed=8)
    warm = tiny_engine(drafter)
    run(warm, [tokens[:30], tokens[:17]])
    rows = [_prompt_rows(e, tokens) for e in (warm, tiny_engine(drafter))]
    error = (rows[0] - rows[1]).flatten(1).norm(dim=1) / rows[1].flatten(1).norm(dim=1)
    assert float(error.max()) < 1e-4


def _prompt_rows(engine: Engine, tokens: list[int]) -> torch.Tensor:
    request = engine.add(tokens, greedy(4))
    while not request.output:
        engine.step()
    group = engine.layout.draft_groups[0]
    slots = range(engine.layout.groups[group].first_needed(len(tokens)), len(tokens))
    rows = engine.read_rows(request, group, list(slots))
    engine.abort(request.id)
    return rows


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark", "self"])
def test_withheld_draft_rows_are_really_absent_and_change_the_drafts(drafter: str) -> None:
    wanted = prompts()
    engine = tiny_engine(drafter, faults=("withhold_draft_rows",))
    first, second = run(engine, wanted), run(engine, wanted)
    assert [c.tokens for c in first] == [c.tokens for c in second] == plain(wanted)
    assert engine.kv.stats.draft_gap_tokens["fault"] > 0
    if drafter == "self":
        accepted = [
            sum(c.request.acceptance.num_accepted for c in run_) for run_ in (first, second)
        ]
        assert accepted[1] < accepted[0]
    else:
        assert [drafts_by_anchor(c) for c in first] != [drafts_by_anchor(c) for c in second]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_off_and_on_again_leaves_no_cold_drafter(drafter: str) -> None:
    tokens = prompt(17, seed=5)
    engine = tiny_engine(drafter)
    request = engine.add(tokens, greedy(40))
    for step in range(100):
        if not engine.has_work:
            break
        if step in (4, 12):
            engine.scheduler.set_num_draft_tokens(request.id, 0 if step == 4 else None)
        engine.step()
    assert request.output == plain([tokens], 40)[0]
    off = [s for s in request.steps if not s.drafts]
    assert len(off) >= 7
    reference = cold(drafter, [tokens], 40)[0]
    after = {s.anchor: s.drafts for s in request.steps if s.drafts}
    assert max(after) > max(s.anchor for s in off[:7])
    assert_same_drafts(after, reference)


def test_a_context_pass_that_is_off_leaves_a_counted_gap() -> None:
    engine = tiny_engine("eagle3")
    params = greedy(12, num_draft_tokens=0, draft_context=False)
    done = run(engine, [prompt(17, seed=5)], params)[0]
    assert done.tokens == plain([prompt(17, seed=5)], 12)[0]
    assert engine.kv.stats.draft_gap_tokens["speculation_off"] >= 17


def test_a_prefix_hit_of_any_length_loses_no_block() -> None:
    engine = tiny_engine("eagle3")
    base = prompt(40, seed=2)
    run(engine, [base], greedy(1))
    for length in range(1, 40):
        tokens = [*base[:length], *prompt(3, seed=100 + length)]
        expected = length
        while expected < len(tokens) - 1 and tokens[expected] == base[expected]:
            expected += 1
        request = engine.add(tokens, greedy(1))
        plan = engine.scheduler.plan()
        engine.scheduler.apply(plan, engine.runner.run(plan))
        assert request.cached_tokens >= expected  # earlier branches may match further
        rows = sum(segment.num_rows for segment in plan.segments)
        assert rows <= 1 + max(1, len(tokens) - request.cached_tokens)


def test_requests_that_share_a_prefix_in_one_batch_do_not_see_each_other() -> None:
    shared = prompt(24, seed=1)
    wanted = [[*shared, *prompt(3, seed=s)] for s in range(6)]
    engine = tiny_engine("eagle3")
    found = run(engine, wanted)
    for completion, reference in zip(found, cold("eagle3", wanted), strict=True):
        assert_same_drafts(drafts_by_anchor(completion), reference)


def test_salted_twins_share_no_rows() -> None:
    engine = tiny_engine("eagle3")
    tokens = prompt(24, seed=1)
    first, second = run(engine, [tokens], salts=["a"]), run(engine, [tokens], salts=["b"])
    assert (first[0].cached_tokens, second[0].cached_tokens) == (0, 0)
    assert run(engine, [tokens], salts=["a"])[0].cached_tokens == 23


def test_a_request_aborted_in_any_step_leaks_nothing() -> None:
    for after in range(12):
        engine = tiny_engine("eagle3", max_batch_tokens=8)
        requests = [engine.add(prompt(20, seed=i), greedy(12)) for i in range(3)]
        for _ in range(after):
            engine.step()
        engine.abort(requests[1].id)
        while engine.has_work:
            engine.step()
        assert used_pages(engine) == [0, 0]
        assert requests[1].finish_reason == "abort"
        assert {r.finish_reason for r in (requests[0], requests[2])} == {"length"}


def test_a_step_that_raises_ends_its_own_requests_and_no_others() -> None:
    engine = tiny_engine("eagle3", max_running=1)
    first = engine.add(prompt(9, seed=1), greedy(8))
    second = engine.add(prompt(9, seed=2), greedy(8))
    good = engine.target.forward

    def broken(*args: object, **kwargs: object) -> None:
        engine.target.forward = good
        raise RuntimeError("device lost")

    engine.target.forward = broken
    while engine.has_work:
        engine.step()
    assert first.finish_reason == "error"
    assert "device lost" in (first.error or "")
    assert second.finish_reason == "length"
    assert used_pages(engine) == [0, 0]


def test_sampled_requests_repeat_with_their_seed_whatever_the_batch() -> None:
    params = greedy(16, verification="block", seed=11)
    params = type(params)(temperature=1.0, max_tokens=16, seed=11, verification="block")
    wanted = prompts()
    alone = [run(tiny_engine("eagle3"), [p], params)[0].tokens for p in wanted]
    engine = tiny_engine("eagle3", max_batch_tokens=9)
    assert [c.tokens for c in run(engine, wanted, params)] == alone
    assert [c.tokens for c in run(engine, wanted, params)] == alone


def test_generate_calls_back_with_every_token_once() -> None:
    engine = tiny_engine("eagle3")
    seen: dict[str, list[int]] = {}
    requests = [GenerateRequest(prompt=p, params=greedy()) for p in prompts()]
    done = engine.generate(
        requests, on_output=lambda o: seen.setdefault(o.request_id, []).extend(o.tokens)
    )
    assert len(seen) == len(done)
    assert all(seen[c.request.id] == c.tokens for c in done)
