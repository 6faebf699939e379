"""The choice of workers: who is never chosen, what makes one more wanted, and who breaks a tie."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemkv.serve.routing import (
    REQUEST_TOKENS,
    SHIPPED,
    Load,
    Missing,
    View,
    choose,
    cost,
    is_one_prompt,
)

counts = st.integers(0, 5000)
loads = st.builds(
    Load, running=st.integers(0, 40), waiting=st.integers(0, 40), queued_tokens=counts
)
rows = st.none() | st.builds(Missing, target=counts, draft=counts)


def views_of(role: str) -> st.SearchStrategy[list[View]]:
    view = st.fixed_dictionaries(
        {
            "alive": st.booleans(),
            "resting": st.booleans(),
            "load": loads,
            "missing": rows,
            "used": st.integers(0, 9),
        }
    )
    return st.lists(view, max_size=4).map(
        lambda found: [View(url=f"{role}{i}", role=role, **v) for i, v in enumerate(found)]
    )


fleets = st.tuples(views_of("prefill"), views_of("decode")).map(lambda pair: [*pair[0], *pair[1]])


def by_url(views: list[View], url: str | None) -> View:
    return next(view for view in views if view.url == url)


def changed(views: list[View], url: str, **fields: Any) -> list[View]:
    return [msgspec.structs.replace(view, **fields) if view.url == url else view for view in views]


@given(fleets, counts)
def test_a_live_worker_is_chosen_if_there_is_one_and_a_dead_one_never(
    views: list[View], tokens: int
) -> None:
    choice = choose(views, tokens)
    alive = {
        role: [v for v in views if v.role == role and v.alive] for role in ("decode", "prefill")
    }
    assert (choice.decode is not None) == bool(alive["decode"])
    assert (choice.prefill is not None) == bool(alive["decode"] and alive["prefill"])
    for url, role in ((choice.decode, "decode"), (choice.prefill, "prefill")):
        if url is not None:
            assert by_url(views, url) in alive[role]
            assert url in choice.reason


@given(fleets, counts)
def test_one_that_failed_recently_is_chosen_only_when_every_other_is_out(
    views: list[View], tokens: int
) -> None:
    choice = choose(views, tokens)
    for url, role in ((choice.decode, "decode"), (choice.prefill, "prefill")):
        if url is not None and by_url(views, url).resting:
            assert all(v.resting for v in views if v.role == role and v.alive)


@given(fleets, counts, st.integers(1, 100))
def test_more_load_never_makes_a_worker_more_wanted(
    views: list[View], tokens: int, more: int
) -> None:
    choice = choose(views, tokens)
    for view in views:
        if view.url in (choice.decode, choice.prefill):
            continue
        for name in ("running", "waiting", "queued_tokens"):
            load = msgspec.structs.replace(view.load, **{name: getattr(view.load, name) + more})
            after = choose(changed(views, view.url, load=load), tokens)
            assert view.url not in (after.decode, after.prefill)


@given(fleets, counts, st.sampled_from(["target", "draft"]), st.integers(1, 1000))
def test_lacking_more_rows_of_either_domain_never_makes_a_worker_more_wanted(
    views: list[View], tokens: int, domain: str, more: int
) -> None:
    choice = choose(views, tokens)
    for view in views:
        if view.missing is None or view.url in (choice.decode, choice.prefill):
            continue
        lacks = getattr(view.missing, domain) + more
        missing = msgspec.structs.replace(view.missing, **{domain: lacks})
        after = choose(changed(views, view.url, missing=missing), tokens)
        assert view.url not in (after.decode, after.prefill)


@given(fleets, counts)
def test_what_is_chosen_costs_least_and_of_equals_was_used_longest_ago(
    views: list[View], tokens: int
) -> None:
    choice = choose(views, tokens)
    shipped = choice.prefill is not None
    for url, role in ((choice.decode, "decode"), (choice.prefill, "prefill")):
        if url is None:
            continue
        mine = by_url(views, url)
        for other in views:
            if other.role == role and other.alive and other.resting == mine.resting:
                price = cost(mine, tokens, shipped=shipped), mine.used
                assert price <= (cost(other, tokens, shipped=shipped), other.used)


def prefill(url: str, target: int, draft: int, **fields: Any) -> View:
    return View(url=url, role="prefill", missing=Missing(target, draft), **fields)


def decode(url: str, target: int, draft: int, **fields: Any) -> View:
    return View(url=url, role="decode", missing=Missing(target, draft), **fields)


@pytest.mark.parametrize("make", [prefill, decode])
def test_draft_rows_decide_where_target_rows_are_equal(make: Any) -> None:
    views = [make("a", 10, 500), make("b", 10, 20), decode("only", 0, 0, resting=True)]
    assert "b" in (choose(views, 600).decode, choose(views, 600).prefill)


def test_a_drafters_hole_outweighs_a_few_target_rows() -> None:
    views = [decode("d", 0, 0), prefill("holes", 0, 900), prefill("short", 100, 100)]
    assert choose(views, 1000).prefill == "short"


def test_rows_that_are_shipped_weigh_less_than_rows_that_are_computed() -> None:
    """A busy worker that holds the prompt, an idle one that does not."""
    rows = REQUEST_TOKENS * 2
    views = [decode("busy", 0, 0, load=Load(running=1)), decode("idle", rows, 0)]
    assert choose(views, rows).decode == "busy"
    assert choose([*views, prefill("p", 0, 0)], rows).decode == "idle"
    assert SHIPPED < 1


def test_unknown_coverage_counts_as_nothing_held() -> None:
    silent = View(url="silent", role="decode")
    assert choose([silent, decode("cold", 100, 100, used=1)], 100).decode == "silent"
    assert choose([silent, decode("warm", 99, 100, used=1)], 100).decode == "warm"


def test_a_request_that_is_not_handed_over_has_no_prefill_worker() -> None:
    choice = choose([decode("d", 5, 5), prefill("p", 0, 0)], 5, hands_off=False)
    assert (choice.decode, choice.prefill) == ("d", None)


@pytest.mark.parametrize(
    ("body", "one"),
    [
        ({"messages": [{}]}, True),
        ({"messages": [{}], "n": 1}, True),
        ({"messages": [{}], "n": 2}, False),
        ({"messages": [{}], "n": True}, False),
        ({"prompt": "x"}, True),
        ({"prompt": ["x"]}, True),
        ({"prompt": ["x", "y"]}, False),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": [[1, 2, 3]]}, True),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": 5}, False),
        ({}, False),
    ],
)
def test_one_choice_over_one_prompt_can_be_handed_over(body: dict[str, Any], one: bool) -> None:
    assert is_one_prompt(body) is one
