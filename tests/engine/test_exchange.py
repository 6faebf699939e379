"""Two workers in one process, sessions and frames and a loopback data plane between them.

The control channel is a queue that can lose, repeat and reorder frames. Engines are tiny and debug
mode is on: free pages hold NaN, every law is checked after every step.
"""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest
from engines import drafts_by_anchor, greedy, prompt, run, tiny_engine, used_pages

from tandemkv.base.sampling import SamplingParams
from tandemkv.engine.engine import Engine, completion_of
from tandemkv.engine.exchange import Exchange, Fetch
from tandemkv.transfer.loopback import Loopback, Network
from tandemkv.transfer.offer import WorkerRole

DRAFTERS = ("eagle3", "dflash", "dspark", "self", "ngram", "none")


class Pair:
    """A prefill and a decode worker."""

    def __init__(
        self,
        drafter: str = "eagle3",
        *,
        prefill: Engine | None = None,
        decode: Engine | None = None,
        loss: float = 0.0,
        seed: int = 0,
        prefill_transfer: bool = True,
    ) -> None:
        self.random, self.loss = random.Random(seed), loss
        self.network = Network()
        self.frames: dict[str, deque[bytes]] = {"p": deque(), "d": deque()}
        engines = {
            "p": prefill or tiny_engine(drafter, max_batch_tokens=9),
            "d": decode or tiny_engine(drafter, draft_page_size=2),
        }
        self.workers = {
            name: Exchange(
                engine,
                Loopback(self.network, name),
                name,
                WorkerRole.PREFILL if name == "p" else WorkerRole.DECODE,
                self.send,
                draft_transfer=prefill_transfer or name == "d",
            )
            for name, engine in engines.items()
        }
        self.requests: dict[str, object] = {}
        self.down: set[str] = set()
        self.workers["d"].greet("p")

    def send(self, peer: str, frame: bytes) -> None:
        if self.random.random() < self.loss:
            return
        copies = 2 if self.random.random() < self.loss else 1
        for _ in range(copies):
            if self.random.random() < self.loss:
                self.frames[peer].appendleft(frame)
            else:
                self.frames[peer].append(frame)

    def turn(self) -> None:
        for name, worker in self.workers.items():
            if name in self.down:
                continue
            while self.frames[name]:
                worker.hear(self.frames[name].popleft())
            worker.poll(0.3)
            worker.check()
            if worker.engine.has_work:
                for output in worker.engine.step():
                    worker.note(output)

    def settle(self, turns: int = 600) -> None:
        """Run until nothing is under way on either side."""
        for _ in range(turns):
            self.turn()
            idle = all(
                not w.busy and not w.engine.has_work
                for n, w in self.workers.items()
                if n not in self.down
            )
            if idle and not any(self.frames[n] for n in self.workers if n not in self.down):
                break
        else:
            raise AssertionError("still busy")
        for name, worker in self.workers.items():
            if name not in self.down:
                worker.engine.check()
                held = used_pages(worker.engine)
                assert held == [0] * len(worker.engine.layout.groups), name

    def fetch(self, tokens: list[int], params: SamplingParams, name: str, seed: int = 3) -> None:
        worker = self.workers["d"]
        params = msgspec.structs.replace(params, seed=seed)
        request = self.requests[name] = worker.engine.request_of(tokens, params, request_id=name)
        worker.fetch(Fetch(request, "p"))


def assert_as_on_one_worker(pair: Pair, name: str, tokens: list[int], drafter: str) -> None:
    request = pair.requests[name]
    cold = run(tiny_engine(drafter), [tokens], greedy())[0]
    assert request.output == cold.tokens
    assert drafts_by_anchor(completion_of(request)) == drafts_by_anchor(cold)


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
    assert decode.counts["fetched"] == 4
    assert decode.engine.kv.stats.draft_gap_tokens == {}


@pytest.mark.parametrize("drafter", ["eagle3", "dspark"])
def test_the_second_turn_ships_its_suffix_alone(drafter):
    pair = Pair(drafter)
    pair.fetch(prompt(33, seed=1), greedy(), "one")
    pair.settle()
    sent = sum(pair.workers["p"].bytes_sent)
    first = pair.requests["one"]
    turn = [*first.prompt, *first.output, *prompt(6, seed=2)]
    pair.fetch(turn, greedy(), "two")
    pair.settle()
    assert_as_on_one_worker(pair, "two", turn, drafter)
    more = sum(pair.workers["p"].bytes_sent) - sent
    assert 0 < more < sent / 2


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark"])
def test_with_the_kill_switch_the_text_is_the_same_and_it_is_counted(drafter):
    pair = Pair(drafter, prefill_transfer=False)
    tokens = prompt(33, seed=1)
    pair.fetch(tokens, greedy(), "r")
    pair.settle()
    assert_as_on_one_worker(pair, "r", tokens, drafter)
    decode = pair.workers["d"]
    assert decode.counts["draft_left_out: switched_off"] == len(decode.engine.layout.draft_groups)
    assert decode.engine.kv.stats.target_recomputed_tokens["holes"] > 0


def test_a_peer_without_a_drafter_serves_the_target_rows():
    pair = Pair(prefill=tiny_engine("none"), decode=tiny_engine("eagle3"))
    tokens = prompt(25, seed=1)
    pair.fetch(tokens, greedy(), "r")
    pair.settle()
    assert_as_on_one_worker(pair, "r", tokens, "eagle3")
    assert pair.workers["d"].counts["draft_left_out: no_drafter"] == 1


def test_another_target_is_refused_by_name_and_the_request_computed_here():
    import drafting

    other = tiny_engine("none", target=drafting.tiny_target(8))
    pair = Pair(prefill=other, decode=tiny_engine("none"))
    tokens = prompt(12, seed=1)
    pair.fetch(tokens, greedy(), "r")
    pair.settle()
    assert pair.requests["r"].output == run(tiny_engine("none"), [tokens], greedy())[0].tokens
    decode = pair.workers["d"]
    assert decode.counts["computed_here: refused"] == 1
    assert "model_fingerprint" in decode.refused["p"]


@pytest.mark.parametrize("seed", range(6))
def test_lost_repeated_and_reordered_frames_change_no_word(seed):
    pair = Pair("dspark", loss=0.15, seed=seed)
    pair.workers["d"].greet("p")
    wanted = {f"r{n}": prompt(n, seed=n) for n in (5, 17, 33)}
    for _ in range(40):
        if "p" in pair.workers["d"].peers and "d" in pair.workers["p"].peers:
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
    assert sum(pair.workers["d"].stats.outcomes.values()) == len(wanted)


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
