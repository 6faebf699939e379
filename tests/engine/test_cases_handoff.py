"""What went wrong in other engines where another worker computes the prompt, as small inputs."""

from __future__ import annotations

import msgspec
import pytest
from engines import greedy, prompt, tiny_engine
from pairs import DRAFTERS, Pair, assert_as_on_one_worker

WITH_ROWS = [name for name in DRAFTERS if name not in ("ngram", "none")]


@pytest.mark.parametrize("drafter", WITH_ROWS)
@pytest.mark.parametrize("chunk", [5, 16, 64])
def test_prompts_around_a_page_pair_as_on_one_worker_whatever_the_chunks(drafter, chunk):
    pair = Pair(drafter, prefill=tiny_engine(drafter, max_batch_tokens=chunk))
    wanted = {f"r{n}": prompt(n, seed=n) for n in (3, 4, 5, 15, 16, 17)}
    for name, tokens in wanted.items():
        pair.fetch(tokens, greedy(), name)
    pair.settle()
    for name, tokens in wanted.items():
        assert_as_on_one_worker(pair, name, tokens, drafter)
    assert pair.workers["d"].fetching.fetched == len(wanted)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("warm", [1, 24, 41, 48, 55])
def test_rows_that_the_prefill_worker_reused_are_shipped_like_computed_ones(drafter, warm):
    pair = Pair(drafter)
    tokens = prompt(56, seed=4)
    first = pair.workers["p"].engine.add(tokens[:warm], greedy(1))
    while pair.workers["p"].engine.has_work:
        pair.workers["p"].engine.step()
    assert first.output
    pair.fetch(tokens, greedy(), "r")
    pair.settle()
    assert_as_on_one_worker(pair, "r", tokens, drafter)


@pytest.mark.parametrize("drafter", WITH_ROWS)
def test_four_conversations_of_three_turns_ship_what_is_new_and_draft_as_cold(drafter):
    pair = Pair(drafter)
    turns = {f"c{n}": prompt(11 + 3 * n, seed=n) for n in range(4)}
    for turn in range(3):
        for name, tokens in turns.items():
            pair.fetch(tokens, greedy(), f"{name}/{turn}")
        pair.settle()
        for name, tokens in turns.items():
            assert_as_on_one_worker(pair, f"{name}/{turn}", tokens, drafter)
            output = pair.requests[f"{name}/{turn}"].output
            turns[name] = [*tokens, *output, *prompt(5, seed=turn)]
    worker = pair.workers["d"]
    assert worker.fetching.bytes_received == worker.fetching.bytes_asked
    groups = worker.engine.layout.groups
    rows = sum(len(tokens) - 5 - 1 for tokens in turns.values())
    assert worker.fetching.bytes_received[0] <= rows * groups[0].slot_bytes


@pytest.mark.parametrize("drafter", ["eagle3", "dspark"])
def test_a_prompt_that_the_prefill_worker_refuses_is_computed_here(drafter):
    pair = Pair(drafter, prefill=tiny_engine(drafter, max_model_len=40, max_batch_tokens=9))
    long, short = prompt(60, seed=1), prompt(20, seed=2)
    pair.fetch(long, greedy(), "long")
    pair.fetch(short, greedy(), "short")
    pair.settle()
    assert_as_on_one_worker(pair, "long", long, drafter)
    assert_as_on_one_worker(pair, "short", short, drafter)
    assert pair.workers["d"].fetching.fetched == 1


def test_the_prefill_worker_samples_one_token_whatever_the_request_wants():
    pair = Pair("eagle3")
    tokens = prompt(20, seed=3)
    params = msgspec.structs.replace(greedy(), min_tokens=5)
    pair.fetch(tokens, params, "r")
    pair.settle()
    assert_as_on_one_worker(pair, "r", tokens, "eagle3")
    assert pair.workers["p"].engine.scheduler.stats.generation_tokens == 1
    assert pair.workers["p"].engine.scheduler.stats.acceptance.num_drafts == 0
