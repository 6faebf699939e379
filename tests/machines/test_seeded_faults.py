"""A test of the tests: each fault breaks one law in one function; the random walk catches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from driving import LAYOUTS, random_walk
from kv import test_branch_points, test_coverage, test_keys, test_manager, test_publish

from tandemkv.base.errors import InvariantError
from tandemkv.base.ids import NO_PAGE
from tandemkv.base.spans import SpanSet
from tandemkv.kv import coverage, intent, manager, tree
from tandemkv.kv.keys import Namespace
from tandemkv.kv.layout import LayerGroup
from tandemkv.kv.manager import KVManager
from tandemkv.kv.pool import PagePool
from tandemkv.kv.publish import Publisher
from tandemkv.kv.sequence import Sequence
from tandemkv.kv.tree import Run, Tree

Patch = pytest.MonkeyPatch
FAULTS: dict[str, Callable[[Patch], None]] = {}
WALKS = 40


def fault(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
    FAULTS[patch.__name__] = patch
    return patch


def around(patch: Patch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace owner.name by wrapper(original, *args, **kwargs)."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    patch.setattr(owner, name, changed)


# -- holding and dropping ---------------------------------------------------------------------


@fault
def a_claim_forgets_to_hold(patch: Patch) -> None:
    patch.setattr(PagePool, "hold_all", lambda self, runs: None)


@fault
def a_copy_source_is_not_pinned(patch: Patch) -> None:
    def take(original, self, *args):
        claim = original(self, *args)
        self._publisher.unpin(claim.seq)
        return claim

    around(patch, KVManager, "_take", take)


@fault
def copies_are_forgotten(patch: Patch) -> None:
    def take(original, self, *args):
        claim = original(self, *args)
        claim.copies = ()
        return claim

    around(patch, KVManager, "_take", take)


@fault
def a_partial_block_is_shared_and_not_copied(patch: Patch) -> None:
    def fill(original, self, seq, group, whole, copies):
        original(self, seq, group, whole, copies)
        per = self.layout.block_size // self.layout.groups[group.group].page_size
        for own in group.own:
            if own.source is not None:
                at = own.block * per
                self.pools[group.group].give(seq.pages[group.group][at : at + own.count])
                seq.pages[group.group][at : at + own.count] = own.source.pages[: own.count]
        copies.clear()

    around(patch, KVManager, "_fill_table", fill)


@fault
def a_shared_page_is_written(patch: Patch) -> None:
    def make(original, *args, **kwargs):
        group = original(*args, **kwargs)
        for own in group.own:
            if own.source is not None and own.source.full is False:
                group.shares[own.block - group.first_block] = own.source
        return group

    around(patch, intent, "_group_intent", make)


@fault
def the_last_page_of_a_release_leaks(patch: Patch) -> None:
    around(patch, PagePool, "give", lambda original, self, pages: original(self, list(pages)[:-1]))


@fault
def a_page_is_freed_twice(patch: Patch) -> None:
    def give(original, self, pages):
        pages = list(pages)
        original(self, pages + pages[-1:])

    around(patch, PagePool, "give", give)


@fault
def an_orphaned_run_is_not_freed(patch: Patch) -> None:
    def drop(original, self, run, **kwargs):
        if run.attached or run.refs > 1:
            original(self, run, **kwargs)
        else:
            run.refs -= 1

    around(patch, PagePool, "drop", drop)


@fault
def the_path_is_not_pinned(patch: Patch) -> None:
    def move(self, seq, node):
        seq.tip.pins -= 1
        seq.tip = node

    patch.setattr(Publisher, "_move_tip", move)


@fault
def an_empty_block_stays_in_the_tree(patch: Patch) -> None:
    patch.setattr(Tree, "prune", lambda self, node: None)


# -- room and atomicity -----------------------------------------------------------------------


@fault
def a_claim_counts_pages_it_will_hold_as_room(patch: Patch) -> None:
    patch.setattr(intent.GroupIntent, "need", lambda self: self.new_pages)


@fault
def a_refused_claim_changes_something(patch: Patch) -> None:
    def claim(original, self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        if out is None and self.pools[0].free:
            self.pools[0].free.pop()
        return out

    around(patch, KVManager, "claim", claim)


@fault
def draft_pages_are_not_reserved_ahead(patch: Patch) -> None:
    def reserve(original, self, seq, num_slots):
        ok = original(self, seq, num_slots)
        for g in self.layout.draft_groups if ok else ():
            size = self.layout.groups[g].page_size
            while len(seq.pages[g]) * size >= num_slots + size:
                self.pools[g].give([seq.pages[g].pop()])
        return ok

    around(patch, KVManager, "reserve", reserve)


# -- eviction ---------------------------------------------------------------------------------


@fault
def parents_are_evicted_before_leaves(patch: Patch) -> None:
    def drop(original, self, run, **kwargs):
        original(self, run, **kwargs)
        if run in self.lru:
            self.lru.move_to_end(run, last=False)

    around(patch, PagePool, "drop", drop)


@fault
def a_block_that_lost_its_target_keeps_draft_pages(patch: Patch) -> None:
    def evict(self, run):
        self.pools[run.group].detach(run)
        self.tree.prune(run.node)

    patch.setattr(Publisher, "evict", evict)


@fault
def an_evicted_run_can_still_be_matched(patch: Patch) -> None:
    def detach(original, self, run):
        original(self, run)
        run.node.runs[run.group] = run

    around(patch, PagePool, "detach", detach)


# -- what is published ------------------------------------------------------------------------


@fault
def one_row_too_many_is_published(patch: Patch) -> None:
    def partial(original, self, seq):
        if seq.committed < len(seq.tokens) and seq.reserved > seq.committed:
            for g in self.layout.target_groups:
                seq.coverage[g].add(seq.committed, seq.committed + 1)
            seq.committed += 1
        original(self, seq)

    around(patch, Publisher, "publish_partial", partial)


@fault
def rejected_rows_are_published(patch: Patch) -> None:
    def canonical(original, self, g, start, stop):
        ahead = [(a, min(b + 1, stop)) for a, b in original(self, g, start, stop)]
        return tuple(SpanSet(ahead))

    around(patch, Sequence, "canonical", canonical)


@fault
def rows_computed_past_a_gap_are_published(patch: Patch) -> None:
    def cover(original, self, seq, g, start, stop):
        original(self, seq, g, start, stop)
        seq.tainted[g].remove(start, stop)

    around(patch, KVManager, "_cover", cover)


@fault
def a_gap_in_coverage_is_closed(patch: Patch) -> None:
    def within(original, self, start, stop):
        spans = original(self, start, stop)
        return [(spans[0][0], spans[-1][1])] if spans else []

    around(patch, SpanSet, "within", within)


@fault
def a_published_page_is_still_the_sequences_own(patch: Patch) -> None:
    patch.setattr(Sequence, "set_run", lambda self, g, block, run: None)


@fault
def a_duplicate_block_is_not_taken_over(patch: Patch) -> None:
    patch.setattr(Publisher, "_swap", lambda self, seq, run, g, b: None)


@fault
def pages_with_planned_writes_are_published(patch: Patch) -> None:
    patch.setattr(Sequence, "pending_any", False)


# -- what is matched --------------------------------------------------------------------------


@fault
def a_partial_match_is_one_token_too_long(patch: Patch) -> None:
    around(
        patch, tree, "common_tokens", lambda original, a, b: min(original(a, b) + 1, len(b) // 4)
    )


@fault
def a_partial_match_is_taken_whole(patch: Patch) -> None:
    def match(original, self, packed, namespace):
        found = original(self, packed, namespace)
        if found.partial is not None:
            found.end = min(found.partial.stop, len(packed) // 4)
        return found

    around(patch, Tree, "match", match)


@fault
def namespaces_share_a_tree(patch: Patch) -> None:
    same = Namespace()
    around(patch, Tree, "root", lambda original, self, namespace: original(self, same))
    around(patch, Tree, "match", lambda original, self, packed, ns: original(self, packed, same))


@fault
def keys_forget_their_parent(patch: Patch) -> None:
    around(patch, tree, "block_key", lambda original, parent, tokens: original(b"", tokens))
    patch.setattr(Tree, "check", lambda self: _keys_are_unique(self))


def _keys_are_unique(the_tree: Tree) -> None:
    keys = [node.key for node in the_tree.nodes()]
    if len(set(keys)) != len(keys):
        raise InvariantError("two prefixes share a key")


# -- the claim rule ---------------------------------------------------------------------------


@fault
def the_tail_does_not_start_early(patch: Patch) -> None:
    def plan(original, layout, found, num_rows, **kwargs):
        out = original(layout, found, num_rows, **kwargs)
        late = (out.end, num_rows)
        spans = (*out.holes, late) if late[0] < late[1] else out.holes
        return coverage.ClaimPlan(
            out.end, spans, out.draft_compute, (), out.filled, out.masked, late
        )

    around(patch, manager, "plan_claim", plan)


@fault
def a_hole_is_run_without_its_lookahead(patch: Patch) -> None:
    def fill(original, self, g, a, b):
        ahead = self.layout.groups[g].lookahead
        original(self, g, a + ahead, b)

    around(patch, coverage._Holes, "_fill", fill)


@fault
def holes_are_left_unfilled_without_a_word(patch: Patch) -> None:
    patch.setattr(coverage._Holes, "_fill", lambda self, g, a, b: None)


@fault
def the_match_ends_one_row_late(patch: Patch) -> None:
    def end(original, layout, found, limit):
        return min(limit, original(layout, found, limit) + 1)

    around(patch, coverage, "match_end", end)


@fault
def the_target_window_is_off_by_one(patch: Patch) -> None:
    for module in (coverage, intent):
        around(
            patch,
            module,
            "read_from",
            lambda original, group, p: original(group, p) + (group.window is not None and p > 1),
        )


@fault
def the_draft_window_is_off_by_one(patch: Patch) -> None:
    def needed(original, self, n):
        return original(self, n) + (self.window is not None)

    around(patch, LayerGroup, "first_needed", needed)


@fault
def a_windowed_target_is_not_asked_what_a_hole_reads(patch: Patch) -> None:
    patch.setattr(coverage._Holes, "_obstacle", lambda self, g, known, a, b: None)


@fault
def a_window_slides_one_block_too_far(patch: Patch) -> None:
    def slide(original, self, seq, caching):
        original(self, seq, caching)
        for g, group in enumerate(self.layout.groups):
            b = seq.first_block[g]
            if group.window is not None and (b + 1) * self.block <= seq.published:
                self._give_blocks(seq, g, b, b + 1)
                seq.first_block[g] = b + 1

    around(patch, Publisher, "slide", slide)


# -- what is written --------------------------------------------------------------------------


@fault
def draft_rows_are_stored_without_their_lookahead(patch: Patch) -> None:
    def writes(self, start, stop):
        return tuple(
            tuple(covered.missing(max(start, group.lookahead), stop))
            for covered, group in zip(self.coverage, self.layout.groups, strict=True)
        )

    patch.setattr(Sequence, "writes", writes)


@fault
def held_rows_are_written_again(patch: Patch) -> None:
    def writes(self, start, stop):
        return tuple(((start + g.lookahead, stop + g.lookahead),) for g in self.layout.groups)

    patch.setattr(Sequence, "writes", writes)


@fault
def committed_rows_are_covered_one_short(patch: Patch) -> None:
    def cover(original, self, seq, g, start, stop):
        original(self, seq, g, start, stop - 1)

    around(patch, KVManager, "_cover", cover)


@fault
def a_missing_page_becomes_page_zero(patch: Patch) -> None:
    def fill(original, self, seq, group, *rest):
        original(self, seq, group, *rest)
        table = seq.pages[group.group]
        table[:] = [0 if page == NO_PAGE else page for page in table]

    around(patch, KVManager, "_fill_table", fill)


@fault
def a_run_lists_its_pages_in_another_order(patch: Patch) -> None:
    def run_full(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.pages = list(reversed(self.pages))

    around(patch, Run, "__init__", run_full)


def caught(patch: Callable[[Patch], None] | None) -> str | None:
    """The first error of the walks, or None."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if patch is not None:
            patch(monkeypatch)
        for seed in range(WALKS):
            for name in LAYOUTS:
                try:
                    random_walk(name, seed)
                except (AssertionError, InvariantError) as error:
                    return f"{name}/{seed}: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", FAULTS)
def test_every_seeded_fault_is_caught(name):
    assert caught(FAULTS[name]) is not None


# -- faults that cost room or speed: no read is wrong, so a unit test must see them --------------


def reserve_takes_before_it_knows(patch: Patch) -> None:
    def reserve(self, seq, num_slots):
        for g, group in enumerate(self.layout.groups):
            need = -(-(num_slots + group.lookahead) // group.page_size) - len(seq.pages[g])
            if need > self.pools[g].available:
                return False
            if need > 0:
                self._make_room(g, need)
                self.pools[g].take(need)
        return False

    around(patch, KVManager, "reserve", lambda original, *args: original(*args) or reserve(*args))


def claims_give_up_when_copies_do_not_fit(patch: Patch) -> None:
    def intents(original, self, ask):
        yield next(original(self, ask))

    around(patch, KVManager, "_intents", intents)


def a_better_covered_run_is_thrown_away(patch: Patch) -> None:
    def merge(original, self, seq, node, g, b):
        if node.runs[g] is None:
            original(self, seq, node, g, b)

    around(patch, Publisher, "_merge_group", merge)


def a_better_covered_leaf_is_superseded(patch: Patch) -> None:
    patch.setattr("tandemkv.kv.publish.covers_all", lambda spans, wanted: True)


def leaves_pile_up(patch: Patch) -> None:
    patch.setattr(Publisher, "_supersede", lambda self, parent, node: None)


def the_last_block_is_dropped_on_every_hit(patch: Patch) -> None:
    def end(original, layout, found, limit):
        return original(layout, found, limit) // layout.block_size * layout.block_size

    around(patch, coverage, "match_end", end)


def partial_blocks_are_not_published(patch: Patch) -> None:
    patch.setattr(Publisher, "publish_partial", lambda self, seq: None)


def a_hole_is_filled_for_one_request_only(patch: Patch) -> None:
    patch.setattr(Publisher, "_publish_dirty", lambda self, seq: seq.dirty.clear())


def a_hole_is_filled_for_this_requests_tail_only(patch: Patch) -> None:
    def fill(original, self, g, a, b):
        needed = self.layout.groups[g].first_needed(self.num_rows)
        if needed < b:
            original(self, g, max(a, needed), b)

    around(patch, coverage._Holes, "_fill", fill)


def a_claim_holds_what_lies_behind_the_window(patch: Patch) -> None:
    patch.setattr(intent, "_lowest_slot", lambda layout, g, plan: 0)


def the_length_is_reserved_in_a_windowed_group(patch: Patch) -> None:
    patch.setattr(intent, "windowed_rows", lambda layout, group, end, rows: max(rows, end))


def windowed_groups_are_charged_the_whole_length(patch: Patch) -> None:
    patch.setattr(Publisher, "slide", lambda self, seq, caching: None)


def rows_behind_the_window_are_evicted_last(patch: Patch) -> None:
    around(patch, PagePool, "drop", lambda original, self, run, **_: original(self, run))


def the_fast_policy_recomputes(patch: Patch) -> None:
    patch.setattr(coverage, "BY_POLICY", None)


def a_gap_is_not_counted(patch: Patch) -> None:
    patch.setattr(manager, "tally", lambda counters, name, amount: None)


def computed_rows_are_not_rewound(patch: Patch) -> None:
    patch.setattr(KVManager, "rewind", lambda self, seq: None)


def keys_leave_out_the_tags(patch: Patch) -> None:
    patch.setattr("tandemkv.kv.keys._field", lambda tag, value: value.encode())


UNIT_FAULTS = [
    (
        reserve_takes_before_it_knows,
        test_manager.test_a_refused_reservation_changes_nothing,
    ),
    (
        claims_give_up_when_copies_do_not_fit,
        test_manager.test_a_lone_request_that_fits_an_empty_cache_is_served_from_a_full_one,
    ),
    (
        a_better_covered_run_is_thrown_away,
        test_publish.test_better_coverage_replaces_less_and_never_the_other_way_round,
    ),
    (
        a_better_covered_leaf_is_superseded,
        test_publish.test_a_leaf_with_better_coverage_than_its_extension_stays,
    ),
    (leaves_pile_up, test_publish.test_a_longer_block_supersedes_the_partial_leaf_it_extends),
    (the_last_block_is_dropped_on_every_hit, lambda: test_manager.test_a_hit_loses_no_block(64)),
    (
        partial_blocks_are_not_published,
        test_publish.test_a_running_request_publishes_whole_blocks_and_a_finished_one_its_last_rows,
    ),
    (
        a_hole_is_filled_for_one_request_only,
        test_publish.test_a_later_request_fills_the_hole_and_the_one_after_it_pays_nothing,
    ),
    (
        a_hole_is_filled_for_this_requests_tail_only,
        lambda: test_branch_points.test_a_short_tail_finds_what_a_longer_one_filled(4),
    ),
    (
        a_claim_holds_what_lies_behind_the_window,
        lambda: test_branch_points.test_a_live_sequence_holds_its_window_whatever_the_context(
            1024, 4, 64
        ),
    ),
    (
        the_length_is_reserved_in_a_windowed_group,
        lambda: test_branch_points.test_admission_charges_the_window_and_not_the_length(4),
    ),
    (
        windowed_groups_are_charged_the_whole_length,
        test_publish.test_a_windowed_group_is_charged_its_window_and_not_the_length,
    ),
    (
        rows_behind_the_window_are_evicted_last,
        test_publish.test_rows_that_left_every_window_are_the_first_to_be_evicted,
    ),
    (
        the_fast_policy_recomputes,
        test_coverage.test_the_fast_policy_masks_what_is_needed_and_says_why,
    ),
    (a_gap_is_not_counted, test_manager.test_the_counters_tell_hits_gaps_and_recomputed_rows),
    (
        computed_rows_are_not_rewound,
        test_manager.test_rewinding_forgets_what_was_computed_and_not_committed,
    ),
    (
        keys_leave_out_the_tags,
        test_keys.test_an_adapter_and_a_salt_of_the_same_name_have_different_keys,
    ),
]


@pytest.mark.parametrize(
    ("patch", "unit_test"), UNIT_FAULTS, ids=[patch.__name__ for patch, _ in UNIT_FAULTS]
)
def test_every_fault_that_costs_room_or_speed_is_caught(patch, unit_test, monkeypatch):
    unit_test()
    patch(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, KeyError)):
        unit_test()


def test_without_a_fault_the_walks_find_nothing():
    for seed in range(WALKS // 8):
        for name in LAYOUTS:
            random_walk(name, seed)
