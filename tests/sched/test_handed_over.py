"""A prompt computed on one scheduler, decoded on another: rows as digests, read back and checked.

The rows that cross are those that transfer.plan names, copied cell by cell; the receiving side
draws every token from rows it reads, so a wrong or missing one cannot pass.
"""

from __future__ import annotations

import pytest
from scheduling import Rig, block_drafter_layout, eagle_layout, two_drafts_layout, windowed_layout

from tandemkv.base.errors import InvariantError
from tandemkv.base.sampling import SamplingParams
from tandemkv.sched.request import Request, RequestEvent
from tandemkv.transfer.plan import wanted

LAYOUTS = {
    "eagle": eagle_layout,
    "windowed target": windowed_layout,
    "block drafter": block_drafter_layout,
    "two drafts": two_drafts_layout,
}


def rig(name: str, pages: int = 120, **options) -> Rig:
    layout = LAYOUTS[name]()
    return Rig(layout, [pages * 4 // g.page_size for g in layout.groups], **options)


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt) % 11 for i in range(n)]


def asked(layout, g, n, held):
    return wanted(layout.groups[g], n, held, ahead=layout.lookahead)


def hand_over(sender: Rig, receiver: Rig, tokens: list[int], *, lose=(), **params) -> Request:
    """Prefill on one side, ship, resume on the other. lose: groups whose rows do not arrive."""
    request = Request(
        id=f"p{len(sender.requests)}",
        prompt=tokens,
        params=SamplingParams(temperature=0.0, max_tokens=1, num_draft_tokens=0),
        keep=True,
    )
    sender.scheduler.add(request)
    sender.requests[request.id], sender.outputs[request.id] = request, []
    while request.id not in sender.ends:
        sender.step()
    seq = sender.scheduler.take_aside(request.id)
    assert seq is not None
    sender.scheduler.lent.add(seq)
    sender.settle()
    while (claim := receiver.manager.open(tokens)) is None:
        receiver.step()
    receiver.scheduler.lent.add(claim.seq)
    receiver.settle()
    for copy in claim.copies:
        cells = receiver.model.cells[copy.group]
        for i in range(receiver.layout.groups[copy.group].page_size):
            cells.pop((copy.dst, i), None)
            if (copy.src, i) in cells:
                cells[copy.dst, i] = cells[copy.src, i]
    receiver.manager.copied(claim.seq)
    n, received = len(tokens), []
    for g, spec in enumerate(receiver.layout.groups):
        spans = asked(receiver.layout, g, n, claim.seq.coverage[g])
        spans = [] if g in lose else spans
        for start, stop in spans:
            assert seq.coverage[g].covers(start, stop), (spec.name, start, stop)
            for slot in range(start, stop):
                src = seq.pages[g][slot // spec.page_size], slot % spec.page_size
                dst = claim.seq.pages[g][slot // spec.page_size], slot % spec.page_size
                receiver.model.cells[g][dst] = sender.model.cells[g][src]
        received.append(spans)
    receiver.manager.accept(claim.seq, n, received)
    receiver.settle()
    receiver.scheduler.lent.discard(claim.seq)
    receiver.manager.finish(claim.seq)
    sender.scheduler.lent.discard(seq)
    sender.manager.finish(seq)
    sender.settle()
    resumed = Request(
        id=f"d{len(receiver.requests)}",
        prompt=tokens,
        params=SamplingParams(temperature=0.0, **({"max_tokens": 12} | params)),
    )
    receiver.requests[resumed.id], receiver.outputs[resumed.id] = resumed, []
    receiver.scheduler.add_handed_over(resumed, request.output, cached_tokens=3)
    receiver.settle()
    return resumed


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("n", [1, 3, 4, 5, 16, 23, 40])
def test_the_text_is_the_one_of_a_single_worker_and_no_draft_is_lost(name, n):
    sender, receiver = rig(name), rig(name, accept=256)
    request = hand_over(sender, receiver, prompt(n))
    receiver.run()
    receiver.check_text(request)
    assert request.cached_tokens == min(3, n)
    assert receiver.manager.stats.draft_gap_tokens == {}
    assert request.acceptance.num_accepted == request.acceptance.num_drafts > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_receiver_computes_the_lookahead_alone(name):
    sender, receiver = rig(name), rig(name)
    hand_over(sender, receiver, prompt(30), max_tokens=2)
    receiver.run()
    assert receiver.scheduler.stats.num_prefill_rows == receiver.layout.lookahead
    assert receiver.scheduler.stats.resumed == {"warm": 1, "partial": 0, "cold": 0}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_second_turn_and_a_hit_on_the_senders_side_change_nothing(name):
    sender, receiver = rig(name), rig(name, accept=256)
    first = hand_over(sender, receiver, prompt(21))
    receiver.run()
    turn = [*first.prompt, *first.output, *prompt(6, 5)]
    second = hand_over(sender, receiver, turn)
    receiver.run()
    receiver.check_text(second)
    again = hand_over(sender, receiver, turn)
    receiver.run()
    receiver.check_text(again)
    assert receiver.manager.stats.draft_gap_tokens == {}
    assert second.acceptance.num_accepted == second.acceptance.num_drafts


def test_lost_draft_rows_are_computed_again_by_the_receiver():
    sender, receiver = rig("block drafter"), rig("block drafter", accept=256)
    request = hand_over(sender, receiver, prompt(30), lose={1})
    receiver.run()
    receiver.check_text(request)
    assert receiver.manager.stats.target_recomputed_tokens["holes"] == 4


def test_a_first_token_that_stops_ends_the_request_at_once():
    sender, receiver = rig("eagle"), rig("eagle")
    request = hand_over(sender, receiver, prompt(9), max_tokens=1)
    receiver.run()
    receiver.check_text(request)
    assert request.finish_reason == "length"


def test_several_hand_offs_share_small_pools_with_other_requests():
    sender, receiver = rig("eagle"), rig("eagle", pages=22)
    for salt in range(4):
        receiver.add(prompt(12, salt + 20), max_tokens=10)
    for _ in range(3):
        receiver.step()
    requests = []
    for salt in range(3):
        requests.append(hand_over(sender, receiver, prompt(14, salt), max_tokens=8))
        receiver.step()
    receiver.run()
    for request in (*requests, *(r for i, r in receiver.requests.items() if i[0] == "r")):
        receiver.check_text(request)


def test_what_is_read_from_elsewhere_is_suspended_for_nobody():
    rig_ = rig("eagle", pages=9, max_batch_tokens=8)
    kept = Request(
        id="kept",
        prompt=prompt(16),
        params=SamplingParams(temperature=0.0, max_tokens=8),
        keep=True,
    )
    first = rig_.add(prompt(8, 4), max_tokens=12)
    rig_.scheduler.add(kept)
    rig_.requests["kept"], rig_.outputs["kept"] = kept, []
    while len(rig_.ends) < 2:
        rig_.step()
    assert kept.num_preemptions == 0
    assert first.finish_reason == "length"
    seq = rig_.scheduler.take_aside("kept")
    assert seq is not None
    rig_.manager.finish(seq)
    rig_.settle()


def test_a_sequence_that_nobody_holds_is_an_error():
    rig_ = rig("eagle")
    claim = rig_.manager.open(prompt(8))
    assert claim is not None
    with pytest.raises(InvariantError, match="the cache knows"):
        rig_.scheduler.check()


def test_only_a_waiting_request_is_handed_over():
    request = Request(id="x", prompt=[1])
    request.handle(RequestEvent.ADMIT)
    with pytest.raises(InvariantError, match="hand_over is illegal"):
        request.handle(RequestEvent.HAND_OVER)
