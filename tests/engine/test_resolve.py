"""What cannot run is refused by the option's name, before memory is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import tiny_engine

from tandemkv.base.config import MAX_DRAFT_TOKENS, EngineConfig, from_mapping
from tandemkv.base.errors import ConfigError
from tandemkv.engine.engine import Engine
from tandemkv.engine.resolve import free_bytes


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
