"""What went wrong in other engines where another worker computes the prompt, as small inputs."""

from __future__ import annotations

from collections import deque

import drafting
import msgspec
import pytest
from engines import drafts_by_anchor, greedy, prompt, run, tiny_engine
from pairs import DRAFTERS, Pair, assert_as_on_one_worker

from tandemkv.engine.engine import Engine, completion_of
from tandemkv.engine.exchange import Exchange
from tandemkv.engine.fetching import Fetch
from tandemkv.model.target import ATTENTION, Target
from tandemkv.transfer.loopback import Faults, Loopback
from tandemkv.transfer.offer import WorkerRole

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


@pytest.mark.parametrize("drafter", WITH_ROWS)
def test_nothing_is_shipped_between_the_targets_pass_and_the_drafters(drafter, monkeypatch):
    """Whoever looks in the middle of a step must not take it for done."""
    pair = Pair(drafter)
    prefill = pair.workers["p"]
    runner, looks = prefill.engine.runner, []
    propose = runner._propose

    def look_first(*args):
        looks.append(prefill.poll(0.0))
        return propose(*args)

    monkeypatch.setattr(runner, "_propose", look_first)
    wanted = {f"r{n}": prompt(n, seed=n) for n in (7, 20, 41)}
    for name, tokens in wanted.items():
        pair.fetch(tokens, greedy(), name)
    pair.settle()
    assert len(looks) > len(wanted)
    for name, tokens in wanted.items():
        assert_as_on_one_worker(pair, name, tokens, drafter)
    assert pair.workers["d"].fetching.fetched == len(wanted)


@pytest.mark.parametrize("theirs", DRAFTERS)
@pytest.mark.parametrize("ours", DRAFTERS)
@pytest.mark.parametrize(("there", "here"), [(True, True), (False, True)])
def test_any_drafters_on_the_two_sides_serve_and_what_is_left_out_is_counted(
    ours, theirs, there, here
):
    pair = Pair(
        prefill=tiny_engine(theirs, max_batch_tokens=9),
        decode=tiny_engine(ours, draft_page_size=2),
        prefill_transfer=there,
    )
    tokens = prompt(33, seed=5)
    pair.fetch(tokens, greedy(), "r")
    pair.settle()
    decode = pair.workers["d"]
    assert_as_on_one_worker(pair, "r", tokens, ours)  # what did not come was computed here
    assert decode.fetching.fetched == 1
    drafted = sum(decode.fetching.bytes_asked[g] for g in decode.engine.layout.draft_groups)
    shared = ours == theirs and ours in WITH_ROWS and there
    assert (drafted > 0) == shared
    assert bool(sum(decode.stats.left_out.values())) == (ours in WITH_ROWS and not shared)
    if ours != "none":
        assert pair.requests["r"].acceptance.num_drafts > 0


def strangers() -> dict[str, tuple[Engine, tuple[str, ...]]]:
    """Engines that do not fit the usual one, and what must be said of each."""
    usual = tiny_engine("none").target.spec.fingerprint
    wide = Target(drafting.tiny_model(hidden=48, attention=ATTENTION), fingerprint=usual)
    half = Target(drafting.tiny_model(attention=ATTENTION).bfloat16(), fingerprint=usual)
    return {
        "target": (tiny_engine("none", target=drafting.tiny_target(9)), ("fingerprint", "tiny 9")),
        "head_dim": (tiny_engine("none", target=wide), ("head_dim", "8", "12")),
        "dtype": (
            tiny_engine("none", target=half, dtype="bfloat16"),
            ("dtype", "float32", "bfloat16"),
        ),
    }


@pytest.mark.parametrize("kind", ["target", "head_dim", "dtype"])
def test_a_peer_that_does_not_fit_is_refused_on_both_sides_which_serve_everyone_else(kind):
    pair = Pair("eagle3")
    engine, named = strangers()[kind]
    stranger = Exchange(engine, Loopback(pair.network, "s"), "s", WorkerRole.PREFILL, pair.send)
    pair.frames["s"] = deque()
    pair.workers["s"] = stranger
    pair.workers["d"].greet("s")
    request = pair.workers["d"].engine.request_of(prompt(20), greedy(), request_id="r")
    pair.requests["r"] = request
    pair.workers["d"].fetch(Fetch(request, "s"))
    pair.fetch(prompt(30, seed=2), greedy(), "other")
    for _ in range(3):  # turns of a third of a second
        pair.turn()
    assert pair.workers["d"].fetching.computed_here == {"refused": 1}
    for said in (pair.workers["d"].peers.refused["s"], stranger.peers.refused["d"]):
        assert all(word in said for word in named), said
    pair.settle()
    assert_as_on_one_worker(pair, "r", prompt(20), "eagle3")
    assert_as_on_one_worker(pair, "other", prompt(30, seed=2), "eagle3")
    stranger.engine.add(prompt(9), greedy())
    pair.settle()


@pytest.mark.parametrize("drafter", ["eagle3", "dspark"])
def test_pages_that_are_being_sent_are_not_evicted_however_short_memory_is(drafter):
    """A slow data plane, and prompts of its own that need every page of the prefill worker."""
    small = tiny_engine(drafter, kv_cache_tokens=96, max_model_len=60, max_batch_tokens=9)
    pair = Pair(drafter, prefill=small, faults=Faults(delay=(3, 9), regions_per_poll=1, seed=1))
    wanted = {f"r{n}": prompt(40 + n, seed=n) for n in range(3)}
    for name, tokens in wanted.items():
        pair.fetch(tokens, greedy(), name)
    own = []
    for turn in range(60):
        if turn % 6 == 0:
            own.append(small.add(prompt(35, seed=100 + turn), greedy(4)))
        pair.turn()
    pair.settle(4000)
    for name, tokens in wanted.items():
        assert_as_on_one_worker(pair, name, tokens, drafter)
    assert all(request.finish_reason == "length" for request in own)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 4), (5, 2), (0, 3)])
def test_another_number_of_drafts_on_the_other_side_is_no_difference(theirs, ours):
    pair = Pair(
        prefill=tiny_engine("eagle3", k=max(1, theirs), max_batch_tokens=9),
        decode=tiny_engine("eagle3", k=ours),
    )
    tokens = prompt(29, seed=6)
    pair.fetch(tokens, greedy(), "r")
    pair.settle()
    cold = run(tiny_engine("eagle3", k=ours), [tokens], greedy())[0]
    request = pair.requests["r"]
    assert drafts_by_anchor(completion_of(request)) == drafts_by_anchor(cold)
    assert pair.workers["d"].stats.left_out == {}
