"""The fields of API bodies: reading them one by one, and refusing by name those not offered.

Law: null means absent; a field of the wrong type, out of range, unknown or not offered raises a
RequestError of one line that names it. What a field means is not known here.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from tandemkv.base.errors import RequestError

Body = dict[str, Any]


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


SAMPLING_FIELDS = _names(
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed"
    " min_tokens ignore_eos verification num_draft_tokens draft_context claim_policy"
)
"""Fields with one meaning each, passed on under their own name."""

SHARED_FIELDS = SAMPLING_FIELDS | _names(
    "model stream stream_options stop stop_token_ids n logprobs logit_bias max_tokens cache_salt"
    " priority return_metrics return_token_ids add_special_tokens skip_special_tokens"
    " include_stop_str_in_output user kv_transfer_params"
)
CHAT_FIELDS = SHARED_FIELDS | _names(
    "messages top_logprobs max_completion_tokens add_generation_prompt continue_final_message"
    " chat_template_kwargs"
)
COMPLETION_FIELDS = SHARED_FIELDS | _names("prompt echo")

# Known in the API but not offered: refused by name, unless the value asks for nothing.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True, False),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "metadata": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_reading_prefix_cache": (False,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


def decode_body(raw: bytes) -> Body:
    """The JSON object in `raw`. Raises RequestError for anything else; never by another exception.

    NaN and Infinity are not JSON, but clients send them: then the field at fault is named.
    """
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _name_non_finite(raw)
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {kind(body)}")
    return body


def _name_non_finite(raw: bytes) -> None:
    """Raise by name when the only thing wrong with `raw` is a number that is not finite."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return
    for name, value in body.items() if isinstance(body, dict) else ():
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name} must be a finite number, got {value}", param=name) from None


def refuse_unknown(body: Body, offered: frozenset[str]) -> None:
    """Raise for the first field that is set and neither offered nor asking for nothing."""
    for name, value in body.items():
        if value is None or name in offered:
            continue
        if name in NOT_OFFERED:
            if _asks_for_nothing(name, value, body):
                continue
            raise RequestError(f"{name} is not offered by this server", param=name)
        elsewhere = name in CHAT_FIELDS | COMPLETION_FIELDS
        what = "is not a field of this endpoint" if elsewhere else "is not a known field"
        raise RequestError(f"{named(name)} {what}", param=name[:100])


def _asks_for_nothing(name: str, value: Any, body: Body) -> bool:
    neutral: tuple[Any, ...] = NOT_OFFERED[name]
    if name == "best_of":
        neutral = (body.get("n") or 1,)
    return any(type(value) is type(x) and value == x for x in neutral) or (
        name == "length_penalty" and value == 1
    )


def flag(body: Body, name: str, default: bool) -> bool:
    """A boolean field; null is the default."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {shown(value)}", param=name)
    return value


def integer(body: Body, name: str, default: Any, *, low: int, high: int | None = None) -> Any:
    """An integer field in [low, high]; null is the default."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise RequestError(f"{name} must be an integer, got {shown(value)}", param=name)
    if value < low or (high is not None and value > high) or value >= 2**63:
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise RequestError(f"{name} must be {limit}, got {shown(value)}", param=name)
    return value


def text(body: Body, name: str, default: str) -> str:
    """A string field; null is the default."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, got {kind(value)}", param=name)
    return value


def kind(value: Any) -> str:
    """What JSON calls the type of a decoded value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def shown(value: Any) -> str:
    """A client's value as it may stand in a one-line message: bounded, and escaped."""
    if type(value) is int and abs(value) >= 10**40:
        return "a huge integer"
    out = repr(value) if not isinstance(value, list | dict) else kind(value)
    return out if len(out) <= 60 else out[:57] + "..."


def named(name: str) -> str:
    """A client's field name as it may stand in a message."""
    return name if name.isidentifier() and len(name) <= 60 else shown(name)
