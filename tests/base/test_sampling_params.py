"""A SamplingParams that exists is valid; what is not is refused by the field's name."""

import math

import pytest

from tandemkv.base.errors import ConfigError, InvariantError, RequestError, TandemError
from tandemkv.base.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", math.inf),
        ("top_k", -1),
        ("top_k", 1.5),
        ("presence_penalty", 2.1),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("seed", 2**64),
        ("num_draft_tokens", -1),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: 101.0}),
        ("stop_token_ids", (-3,)),
        ("verification", "tree"),
        ("claim_policy", "lazy"),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)


def test_greedy_is_temperature_zero():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy


@pytest.mark.parametrize(
    "edit", [{"presence_penalty": 0.1}, {"logit_bias": {3: 1.0}}, {"min_tokens": 2}]
)
def test_parameters_that_need_history_say_so(edit):
    assert SamplingParams(**edit).changes_logits
    assert not SamplingParams().changes_logits


def test_every_error_of_ours_has_one_root():
    for kind in (ConfigError, InvariantError, RequestError):
        assert issubclass(kind, TandemError)
