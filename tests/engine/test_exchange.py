"""Hand-offs between two workers in one process: drafts and text are those of one worker."""

from __future__ import annotations

import pytest
from engines import greedy, prompt, run, tiny_engine
from pairs import DRAFTERS, Pair, assert_as_on_one_worker

from tandemkv.base.sampling import SamplingParams
from tandemkv.engine.handoff import Sink


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_request_drafts_from_its_first_step_as_on_one_worker(drafter):
    pair = Pair(drafter)
    wanted = {f"r{n}": prompt(n, seed=n) for n in (1, 5, 17, 33)}
    for name, tokens in wanted.items():
        pair.fetch(tokens, greedy(), name)
    pair.settle()
    for name, tokens in wanted.items():
        assert_as_on_one_worker(pair, name, tokens, drafter)
    decode = pair.workers["d"]
    assert decode.fetching.fetched == 4
    assert decode.engine.kv.stats.draft_gap_tokens == {}


@pytest.mark.parametrize("drafter", ["eagle3", "dspark"])
def test_the_second_turn_ships_its_suffix_alone(drafter):
    pair = Pair(drafter)
    pair.fetch(prompt(33, seed=1), greedy(), "one")
    pair.settle()
    sent = sum(pair.workers["p"].shipping.bytes_sent)
    first = pair.requests["one"]
    turn = [*first.prompt, *first.output, *prompt(6, seed=2)]
    pair.fetch(turn, greedy(), "two")
    pair.settle()
    assert_as_on_one_worker(pair, "two", turn, drafter)
    more = sum(pair.workers["p"].shipping.bytes_sent) - sent
    assert 0 < more < sent / 2


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark"])
def test_with_the_kill_switch_the_text_is_the_same_and_it_is_counted(drafter):
    pair = Pair(drafter, prefill_transfer=False)
    tokens = prompt(33, seed=1)
    pair.fetch(tokens, greedy(), "r")
    pair.settle()
    assert_as_on_one_worker(pair, "r", tokens, drafter)
    decode = pair.workers["d"]
    assert decode.peers.left_out["switched_off"] == len(decode.engine.layout.draft_groups)
    assert decode.engine.kv.stats.target_recomputed_tokens["holes"] > 0


def test_a_peer_without_a_drafter_serves_the_target_rows():
    pair = Pair(prefill=tiny_engine("none"), decode=tiny_engine("eagle3"))
    tokens = prompt(25, seed=1)
    pair.fetch(tokens, greedy(), "r")
    pair.settle()
    assert_as_on_one_worker(pair, "r", tokens, "eagle3")
    assert pair.workers["d"].peers.left_out["no_drafter"] == 1


def test_another_target_is_refused_by_name_and_the_request_computed_here():
    import drafting

    other = tiny_engine("none", target=drafting.tiny_target(8))
    pair = Pair(prefill=other, decode=tiny_engine("none"))
    tokens = prompt(12, seed=1)
    pair.fetch(tokens, greedy(), "r")
    pair.settle()
    assert pair.requests["r"].output == run(tiny_engine("none"), [tokens], greedy())[0].tokens
    decode = pair.workers["d"]
    assert decode.fetching.computed_here["refused"] == 1
    assert "model_fingerprint" in decode.peers.refused["p"]


@pytest.mark.parametrize("seed", range(6))
def test_lost_repeated_and_reordered_frames_change_no_word(seed):
    pair = Pair("dspark", loss=0.15, seed=seed)
    pair.workers["d"].greet("p")
    wanted = {f"r{n}": prompt(n, seed=n) for n in (5, 17, 33)}
    for _ in range(40):
        if "p" in pair.workers["d"].peers.known and "d" in pair.workers["p"].peers.known:
            break
        pair.workers["d"].greet("p")
        pair.turn()
    for name, tokens in wanted.items():
        pair.fetch(tokens, greedy(), name)
    pair.settle(3000)
    for name, tokens in wanted.items():
        assert pair.requests[name].output == run(tiny_engine("none"), [tokens], greedy())[0].tokens


@pytest.mark.parametrize("after", range(9))
def test_an_abort_at_any_moment_leaks_nothing_on_either_side(after):
    pair = Pair("eagle3")
    pair.fetch(prompt(40, seed=1), greedy(), "gone")
    pair.fetch(prompt(20, seed=2), greedy(), "stays")
    for _ in range(after):
        pair.turn()
    decode = pair.workers["d"]
    if not decode.abort("gone"):
        decode.engine.abort("gone")
    pair.settle()
    assert pair.requests["stays"].finish_reason == "length"


@pytest.mark.parametrize("after", range(9))
def test_a_prefill_worker_that_dies_at_any_moment_costs_no_request(after):
    pair = Pair("dspark")
    tokens = prompt(40, seed=1)
    pair.fetch(tokens, greedy(), "r")
    for _ in range(after):
        pair.turn()
    pair.down.add("p")
    pair.network.kill("p")
    pair.workers["d"].peer_dead("p", "it was killed")
    pair.settle()
    assert pair.requests["r"].output == run(tiny_engine("none"), [tokens], greedy())[0].tokens


@pytest.mark.parametrize("after", [1, 2, 4, 6, 9, 14])
def test_a_prefill_worker_that_dies_costs_none_of_the_requests_it_had(after):
    """Each one is given up for itself: the end of the first must not end the others unheard."""
    pair = Pair("eagle3")
    wanted = {f"r{i}": prompt(20 + 3 * i, seed=i) for i in range(4)}
    for name, tokens in wanted.items():
        pair.fetch(tokens, greedy(), name)
    for _ in range(after):
        pair.turn()
    pair.down.add("p")
    pair.network.kill("p")
    pair.workers["d"].peer_dead("p", "it was killed")
    pair.settle()
    for name, tokens in wanted.items():
        plain = run(tiny_engine("none"), [tokens], greedy())[0]
        assert pair.requests[name].output == plain.tokens, name
    stats = pair.workers["d"].stats
    assert stats.fetched + sum(stats.computed_here.values()) == len(wanted)


def test_sampled_requests_with_logprobs_say_what_one_worker_says():
    params = SamplingParams(temperature=1.0, max_tokens=12, logprobs=2, verification="block")
    pair = Pair("eagle3")
    tokens = prompt(17, seed=4)
    pair.fetch(tokens, params, "r", seed=11)
    pair.settle()
    seeded = SamplingParams(temperature=1.0, max_tokens=12, verification="block", seed=11)
    assert pair.requests["r"].output == run(tiny_engine("eagle3"), [tokens], seeded)[0].tokens


def test_small_pools_on_both_sides_serve_everyone_in_the_end():
    pair = Pair(
        prefill=tiny_engine("eagle3", kv_cache_tokens=120, max_model_len=80, max_batch_tokens=9),
        decode=tiny_engine("eagle3", kv_cache_tokens=120, max_model_len=80),
    )
    wanted = {f"r{i}": prompt(25 + i, seed=i) for i in range(6)}
    for name, tokens in wanted.items():
        pair.fetch(tokens, greedy(20), name)
    pair.settle(3000)
    for name, tokens in wanted.items():
        plain = run(tiny_engine("none"), [tokens], greedy(20))[0]
        assert pair.requests[name].output == plain.tokens


@pytest.mark.parametrize("after", [1, 2, 4, 7])
def test_a_prefill_worker_that_hangs_costs_no_request_and_its_pages_once_it_answers(after):
    pair = Pair("eagle3")
    wanted = {f"r{n}": prompt(30 + n, seed=n) for n in range(3)}
    for name, tokens in wanted.items():
        pair.fetch(tokens, greedy(), name)
    for _ in range(after):
        pair.turn()
    pair.down.add("p")
    for _ in range(200):
        pair.turn()
    assert all(request.finish_reason for request in pair.requests.values())
    pair.down.clear()
    pair.settle()
    for name, tokens in wanted.items():
        assert_as_on_one_worker(pair, name, tokens, "eagle3")


def test_a_worker_whose_data_plane_was_closed_is_a_peer_again_when_greeted():
    pair = Pair("eagle3")
    pair.fetch(prompt(30, seed=1), greedy(), "first")
    pair.settle()
    worker = pair.workers["d"]
    worker._transport.fence(worker.peers.known["p"].name)
    pair.turn()
    assert not worker.peers.known
    worker.greet("p")
    pair.settle()
    pair.fetch(prompt(40, seed=9), greedy(), "again")
    pair.settle()
    assert_as_on_one_worker(pair, "again", prompt(40, seed=9), "eagle3")
    assert worker.fetching.fetched == 2


def test_what_waits_for_a_worker_whose_data_plane_was_closed_is_computed_here(monkeypatch):
    pair = Pair("eagle3")
    pair.settle()
    worker = pair.workers["d"]
    worker._transport.fence(worker.peers.known["p"].name)
    with monkeypatch.context() as patch:
        patch.setattr(Sink, "open", lambda *_: None)  # no room: it waits
        pair.fetch(prompt(30, seed=1), greedy(), "r0")
        pair.turn()
    pair.settle()
    assert_as_on_one_worker(pair, "r0", prompt(30, seed=1), "eagle3")
    assert worker.fetching.computed_here["peer_fenced"] == 1


@pytest.mark.parametrize("drafter", ["eagle3", "dspark"])
def test_what_came_is_still_here_when_a_request_is_admitted_after_others(drafter):
    """More hand-offs than may run at once, and a pool without room for all of their windows."""
    decode = tiny_engine(drafter, max_running=1, kv_cache_tokens=150, max_model_len=60)
    pair = Pair(drafter, decode=decode)
    wanted = {f"r{i}": prompt(30 + i, seed=i) for i in range(5)}
    for name, tokens in wanted.items():
        pair.fetch(tokens, greedy(), name)
    pair.settle(3000)
    for name, tokens in wanted.items():
        assert_as_on_one_worker(pair, name, tokens, drafter)
    ahead = decode.layout.lookahead * len(wanted)
    at_most_one = len(wanted["r4"])  # one gave way to the next step of the one that ran
    assert decode.scheduler.stats.num_prefill_rows <= at_most_one + ahead


def test_rows_that_came_for_one_who_waits_give_way_to_one_before_it():
    """They are held, but never from somebody who is served first, nor beyond an abort."""
    decode = tiny_engine("eagle3", max_running=2, kv_cache_tokens=96, max_model_len=85)
    pair = Pair("eagle3", decode=decode)
    first = decode.add(prompt(40, seed=9), greedy(40), request_id="first")
    wanted = {f"r{i}": prompt(30, seed=i) for i in range(3)}
    for name, tokens in wanted.items():
        pair.fetch(tokens, greedy(), name)
    for _ in range(12):
        pair.turn()
    pair.workers["d"].abort("r2") or decode.abort("r2")
    pair.settle(3000)
    assert first.finish_reason == "length"
    assert first.output == run(tiny_engine("none"), [prompt(40, seed=9)], greedy(40))[0].tokens
    for name in ("r0", "r1"):
        assert_as_on_one_worker(pair, name, wanted[name], "eagle3")
