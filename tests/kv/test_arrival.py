"""Rows that another worker computed: opened, accepted, published, and found by the next claim."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.base.errors import InvariantError
from tandemkv.kv.explain import Provenance
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.kv.manager import KVManager
from tandemkv.transfer.plan import wanted


def group(name: str, domain: Domain, page: int, window: int | None, ahead: int) -> LayerGroup:
    return LayerGroup(
        name=name,
        domain=domain,
        layers=(0,),
        num_kv_heads=1,
        head_dim=4,
        page_size=page,
        window=window,
        lookahead=ahead,
        pointwise=domain is Domain.DRAFT,
    )


TARGET = group("target", Domain.TARGET, 8, None, 0)
SLIDING = group("sliding", Domain.TARGET, 4, 12, 0)
EAGLE = group("eagle", Domain.DRAFT, 4, None, 1)
BLOCK = group("block", Domain.DRAFT, 2, 10, 0)
LAYOUTS = {
    "eagle": (TARGET, EAGLE),
    "block": (TARGET, BLOCK),
    "sliding": (TARGET, SLIDING, EAGLE),
    "all": (TARGET, SLIDING, EAGLE, BLOCK),
}


def manager(name: str, pages: int = 64) -> KVManager:
    layout = Layout(block_size=8, groups=LAYOUTS[name])
    return KVManager(layout, [pages * 8 // g.page_size for g in layout.groups])


def wants(kv: KVManager, seq, n: int) -> list[list[tuple[int, int]]]:
    ahead = kv.layout.lookahead
    return [wanted(g, n, seq.coverage[i], ahead=ahead) for i, g in enumerate(kv.layout.groups)]


def receive(kv: KVManager, tokens: list[int]) -> tuple[int, list[list[tuple[int, int]]]]:
    """A whole hand-off: what was held, what was asked for."""
    claim = kv.open(tokens)
    assert claim is not None
    kv.check()
    kv.copied(claim.seq)
    asked = wants(kv, claim.seq, len(tokens))
    kv.accept(claim.seq, len(tokens), asked)
    kv.check()
    kv.finish(claim.seq)
    kv.check()
    return claim.plan.end, asked


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 31, 32, 61])
def test_a_received_prompt_resumes_as_one_computed_here(name, n):
    kv = manager(name)
    tokens = list(range(n))
    held, _ = receive(kv, tokens)
    assert held == 0
    claim = kv.claim([*tokens, 99], resume=True)
    assert claim is not None
    kv.check()
    assert claim.plan.end == n
    assert claim.plan.holes == ()
    assert claim.plan.masked == ()
    ahead = kv.layout.lookahead
    assert sum(b - a for a, b in claim.plan.compute) == min(n, ahead)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_second_turn_asks_for_its_suffix_alone(name):
    kv = manager(name)
    receive(kv, list(range(40)))
    held, asked = receive(kv, list(range(61)))
    assert held == 40
    for spans, g in zip(asked, kv.layout.groups, strict=True):
        assert all(start >= 40 for start, _ in spans), g.name
    assert asked[0] == [(40, 61)]


def test_a_windowed_group_opens_at_its_last_window_and_holds_nothing_before_it():
    kv = manager("all")
    claim = kv.open(list(range(61)))
    assert claim is not None
    for i, g in enumerate(kv.layout.groups):
        if g.window is not None:
            held = sum(page >= 0 for page in claim.seq.pages[i])
            assert held * g.page_size <= g.window + kv.layout.lookahead + 2 * kv.layout.block_size


def test_where_received_rows_came_from_is_said():
    kv = manager("eagle")
    claim = kv.open(list(range(20)))
    assert claim is not None
    kv.accept(claim.seq, 20, wants(kv, claim.seq, 20))
    target, draft = kv.explain(claim.seq)
    assert [(i.start, i.stop, i.provenance) for i in target] == [(0, 20, Provenance.RECEIVED)]
    assert [(i.start, i.stop, i.provenance) for i in draft] == [(1, 20, Provenance.RECEIVED)]


def test_draft_rows_that_did_not_arrive_are_a_hole_that_the_claim_fills():
    kv = manager("block")
    claim = kv.open(list(range(40)))
    assert claim is not None
    asked = wants(kv, claim.seq, 40)
    kv.accept(claim.seq, 40, [asked[0], []])
    kv.finish(claim.seq)
    kv.check()
    resumed = kv.claim([*range(40), 99], resume=True)
    assert resumed is not None
    assert resumed.plan.recomputed["holes"] == 9


def test_target_rows_that_did_not_arrive_are_refused_and_what_did_is_kept():
    kv = manager("eagle")
    claim = kv.open(list(range(40)))
    assert claim is not None
    asked = wants(kv, claim.seq, 40)
    with pytest.raises(InvariantError, match="did not all arrive"):
        kv.accept(claim.seq, 40, [[(0, 33)], asked[1]])
    assert claim.seq.committed == 0
    kv.accept(claim.seq, 33, [[(0, 33)], [(1, 33)]])
    kv.finish(claim.seq)
    kv.check()
    resumed = kv.claim([*range(40), 99], resume=True)
    assert resumed is not None
    assert resumed.plan.end == 33


def test_a_hand_off_that_is_given_up_leaves_nothing_behind():
    kv = manager("all")
    before = [u.free for u in kv.usage()]
    claim = kv.open(list(range(50)))
    assert claim is not None
    kv.release(claim.seq)
    kv.check()
    assert [u.free for u in kv.usage()] == before


def test_without_room_nothing_is_taken():
    kv = manager("eagle", pages=6)
    first = kv.open(list(range(30)))
    assert first is not None
    assert kv.open(list(range(100, 130))) is None
    kv.check()


def test_a_hand_off_counts_as_no_query():
    kv = manager("eagle")
    receive(kv, list(range(30)))
    assert kv.stats.prefix_queries_tokens == 0
    assert kv.stats.draft_gap_tokens == {}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_hand_offs_among_claims_keep_every_law(data):
    name = data.draw(st.sampled_from(sorted(LAYOUTS)))
    kv = manager(name, pages=data.draw(st.integers(8, 40)))
    for _ in range(data.draw(st.integers(1, 8))):
        length = data.draw(st.integers(1, 40))
        branch = data.draw(st.integers(0, length))
        tokens = [1] * branch + [2] * (length - branch)
        if data.draw(st.booleans()):
            claim = kv.open(tokens)
            if claim is None:
                continue
            kv.check()
            kv.copied(claim.seq)
            if data.draw(st.booleans()):
                kv.accept(claim.seq, length, wants(kv, claim.seq, length))
                kv.check()
                kv.finish(claim.seq)
            else:
                kv.release(claim.seq)
        else:
            claim = kv.claim([*tokens, 3], resume=True)
            if claim is None:
                continue
            kv.copied(claim.seq)
            kv.release(claim.seq)
        kv.check()
