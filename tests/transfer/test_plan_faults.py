"""A test of the tests: each fault breaks one function of offers or plans, and a test catches it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import test_offer
from byte_pools import any_transfer
from msgspec.structs import replace
from test_plan import check_chunks, check_ship

from tandemkv.base.errors import InvariantError
from tandemkv.base.spans import SpanSet
from tandemkv.transfer import offer, plan, shards
from tandemkv.transfer.shards import GroupOffer

Patch = pytest.MonkeyPatch
FAULTS: dict[str, Callable[[Patch], None]] = {}


def fault(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
    FAULTS[patch.__name__] = patch
    return patch


def walks(num: int = 60) -> None:
    for seed in range(num):
        rng = random.Random(seed)
        any_transfer(rng.choice).check()


@fault
def forgets_the_first_head(patch: Patch) -> None:
    side = plan._side
    patch.setattr(plan, "_side", lambda g, s, head, layer: side(g, s, s.first_head, layer))


@fault
def forgets_the_first_layer(patch: Patch) -> None:
    side = plan._side
    patch.setattr(plan, "_side", lambda g, s, head, layer: side(g, s, head, s.first_layer))


@fault
def guesses_the_strides_from_the_shape(patch: Patch) -> None:
    packed = GroupOffer.strides
    patch.setattr(GroupOffer, "strides", lambda g, s: packed(g, replace(s, strides=())))


@fault
def ships_from_every_replica(patch: Patch) -> None:
    routes = plan.routes

    def twice(src, dst):
        found = routes(src, dst)
        return (*found, *(r for r in found if len(src.shards) > 1))

    patch.setattr(plan, "routes", twice)


@fault
def serves_one_rank_of_the_replicas(patch: Patch) -> None:
    routes = plan.routes

    def once(src, dst):
        return tuple({(r.src, r.num_heads): r for r in routes(src, dst)}.values())

    patch.setattr(plan, "routes", once)


@fault
def merges_pages_that_are_neighbours_on_one_side_only(patch: Patch) -> None:
    def pages(self, first, last):
        for number in range(first, last):
            page = self._route.src.page
            s = self._route.src.origin + self._src_pages[number] * page
            d = self._route.dst.origin + self._dst_pages[number] * page
            if self.out and self.out[-1][0] + self.out[-1][2] == s:
                x, y, size = self.out.pop()
                self.out.append((x, y, size + page))
            else:
                self.out.append((s, d, page))

    patch.setattr(plan._Cut, "pages", pages)


@fault
def merges_runs_that_go_on_at_the_source_only(patch: Patch) -> None:
    extend = plan._Cut._extend

    def merging(self, more):
        if self.out and self.out[-1][0] + self.out[-1][2] == more[0][0]:
            s, d, size = self.out.pop()
            more[0] = (s, d, size + more[0][2])
        extend(self, more)

    patch.setattr(plan._Cut, "_extend", merging)


@fault
def moves_whole_pages_of_unlike_sizes(patch: Patch) -> None:
    patch.setattr(plan, "_moves_whole_pages", lambda route: True)


@fault
def ships_whole_pages_for_parts_of_them(patch: Patch) -> None:
    rows = plan._Cut.rows

    def rounded(self, start, stop):
        size = self._route.src.page_size
        rows(self, start - start % size, min(-(-stop // size) * size, stop + size))

    patch.setattr(plan._Cut, "rows", rounded)


@fault
def drops_the_part_before_a_whole_page(patch: Patch) -> None:
    rows = plan._Cut.rows
    patch.setattr(plan._Cut, "rows", lambda self, a, b: None if b - a < 2 else rows(self, a, b))


@fault
def forgets_the_values(patch: Patch) -> None:
    pieces = plan._pieces
    patch.setattr(plan, "_pieces", lambda route, k: pieces(replace(route, num_roles=1), k))


@fault
def counts_pages_of_the_source_in_the_destination(patch: Patch) -> None:
    def swapped(self, start, stop):
        src, dst = self._route.src, self._route.dst
        for slot in range(start, stop):
            s = src.origin + self._src_pages[slot // src.page_size] * src.page
            d = dst.origin + self._dst_pages[slot // dst.page_size] * src.page
            self._run(s + slot % src.page_size * src.slot, d + slot % dst.page_size * dst.slot, 1)

    patch.setattr(plan._Cut, "rows", swapped)


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_the_planner_is_caught(name, monkeypatch):
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, InvariantError)):
        walks()


def test_without_a_fault_the_walks_find_nothing():
    walks(120)


# -- which slots ---------------------------------------------------------------------------------


def ships_what_is_held(patch: Patch) -> None:
    patch.setattr(plan, "wanted", lambda g, n, held, ahead=0: [(plan.first_wanted(g, n, ahead), n)])


def ships_what_nobody_computed(patch: Patch) -> None:
    due = plan.due
    patch.setattr(plan, "due", lambda wanted, covered, sent, grain=1: due(wanted, wanted, sent))


def ships_again_what_was_sent(patch: Patch) -> None:
    due = plan.due
    patch.setattr(
        plan, "due", lambda wanted, covered, sent, grain=1: due(wanted, covered, SpanSet(), grain)
    )


def keeps_the_last_part_of_a_page(patch: Patch) -> None:
    due = plan.due
    patch.setattr(plan, "due", lambda wanted, covered, sent, grain=1: due(wanted, covered, sent, 4))


def ships_one_slot_less_of_a_window(patch: Patch) -> None:
    first = plan.first_wanted
    patch.setattr(plan, "first_wanted", lambda g, n, ahead=0: first(g, n, ahead) + bool(g.window))


def forgets_that_the_pass_starts_early(patch: Patch) -> None:
    first = plan.first_wanted
    patch.setattr(plan, "first_wanted", lambda group, n, ahead=0: first(group, n))


SLOT_FAULTS = [
    ships_what_is_held,
    ships_what_nobody_computed,
    ships_again_what_was_sent,
    keeps_the_last_part_of_a_page,
    ships_one_slot_less_of_a_window,
    forgets_that_the_pass_starts_early,
]


def slots_against_brute_force(num: int = 200) -> None:
    def some(limit: int) -> SpanSet:
        return SpanSet((s, s + 1) for s in range(limit) if rng.random() < 0.5)

    for seed in range(num):
        rng = random.Random(seed)
        window, ahead = rng.choice([None, 1, 3, 5]), rng.randrange(3)
        check_ship(rng.randrange(13), window, ahead, rng.random() < 0.5, some(16), some(16))
        check_chunks(some(40), [some(40) for _ in range(rng.randrange(4))], rng.choice([1, 4, 16]))


@pytest.mark.parametrize("patch", SLOT_FAULTS, ids=[patch.__name__ for patch in SLOT_FAULTS])
def test_every_fault_in_what_is_shipped_is_caught(patch, monkeypatch):
    patch(monkeypatch)
    with pytest.raises(AssertionError):
        slots_against_brute_force()


def test_without_a_fault_the_slots_are_those_of_brute_force():
    slots_against_brute_force()


# -- who fits whom -------------------------------------------------------------------------------


def lets_rows_of_another_width_through(patch: Patch) -> None:
    patch.setattr(offer, "_ROW_FIELDS", ("num_kv_heads", "dtype"))


def lets_another_model_through(patch: Patch) -> None:
    patch.setattr(offer, "_WORKER_FIELDS", ("version", "transport"))


def forgets_why_a_drafter_is_left_out(patch: Patch) -> None:
    patch.setattr(offer, "_leave_out", lambda *ask: None)


def ships_for_my_own_window(patch: Patch) -> None:
    def pair(mine, theirs, index, peer, ahead):
        a, b = mine.groups[index], theirs.groups[peer]
        return offer.GroupPair(index, peer, a, b, a.layer_group(), ahead)

    patch.setattr(offer, "_pair", pair)


def believes_what_shards_claim(patch: Patch) -> None:
    patch.setattr(shards, "_fault_of_shards", lambda group: "")


def gives_every_rank_the_first_heads(patch: Patch) -> None:
    cut = shards.shards_of
    patch.setattr(
        test_offer,
        "shards_of",
        lambda g, num=1: tuple(replace(s, first_head=0) for s in cut(g, num)),
    )


OFFER_FAULTS = [
    (
        lets_rows_of_another_width_through,
        lambda: test_offer.test_target_groups_that_differ_are_refused_by_field_and_both_values(
            "head_dim", 0, 2
        ),
    ),
    (
        lets_another_model_through,
        lambda: test_offer.test_workers_that_differ_are_refused_by_field_and_both_values(
            {"model_fingerprint": "another"}, "another"
        ),
    ),
    (
        forgets_why_a_drafter_is_left_out,
        lambda: test_offer.test_every_configuration_is_decided_before_memory_is_touched(
            ("a", "b"), (True, True)
        ),
    ),
    (
        ships_for_my_own_window,
        lambda: test_offer.test_the_narrower_window_of_a_draft_group_is_shipped(None, 12),
    ),
    (
        believes_what_shards_claim,
        lambda: test_offer.test_a_malformed_target_group_is_refused_by_what_is_wrong(
            {"shards": ()}, "0 shards"
        ),
    ),
    (
        gives_every_rank_the_first_heads,
        lambda: test_offer.test_ranks_share_out_the_heads_or_hold_replicas(8, 2),
    ),
]


@pytest.mark.parametrize(
    ("patch", "unit_test"), OFFER_FAULTS, ids=[patch.__name__ for patch, _ in OFFER_FAULTS]
)
def test_every_fault_of_the_match_is_caught(patch, unit_test, monkeypatch):
    unit_test()
    patch(monkeypatch)
    with pytest.raises(AssertionError):
        unit_test()
