"""Request bodies of the OpenAI API, checked and turned into what the engine takes.

Law: a parameter is honoured or refused by its name. A body that parses yields an Ask whose
SamplingParams are valid; every other body is a RequestError of one line with the field at fault.
null means absent. Pure: this module tokenizes nothing, runs nothing and knows no HTTP framework.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from tandemkv.base.errors import RequestError
from tandemkv.base.sampling import MAX_LOGPROBS, SamplingParams
from tandemkv.base.transfer_params import FIELD as TRANSFER
from tandemkv.base.transfer_params import KVTransferParams, parse_transfer
from tandemkv.serve.chat import Message, TemplateOptions, parse_messages
from tandemkv.serve.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    SAMPLING_FIELDS,
    Body,
    flag,
    integer,
    kind,
    refuse_unknown,
    shown,
    text,
)

MAX_CHOICES = 16
"""Largest n."""
MAX_REQUESTS = 256
"""Most choices one body may ask for, over all its prompts."""
MAX_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16

Prompt = str | list[int]


class Limits(msgspec.Struct, frozen=True):
    """What the server bounds: model name, longest sequence (tokens), vocabulary (ids), choices."""

    model: str
    max_model_len: int
    vocab_size: int
    max_choices: int = MAX_CHOICES


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One checked API request. Exactly one of prompts and messages is set.

    params: valid as they stand except for max_tokens, which `params_for` settles once the prompt's
    length is known (max_tokens None: whatever the model has room for). max_tokens_field: the name
    the client used. transfer: which worker computes the prompt, or that another one generates.
    """

    params: SamplingParams
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[Message, ...] = ()
    template: TemplateOptions = TemplateOptions()
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    add_special_tokens: bool = True
    cache_salt: str = ""
    priority: int = 0
    return_metrics: bool = False
    return_token_ids: bool = False
    transfer: KVTransferParams | None = None

    @property
    def chat(self) -> bool:
        return bool(self.messages)


def parse_chat(body: Body, limits: Limits) -> Ask:
    """The Ask of a /v1/chat/completions body."""
    refuse_unknown(body, CHAT_FIELDS)
    check_model(body, limits)
    messages = parse_messages(body.get("messages"))
    add_prompt = flag(body, "add_generation_prompt", True)
    continues = flag(body, "continue_final_message", False)
    if continues and body.get("add_generation_prompt") is None:
        add_prompt = False
    if continues and add_prompt:
        name = "continue_final_message"
        raise RequestError(f"{name} and add_generation_prompt exclude each other", param=name)
    template = TemplateOptions(add_prompt, continues, _template_kwargs(body))
    field = "max_completion_tokens"
    if body.get(field) is None:
        field = "max_tokens"
    return _ask(
        body,
        limits,
        logprobs=_chat_logprobs(body),
        max_tokens=integer(body, field, None, low=1),
        max_tokens_field=field,
        messages=messages,
        template=template,
        add_special_tokens=flag(body, "add_special_tokens", False),
    )


def parse_completion(body: Body, limits: Limits) -> Ask:
    """The Ask of a /v1/completions body."""
    refuse_unknown(body, COMPLETION_FIELDS)
    check_model(body, limits)
    prompts = parse_prompts(body.get("prompt"), limits.vocab_size)
    if isinstance(body.get("logprobs"), bool):
        raise RequestError("logprobs must be an integer here, got a boolean", param="logprobs")
    logprobs = integer(body, "logprobs", None, low=0, high=MAX_LOGPROBS)
    echo = flag(body, "echo", False)
    if echo and logprobs is not None:
        raise RequestError("echo with logprobs is not offered by this server", param="echo")
    max_tokens = integer(body, "max_tokens", DEFAULT_COMPLETION_TOKENS, low=1)
    ask = _ask(
        body,
        limits,
        logprobs=logprobs,
        max_tokens=max_tokens,
        prompts=prompts,
        echo=echo,
        add_special_tokens=flag(body, "add_special_tokens", True),
    )
    if len(prompts) * ask.n > MAX_REQUESTS:
        raise RequestError(
            f"{len(prompts)} prompts times n {ask.n} exceeds {MAX_REQUESTS} choices", param="prompt"
        )
    return ask


def params_for(ask: Ask, prompt_len: int, choice: int, limits: Limits) -> SamplingParams:
    """The parameters of one choice over a prompt of `prompt_len` tokens.

    The prompt and max_tokens must fit into limits.max_model_len. Choice 0 keeps the seed, choice i
    has one derived from it, so that n choices differ and yet repeat.
    """
    room = limits.max_model_len - prompt_len
    field = "messages" if ask.chat else "prompt"
    if prompt_len == 0:
        raise RequestError(f"{field} is empty: there is no token to continue from", param=field)
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, but this model's context is"
            f" {limits.max_model_len} tokens and one must be left to generate",
            param=field,
        )
    max_tokens = room if ask.max_tokens is None else ask.max_tokens
    if max_tokens > room:
        raise RequestError(
            f"{ask.max_tokens_field} is {max_tokens}, but this model's context is"
            f" {limits.max_model_len} tokens and the prompt has {prompt_len}",
            param=ask.max_tokens_field,
        )
    seed = ask.params.seed
    if seed is not None and choice:
        seed = derived_seed(seed, choice)
    return msgspec.structs.replace(ask.params, max_tokens=max_tokens, seed=seed)


def derived_seed(seed: int, choice: int) -> int:
    """A 63-bit seed for choice >= 1, a hash of (seed, choice); the same on every platform."""
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def parse_prompts(value: Any, vocab_size: int) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of token ids or a list of such lists: always a tuple."""
    if value is None:
        raise RequestError("prompt is missing", param="prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise RequestError(f"prompt must be a string or a list, got {kind(value)}", param="prompt")
    if not value:
        raise RequestError("prompt is an empty list", param="prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) for item in value):
        return tuple(parse_tokens(item, vocab_size, f"prompt[{i}]") for i, item in enumerate(value))
    return (parse_tokens(value, vocab_size, "prompt"),)


def parse_tokens(value: Any, vocab_size: int, where: str) -> list[int]:
    """Token ids in [0, vocab_size); the error names the first that is not one."""
    param = where.split("[")[0]
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a list of token ids, got {kind(value)}", param=param)
    for i, token in enumerate(value):
        if type(token) is not int:
            raise RequestError(f"{where}[{i}] must be a token id, got {kind(token)}", param=param)
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{where}[{i}] is {shown(token)}, but token ids are in [0, {vocab_size})",
                param=param,
            )
    return value


def _ask(body: Body, limits: Limits, *, logprobs: int | None, **fields: Any) -> Ask:
    """What both endpoints share. The provisional max_tokens is the model's whole context."""
    max_tokens: int | None = fields["max_tokens"]
    stream = flag(body, "stream", False)
    text(body, "user", "")  # who asks changes nothing
    ask = Ask(
        params=SamplingParams(
            **_sampling(body),
            max_tokens=limits.max_model_len if max_tokens is None else max_tokens,
            logprobs=logprobs,
            logit_bias=_logit_bias(body, limits.vocab_size),
            stop_token_ids=_stop_token_ids(body, limits.vocab_size),
        ),
        n=integer(body, "n", 1, low=1, high=limits.max_choices),
        stop=_stop(body),
        include_stop=flag(body, "include_stop_str_in_output", False),
        skip_special_tokens=flag(body, "skip_special_tokens", True),
        stream=stream,
        include_usage=_include_usage(body, stream),
        cache_salt=text(body, "cache_salt", ""),
        priority=integer(body, "priority", 0, low=-(2**31), high=2**31 - 1),
        return_metrics=flag(body, "return_metrics", False),
        return_token_ids=flag(body, "return_token_ids", False),
        transfer=parse_transfer(body.get(TRANSFER)),
        **fields,
    )
    _check_transfer(ask)
    return ask


def _check_transfer(ask: Ask) -> None:
    """Refuse a hand-off of anything but one choice over one prompt, and, where another worker is
    to generate, of more than the first token.
    """
    if ask.transfer is None:
        return
    if ask.n != 1 or len(ask.prompts) > 1:
        raise RequestError(f"{TRANSFER} needs exactly one prompt, and n 1", param=TRANSFER)
    if not ask.transfer.do_remote_decode:
        return
    if ask.stream:
        raise RequestError(
            f"{TRANSFER}: do_remote_decode is answered whole: stream must be false", param=TRANSFER
        )
    if ask.max_tokens != 1:
        raise RequestError(
            f"{TRANSFER}: do_remote_decode needs {ask.max_tokens_field} 1, for another worker"
            " generates the rest",
            param=TRANSFER,
        )


def _sampling(body: Body) -> Body:
    fields = {name: body[name] for name in sorted(SAMPLING_FIELDS) if body.get(name) is not None}
    for name, value in fields.items():
        if isinstance(value, list | dict):
            raise RequestError(f"{name} must be a single value, got {kind(value)}", param=name)
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise RequestError(f"{name} is out of range: {shown(value)}", param=name)
    for name in ("ignore_eos", "draft_context"):
        flag(body, name, False)
    if fields.get("top_k") == -1:  # how other servers write "no limit"
        fields["top_k"] = 0
    return fields


def _chat_logprobs(body: Body) -> int | None:
    wanted = flag(body, "logprobs", False)
    top = integer(body, "top_logprobs", None, low=0, high=MAX_LOGPROBS)
    if top and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (top or 0) if wanted else None


def _stop(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError("stop must be a string or a list of strings", param="stop")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings, at most {MAX_STOPS}", param="stop")
    if not all(stops) or value == "":
        raise RequestError("stop has an empty string", param="stop")
    return tuple(stops)


def _stop_token_ids(body: Body, vocab_size: int) -> tuple[int, ...]:
    value = body.get("stop_token_ids")
    return () if value is None else tuple(parse_tokens(value, vocab_size, "stop_token_ids"))


def _logit_bias(body: Body, vocab_size: int) -> dict[int, float]:
    value = body.get("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"logit_bias must be an object, got {kind(value)}", param="logit_bias")
    out: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias: {shown(key)} is no token id in [0, {vocab_size})", param="logit_bias"
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise RequestError(
                f"logit_bias of token {key} must be a number in [-100, 100]", param="logit_bias"
            )
        out[int(key)] = float(bias)
    return out


def _include_usage(body: Body, stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise RequestError(
            f"stream_options must be an object, got {kind(options)}", param="stream_options"
        )
    if not stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    for name, value in options.items():
        if name != "include_usage" and value not in (None, False):
            raise RequestError(
                f"stream_options.{shown(name)} is not offered by this server",
                param="stream_options",
            )
    return flag(options, "include_usage", False)


def _template_kwargs(body: Body) -> Body:
    value = body.get("chat_template_kwargs") or {}
    if not isinstance(value, dict):
        raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    return value


def check_model(body: Body, limits: Limits) -> None:
    """Raise 404 unless the body names the served model, or none."""
    name = text(body, "model", limits.model)
    if name != limits.model:
        raise RequestError(
            f"model {shown(name)} is not served here, only {limits.model}",
            status=404,
            param="model",
        )
    text(body, "user", "")
