"""Sizes and their reasons; what cannot run is refused by name, before memory is touched."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from engines import tiny_engine

from tandemkv.base.config import MAX_DRAFT_TOKENS, EngineConfig, from_mapping
from tandemkv.base.errors import ConfigError
from tandemkv.engine.engine import Engine
from tandemkv.engine.resolve import free_bytes
from tandemkv.engine.sizing import Load, choose_page_size, pool_pages, tokens_within
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.kv.manager import KVManager


@pytest.mark.parametrize("tokens", [10**9, 10**14, 2**62])
def test_pools_larger_than_memory_are_refused_at_once(tokens: int) -> None:
    with pytest.raises(ConfigError, match=r"GiB free; lower kv_cache_tokens"):
        tiny_engine("none", kv_cache_tokens=tokens)


def test_free_memory_is_known_where_pools_are_made() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is not None
    assert free > 1 << 20


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"threads": "x"}, "threads"),
        ({"threads": 1.5}, "threads"),
        ({"model": 5}, "model"),
        ({"kv_cache_tokens": True}, "kv_cache_tokens"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 12}, "block_size"),
        ({"drafter_options": None}, "drafter_options"),
        ({"num_draft_tokens": MAX_DRAFT_TOKENS + 1}, "num_draft_tokens"),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"faults": ("nothing_like_it",)}, "nothing_like_it"),
        ({"claim_policy": "slow"}, "claim_policy"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_name(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        EngineConfig(**options).validate()
    assert "\n" not in str(caught.value)


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(threads=0, block_size=3, dtype="int4").validate()
    assert all(name in str(caught.value) for name in ("threads", "block_size", "dtype"))


def test_an_unknown_option_is_refused_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        from_mapping({"blocksize": 16})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_model_len": 10_000}, "max_model_len 10000 exceeds the model's"),
        ({"max_model_len": 200, "kv_cache_tokens": 64}, "max_model_len 200 does not fit"),
        ({"kv_cache_tokens": 4, "max_model_len": None}, "kv_cache_tokens 4 is too small"),
        ({"max_batch_tokens": 3}, "max_batch_tokens 3 is below"),
    ],
)
def test_numbers_that_do_not_fit_each_other_are_refused(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        tiny_engine("eagle3", **options)


def test_every_resolved_value_has_a_reason() -> None:
    lines = tiny_engine("eagle3").resolved.lines()
    assert any(line.startswith("num_pages[") for line in lines)
    assert all(line.endswith(")") and "(" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"drafter": "draft_model"}, "needs a model"),
        ({"drafter": "eagle3", "drafter_path": "/nowhere/drafter"}, "/nowhere/drafter"),
        ({"drafter": "ngram", "drafter_options": {"prompt_lookup": 3}}, "prompt_lookup"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_before_the_target_loads(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):  # the model is wrong too, and not looked at yet
        Engine.from_config(EngineConfig(model="/nowhere/target", **options))


# -- sizes ------------------------------------------------------------------------------------


def of(name: str, domain: Domain, num_layers: int, window: int | None = None) -> LayerGroup:
    return LayerGroup(
        name=name,
        domain=domain,
        layers=tuple(range(num_layers)),
        num_kv_heads=3,
        head_dim=64,
        window=window,
        pointwise=True,
    )


def sized(
    *groups: LayerGroup, block: int = 16, tokens: int = 0, **load: int
) -> tuple[Layout, Load]:
    """The layout with the chosen page sizes, and a load of 32 requests (or as given)."""
    chosen = [msgspec.structs.replace(g, page_size=choose_page_size(g, block)[0]) for g in groups]
    given = {"length": 4096, "running": 32, "batch": 512, "num_draft_tokens": 7} | load
    return Layout(block_size=block, groups=tuple(chosen)), Load(cached_tokens=tokens, **given)


@pytest.mark.parametrize(
    ("window", "block", "page"),
    [
        (None, 16, 16),
        (512, 16, 16),
        (64, 16, 8),
        (63, 16, 4),
        (8, 16, 1),
        (3, 16, 1),
        (4096, 128, 128),
        (512, 128, 64),
        (4096, 1, 1),
    ],
)
def test_a_page_is_the_block_or_an_eighth_of_the_window(
    window: int | None, block: int, page: int
) -> None:
    size, why = choose_page_size(of("g", Domain.DRAFT, 1, window), block)
    assert size == page
    assert str(window) in why or window is None


@pytest.mark.parametrize("window", [8, 64, 512])
@pytest.mark.parametrize("running", [1, 32])
def test_the_pool_of_a_window_does_not_grow_with_the_context(window: int, running: int) -> None:
    target, drafter = of("t", Domain.TARGET, 30), of("d", Domain.DRAFT, 3, window)
    pools = set()
    for length in (1024, 4096, 8192):
        layout, load = sized(target, drafter, tokens=10**6, length=length, running=running)
        group = layout.groups[1]
        pages, why = pool_pages(group, layout, load)
        pools.add(pages * group.page_bytes)
        assert f"window {window}" in why
    assert len(pools) == 1
    wide = of("d", Domain.DRAFT, 3, window + 16)
    layout, load = sized(target, wide, tokens=10**6, running=running)
    group = layout.groups[1]
    more = pool_pages(group, layout, load)[0] * group.page_bytes - pools.pop()
    assert abs(more - running * 3 * 16 * group.slot_bytes) <= 2 * group.page_bytes


def test_a_window_as_long_as_the_cache_takes_a_slot_for_each_cached_token() -> None:
    layout, load = sized(
        of("t", Domain.TARGET, 30), of("d", Domain.DRAFT, 3, 512), tokens=1600, running=32
    )
    assert [pool_pages(g, layout, load)[0] for g in layout.groups] == [100, 100]


@pytest.mark.parametrize("window", [None, 8, 512, 100_000])
@pytest.mark.parametrize("budget", [1 << 30, 2 << 30])
def test_the_budget_covers_every_group_and_is_used(window: int | None, budget: int) -> None:
    layout, load = sized(of("t", Domain.TARGET, 30), of("d", Domain.DRAFT, 3, window))
    tokens, why = tokens_within(budget, layout, load)
    assert "bytes per token" in why

    def total(cached: int) -> int:
        sized_for = msgspec.structs.replace(load, cached_tokens=cached)
        return sum(pool_pages(g, layout, sized_for)[0] * g.page_bytes for g in layout.groups)

    assert total(tokens) <= budget < total(tokens + layout.block_size)


def test_a_budget_that_holds_nothing_still_holds_a_block() -> None:
    layout, load = sized(of("t", Domain.TARGET, 30))
    assert tokens_within(1, layout, load)[0] == 16


@pytest.mark.parametrize("running", [1, 5])
@pytest.mark.parametrize("window", [1, 8, 64])
@pytest.mark.parametrize("k", [0, 7])
def test_a_chosen_pool_can_hold_every_request_it_was_made_for(
    running: int, window: int, k: int
) -> None:
    layout, load = sized(
        of("t", Domain.TARGET, 1),
        of("d", Domain.DRAFT, 1, window),
        tokens=4096,
        running=running,
        batch=k + 1,
        num_draft_tokens=k,
    )
    manager = KVManager(layout, [pool_pages(g, layout, load)[0] for g in layout.groups])
    assert manager.fits(3000, k) is None
    claims = [manager.claim([i, *range(500)]) for i in range(running)]
    assert all(claims)


def test_page_sizes_are_shown_with_their_reasons_and_may_be_asked_for() -> None:
    shown = tiny_engine("dspark").resolved
    assert shown["page_size[target]"] == 4
    assert shown["page_size[dspark]"] == 4
    assert shown["page_size[dspark_w7]"] == 1
    line = next(x for x in shown.lines() if x.startswith("page_size[dspark_w7]"))
    assert "1/8 of the window of 7" in line
    asked = tiny_engine("dspark", target_page_size=2, draft_page_size=4)
    assert [g.page_size for g in asked.layout.groups] == [2, 4, 4]
    assert "page_size[target] = 2  (as asked)" in asked.resolved.lines()
    with pytest.raises(ConfigError, match=r"block_size 4 is not a multiple of page_size 8"):
        tiny_engine("dspark", draft_page_size=8)
