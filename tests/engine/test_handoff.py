"""Two engines on tiny models, rows copied by plan between their pools: no drafter notices."""

from __future__ import annotations

import ctypes

import msgspec
import pytest
from engines import BLOCK_WINDOWS, drafts_by_anchor, greedy, prompt, run, tiny_engine, used_pages

from tandemkv.base.errors import InvariantError
from tandemkv.base.sampling import SamplingParams
from tandemkv.engine.engine import Engine, completion_of
from tandemkv.engine.handoff import Sink, Source, offers_of
from tandemkv.transfer.offer import Offer, match
from tandemkv.transfer.plan import expected_bytes, regions, routes

DRAFTERS = ("eagle3", "dflash", "dspark", "self", "ngram", "none")
LENGTHS = (1, 4, 5, 17, 33)


def resume(engine: Engine, sink: Sink, params: SamplingParams, first: list[int], seed: int):
    """Go on with a request whose rows were delivered."""
    params = msgspec.structs.replace(params, seed=seed)
    request = engine.request_of(sink.prompt, params, namespace=sink.namespace)
    engine.submit(request, first_tokens=first)
    return request


def offer(engine: Engine, name: str) -> Offer:
    drafter = engine.drafter
    return Offer(
        engine_id=name,
        role="decode" if name == "d" else "prefill",
        model_fingerprint=engine.target.spec.fingerprint,
        drafter_fingerprint=drafter.spec.fingerprint if drafter else "",
        num_draft_tokens=engine.plan.num_draft_tokens,
        block_size=engine.layout.block_size,
        groups=offers_of(engine),
    )


def ship(source: Source, prefill: Engine, sink: Sink, decode: Engine, *, leave_out=()) -> int:
    """Copy every wanted row; returns the bytes. leave_out: groups that are not shipped."""
    plan = match(offer(prefill, "p"), offer(decode, "d"))
    total, received = 0, [[] for _ in decode.layout.groups]
    for pair in plan.pairs:
        spans = [
            (a, b)
            for start, stop in sink.wanted[pair.peer_index]
            for a, b in source.covered()[pair.index].within(start, stop)
        ]
        if pair.peer_index in leave_out:
            continue
        for route in routes(pair.mine, pair.theirs):
            mine = pair.mine.shards[route.src_rank].address
            theirs = pair.theirs.shards[route.dst_rank].address
            src, dst = source.pages()[pair.index], sink.pages()[pair.peer_index]
            for here, there, size in regions(route, spans, src, dst):
                ctypes.memmove(theirs + there, mine + here, size)
                total += size
        assert expected_bytes(routes(pair.mine, pair.theirs), spans) >= 0
        received[pair.peer_index] = spans
    sink.deliver(received)
    return total


def hand_over(
    prefill: Engine, decode: Engine, tokens: list[int], params: SamplingParams, seed: int = 3, **how
):
    source = Source(prefill, tokens, params, seed=seed)
    while not source.first_tokens:
        prefill.step()
    sink = Sink.open(decode, tokens)
    assert sink is not None
    sent = ship(source, prefill, sink, decode, **how)
    first = source.first_tokens
    source.close()
    return resume(decode, sink, params, first, seed), sent


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    engine.check()
    assert used_pages(engine) == [0] * len(engine.layout.groups)


def assert_same_drafts(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for anchor, drafts in found.items():
        assert drafts == expected[anchor], anchor


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("pages", [(None, None), (1, 4), (4, 2)])
def test_every_step_from_the_first_drafts_as_on_one_worker(drafter, pages):
    prefill = tiny_engine(drafter, draft_page_size=pages[0], max_batch_tokens=9)
    decode = tiny_engine(drafter, draft_page_size=pages[1])
    for n in LENGTHS:
        tokens = prompt(n, seed=n)
        request, _ = hand_over(prefill, decode, tokens, greedy())
        finish(decode)
        cold = run(tiny_engine(drafter), [tokens], greedy())[0]
        assert request.output == cold.tokens
        assert_same_drafts(drafts_by_anchor(completion_of(request)), drafts_by_anchor(cold))
    finish(prefill)
    assert decode.kv.stats.draft_gap_tokens == {}


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark", "self"])
def test_a_prefix_hit_on_either_side_changes_no_draft(drafter):
    prefill, decode = tiny_engine(drafter), tiny_engine(drafter)
    first, sent = hand_over(prefill, decode, prompt(33, seed=1), greedy())
    finish(decode)
    turn = [*first.prompt, *first.output, *prompt(6, seed=2)]
    second, more = hand_over(prefill, decode, turn, greedy())
    finish(decode)
    again, none = hand_over(prefill, decode, turn, greedy())
    finish(decode)
    cold = run(tiny_engine(drafter), [turn], greedy())[0]
    for request in (second, again):
        assert request.output == cold.tokens
        assert_same_drafts(drafts_by_anchor(completion_of(request)), drafts_by_anchor(cold))
    assert none == 0
    assert 0 < more < sent


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark"])
def test_without_the_drafters_rows_the_text_is_the_same_and_the_receiver_fills_them(drafter):
    prefill, decode = tiny_engine(drafter), tiny_engine(drafter)
    lost = set(decode.layout.draft_groups)
    tokens = prompt(33, seed=4)
    request, _ = hand_over(prefill, decode, tokens, greedy(), leave_out=lost)
    finish(decode)
    cold = run(tiny_engine(drafter), [tokens], greedy())[0]
    assert request.output == cold.tokens
    assert decode.kv.stats.target_recomputed_tokens["holes"] > 0


@pytest.mark.parametrize("drafter", ["eagle3", "dspark"])
def test_with_the_policy_fast_lost_rows_are_a_counted_gap(drafter):
    prefill, decode = tiny_engine(drafter), tiny_engine(drafter, claim_policy="fast")
    lost = set(decode.layout.draft_groups)
    tokens = prompt(33, seed=4)
    request, _ = hand_over(prefill, decode, tokens, greedy(), leave_out=lost)
    finish(decode)
    assert request.output == run(tiny_engine("none"), [tokens], greedy())[0].tokens
    assert decode.kv.stats.draft_gap_tokens["policy"] > 0


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark", "self"])
def test_a_sampled_request_says_the_same_with_its_seed(drafter):
    params = SamplingParams(temperature=1.0, max_tokens=16, verification="block", logprobs=1)
    tokens = prompt(17, seed=9)
    request, _ = hand_over(tiny_engine(drafter), decode := tiny_engine(drafter), tokens, params, 11)
    finish(decode)
    seeded = SamplingParams(temperature=1.0, max_tokens=16, verification="block", seed=11)
    assert request.output == run(tiny_engine(drafter), [tokens], seeded)[0].tokens


def test_rows_ship_while_the_prompt_is_computed():
    prefill = tiny_engine("eagle3", max_batch_tokens=8)
    source = Source(prefill, prompt(40, seed=1), greedy(), seed=1)
    seen = []
    while not source.first_tokens:
        prefill.step()
        seen.append(source.covered()[0].count())
    assert seen == [8, 16, 24, 32, 40]
    source.close()
    finish(prefill)


def test_an_end_in_any_state_leaks_nothing_on_either_side():
    for steps in range(6):
        prefill, decode = tiny_engine("dspark", max_batch_tokens=8), tiny_engine("dspark")
        source = Source(prefill, prompt(30, seed=1), greedy(), seed=1)
        sink = Sink.open(decode, prompt(30, seed=1))
        assert sink is not None
        for _ in range(steps):
            prefill.step()
        source.close()
        source.close()
        sink.cancel()
        finish(prefill)
        finish(decode)
        with pytest.raises(InvariantError, match="ends once"):
            sink.cancel()


def test_a_part_of_the_target_rows_is_kept_and_the_rest_computed():
    prefill, decode = tiny_engine("eagle3"), tiny_engine("eagle3")
    tokens = prompt(30, seed=6)
    source = Source(prefill, tokens, greedy(), seed=1)
    while not source.first_tokens:
        prefill.step()
    sink = Sink.open(decode, tokens)
    assert sink is not None
    pair = match(offer(prefill, "p"), offer(decode, "d")).pairs[0]
    (route,) = routes(pair.mine, pair.theirs)
    mine, theirs = pair.mine.shards[0].address, pair.theirs.shards[0].address
    for here, there, size in regions(route, [(0, 18)], source.pages()[0], sink.pages()[0]):
        ctypes.memmove(theirs + there, mine + here, size)
    assert sink.deliver([[(0, 18)], []]) == 18
    request = resume(decode, sink, greedy(), source.first_tokens, 1)
    source.close()
    finish(decode)
    assert request.output == run(tiny_engine("none"), [tokens], greedy())[0].tokens


def test_windows_differ_between_layers_of_one_drafter():
    assert BLOCK_WINDOWS["dspark"] == (None, 7)  # two draft groups cross in the tests above
