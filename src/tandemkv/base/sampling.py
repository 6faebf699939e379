"""What a client asks of sampling, validated once, before anything is reserved.

Law: a SamplingParams that exists is valid; each field is honoured at every verify position or the
request is refused by the field's name. This module does not sample.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tandemkv.base.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Per-request sampling parameters. Defaults are the OpenAI API's, greedy when temperature is 0.

    temperature 0 is greedy (argmax after penalties and bias). top_k 0 means no limit. seed None
    draws one at submission. logprobs None: none; k: the chosen token's and the top k (0..20).
    num_draft_tokens None: the drafter's default K; 0: speculation off for this request; it may
    be changed while the request runs. draft_context: whether the drafter's context pass runs on
    while speculation is off (if not, the gap is counted). claim_policy: exact, fast or
    auto; None: the engine's.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    verification: str = "token"
    num_draft_tokens: int | None = None
    draft_context: bool = True
    claim_policy: str | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _integer("top_k", self.top_k, 0)
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}",
                param="min_tokens",
            )
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.num_draft_tokens is not None:
            _integer("num_draft_tokens", self.num_draft_tokens, 0)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0)
            _number("logit_bias", bias, -100.0, 100.0)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestError(
                f"stop_token_ids names {len(self.stop_token_ids)} tokens, at most"
                f" {MAX_STOP_TOKENS}",
                param="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        _choice("verification", self.verification, ("token", "block"))
        if self.claim_policy is not None:
            _choice("claim_policy", self.claim_policy, ("exact", "fast", "auto"))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether any parameter edits logits by position history (penalties, bias, min_tokens)."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_tokens
        )


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(
            f"{name} must be in {bracket}{low:g}, {high:g}], got {value:g}", param=name
        )


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise RequestError(f"{name} must be {limit}, got {value}", param=name)


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RequestError(f"{name} must be one of {', '.join(allowed)}, got {value!r}", param=name)
