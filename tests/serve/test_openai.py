"""Bodies of the OpenAI API: what is honoured, what is refused, and by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.base.errors import RequestError
from tandemkv.serve import fields
from tandemkv.serve.fields import decode_body
from tandemkv.serve.openai import (
    Limits,
    derived_seed,
    params_for,
    parse_chat,
    parse_completion,
)

LIMITS = Limits(model="tiny", max_model_len=64, vocab_size=100)
HELLO = [{"role": "user", "content": "hello"}]


def chat(**body: Any):
    return parse_chat({"messages": HELLO, **body}, LIMITS)


def completion(**body: Any):
    return parse_completion({"prompt": "hello", **body}, LIMITS)


def refusal(parse, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**body)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return caught.value


def test_every_sampling_field_reaches_the_parameters() -> None:
    wanted = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "seed": 11,
        "min_tokens": 3,
        "ignore_eos": True,
        "verification": "block",
        "num_draft_tokens": 2,
        "draft_context": False,
        "claim_policy": "fast",
    }
    assert set(wanted) == fields.SAMPLING_FIELDS
    for parse in (chat, completion):
        params = parse(**wanted, stop_token_ids=[4], logit_bias={"5": -100}, max_tokens=9).params
        assert {name: getattr(params, name) for name in wanted} == wanted
        assert params.stop_token_ids == (4,)
        assert params.logit_bias == {5: -100.0}
        assert params.max_tokens == 9


def test_null_means_absent_for_every_field() -> None:
    nothing = dict.fromkeys(fields.CHAT_FIELDS - {"messages"}, None)
    assert chat(**nothing, **dict.fromkeys(fields.NOT_OFFERED, None)) == chat()
    assert completion(**dict.fromkeys(fields.COMPLETION_FIELDS - {"prompt"}, None)) == completion()


def test_a_field_that_is_not_offered_is_refused_by_its_name() -> None:
    for name in fields.NOT_OFFERED:
        for parse in (chat, completion):
            error = refusal(parse, **{name: "something else"})
            assert (error.status, error.param) == (400, name)
            assert name in str(error)


def test_a_value_that_asks_for_nothing_is_not_refused() -> None:
    for name, neutral in fields.NOT_OFFERED.items():
        for value in neutral:
            assert chat(**{name: value}) == chat()
    assert chat(n=3, best_of=3).n == 3
    assert refusal(chat, n=3, best_of=4).param == "best_of"
    assert refusal(chat, response_format={"type": "json_object"}).param == "response_format"


def test_zero_is_not_taken_for_false() -> None:
    assert refusal(chat, use_beam_search=0).param == "use_beam_search"
    assert refusal(chat, stream=0).param == "stream"
    assert refusal(chat, n=True).param == "n"


def test_an_unknown_field_is_refused_by_its_name() -> None:
    error = refusal(chat, temprature=0.5)
    assert error.param == "temprature"
    assert "temprature" in str(error)
    assert refusal(chat, prompt="x").param == "prompt"
    assert refusal(completion, messages=HELLO).param == "messages"
    assert refusal(chat, **{"a\nb" * 1000: 1}).status == 400


BAD = [
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", -0.1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", 10**400),
    ("temperature", [[]]),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("seed", 1.5),
    ("seed", 2**64),
    ("seed", "1"),
    ("min_tokens", -1),
    ("min_tokens", 65),
    ("ignore_eos", 1),
    ("n", 0),
    ("n", 17),
    ("n", 10**30),
    ("n", 1.0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "10"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
    ("stop", 5),
    ("stop", {"a": 1}),
    ("stop_token_ids", 3),
    ("stop_token_ids", [100]),
    ("stop_token_ids", [True]),
    ("logit_bias", [1]),
    ("logit_bias", {"100": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"²": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": float("nan")}),
    ("logit_bias", {"1": "a"}),
    ("stream_options", {"include_usage": True}),
    ("stream_options", []),
    ("cache_salt", 1),
    ("priority", 2**40),
    ("priority", "high"),
    ("model", 5),
    ("verification", "magic"),
    ("claim_policy", "loose"),
    ("num_draft_tokens", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_by_its_field(name: str, value: Any) -> None:
    for parse in (chat, completion):
        error = refusal(parse, **{name: value})
        assert (error.status, error.param) == (400, name)


def test_an_unknown_model_is_not_found() -> None:
    error = refusal(chat, model="gpt-4")
    assert (error.status, error.param) == (404, "model")
    assert chat(model="tiny") == chat()


def test_stream_options_know_include_usage_only() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert chat(stream=True, stream_options={"include_obfuscation": False}) == chat(stream=True)
    error = refusal(chat, stream=True, stream_options={"continuous_usage_stats": True})
    assert "continuous_usage_stats" in str(error)


def test_top_k_minus_one_means_no_limit() -> None:
    assert chat(top_k=-1).params.top_k == 0


def test_chat_logprobs_are_a_switch_and_a_number() -> None:
    assert chat().params.logprobs is None
    assert chat(logprobs=False, top_logprobs=0).params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params.logprobs == 20
    assert refusal(chat, top_logprobs=2).param == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refusal(chat, logprobs=2).param == "logprobs"


def test_completion_logprobs_are_a_number() -> None:
    assert completion(logprobs=0).params.logprobs == 0
    assert refusal(completion, logprobs=True).param == "logprobs"
    assert refusal(completion, logprobs=21).param == "logprobs"
    assert refusal(completion, logprobs=1, echo=True).param == "echo"


def test_a_prompt_is_text_tokens_or_lists_of_them() -> None:
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ([1, 2],)
    assert completion(prompt=[[1], [2, 3]]).prompts == ([1], [2, 3])


@pytest.mark.parametrize(
    "prompt", [[], 5, {}, [1, "a"], ["a", [1]], [100], [-1], [True], [1.0], [[1], [100]], [None]]
)
def test_a_prompt_of_another_shape_is_refused(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt).param == "prompt"


def test_a_missing_prompt_is_refused() -> None:
    assert refusal(completion, prompt=None).param == "prompt"


def test_prompts_times_n_is_bounded() -> None:
    assert completion(prompt=["a"] * 16, n=16).n == 16
    assert refusal(completion, prompt=["a"] * 17, n=16).param == "prompt"


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    ask = chat(max_tokens=3, max_completion_tokens=5)
    assert (ask.max_tokens, ask.max_tokens_field) == (5, "max_completion_tokens")
    assert refusal(chat, max_completion_tokens=0).param == "max_completion_tokens"


def test_max_tokens_default_to_the_room_in_chat_and_to_16_in_completions() -> None:
    assert params_for(chat(), 10, 0, LIMITS).max_tokens == 54
    assert params_for(completion(), 10, 0, LIMITS).max_tokens == 16


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"64 tokens.*64 tokens") as caught:
        params_for(chat(), 64, 0, LIMITS)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    with pytest.raises(RequestError, match=r"70 tokens.*64 tokens"):
        params_for(completion(), 70, 0, LIMITS)
    assert params_for(chat(), 63, 0, LIMITS).max_tokens == 1


def test_max_tokens_beyond_the_room_are_refused_with_all_numbers() -> None:
    with pytest.raises(RequestError, match=r"55.*64 tokens.*10") as caught:
        params_for(chat(max_completion_tokens=55), 10, 0, LIMITS)
    assert caught.value.param == "max_completion_tokens"
    assert params_for(chat(max_tokens=54), 10, 0, LIMITS).max_tokens == 54


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        params_for(completion(prompt=""), 0, 0, LIMITS)


def test_choices_have_seeds_of_their_own_and_the_first_keeps_the_clients() -> None:
    ask = chat(seed=5, n=16)
    seeds = [params_for(ask, 1, c, LIMITS).seed for c in range(16)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 16
    assert derived_seed(5, 1) != derived_seed(6, 1)
    assert params_for(chat(n=2), 1, 1, LIMITS).seed is None


def test_template_options_are_read() -> None:
    assert not chat(continue_final_message=True).template.add_generation_prompt
    assert chat(chat_template_kwargs={"enable_thinking": False}).template.kwargs == {
        "enable_thinking": False
    }
    error = refusal(chat, continue_final_message=True, add_generation_prompt=True)
    assert error.param == "continue_final_message"


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"a": "\xff"}',
    b'{"\xff": 1}',
    b"\xff\xfe",
    b'{"messages": "\\ud800"}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a": 1} trailing',
]


@pytest.mark.parametrize("raw", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_a_body_that_is_no_json_object_is_refused_in_one_line(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode_body(raw)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_refused_by_its_field(literal: str) -> None:
    with pytest.raises(RequestError, match="temperature must be a finite number") as caught:
        decode_body(b'{"top_p": 1, "temperature": %s}' % literal.encode())
    assert caught.value.param == "temperature"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(sorted(fields.CHAT_FIELDS | fields.COMPLETION_FIELDS)) | st.text(max_size=8)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(names, json_values, max_size=6), st.booleans())
def test_any_body_is_parsed_or_refused_and_never_breaks(
    body: dict[str, Any], is_chat: bool
) -> None:
    parse = parse_chat if is_chat else parse_completion
    base = {"messages": HELLO} if is_chat else {"prompt": "hello"}
    try:
        raw = decode_body(json.dumps({**base, **body}).encode())
        ask = parse(raw, LIMITS)
        params_for(ask, 10, 0, LIMITS)
    except RequestError as error:
        assert error.status in (400, 404)  # noqa: PT017
        assert error.param is None or error.param in {**base, **body}  # noqa: PT017
    else:
        assert ask.n >= 1
