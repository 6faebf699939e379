"""SpanSet against a set of integers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.base.errors import InvariantError
from tandemkv.base.spans import SpanSet

edges = st.tuples(st.integers(0, 12), st.integers(0, 12))
changes = st.lists(st.tuples(st.booleans(), edges), max_size=8)


def build(steps) -> tuple[SpanSet, set[int]]:
    spans, model = SpanSet(), set()
    for add, (start, stop) in steps:
        (spans.add if add else spans.remove)(start, stop)
        (model.update if add else model.difference_update)(range(start, stop))
        spans.check()
    return spans, model


def members(spans) -> set[int]:
    return {i for a, b in spans for i in range(a, b)}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(changes, edges)
def test_spans_answer_as_a_set_of_integers_does(steps, edge):
    spans, model = build(steps)
    start, stop = edge
    asked = set(range(start, stop))
    assert members(spans) == model
    assert spans.count() == len(model)
    assert spans.covers(start, stop) == (asked <= model)
    assert members(spans.missing(start, stop)) == asked - model
    assert members(spans.within(start, stop)) == asked & model
    assert (start in spans) == (start in model)
    assert bool(spans) == bool(model)
    if model:
        assert (spans.start, spans.stop) == (min(model), max(model) + 1)
    run = spans.start_of_run(stop)
    assert set(range(run, stop)) <= model
    assert run == stop or run - 1 not in model


@settings(max_examples=100, deadline=None, derandomize=True)
@given(changes)
def test_a_copy_does_not_change_with_its_original(steps):
    spans, model = build(steps)
    copy = spans.copy()
    assert copy == spans
    spans.add(3, 9)
    spans.remove(0, 2)
    assert members(copy) == model


def test_touching_spans_are_one_span():
    assert list(SpanSet([(0, 2), (4, 6), (2, 4)])) == [(0, 6)]


def test_the_check_finds_spans_that_touch_or_overlap():
    spans = SpanSet([(0, 2), (4, 6)])
    spans._stops[0] = 4
    with pytest.raises(InvariantError, match="disjoint"):
        spans.check()
