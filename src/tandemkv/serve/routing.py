"""Which decode worker answers a request, and which prefill worker computes its prompt.

    cost of a prefill worker = target rows it lacks + draft rows it lacks + tokens queued there
    cost of a decode worker  = w x (target rows it lacks + draft rows it lacks)
                               + tokens queued there
                               + REQUEST_TOKENS for each request that runs or waits there

All in tokens; the least cost wins, of equals the one that was used longest ago. w is SHIPPED where
a prefill worker computes what the decode worker lacks, and 1 where it computes that itself. A draft
row counts as much as a target row: to make one that is missing, the target runs over its position
again. A worker that did not say what it lacks counts as one that holds nothing.

Law: a worker that is not alive is never chosen; one that failed recently rests, and is chosen only
when every other is out; more load never makes a worker more wanted. Pure: views in, a choice out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

SHIPPED = 0.25
"""A row that is shipped, in rows that are computed. Its bytes move in a fraction of the time that a
model needs for the position, and no step waits for them; but they take room, and the link."""
REQUEST_TOKENS = 64
"""A request that runs or waits, in tokens to compute: it adds K + 1 rows to some hundred steps,
which share one reading of the weights with all others there."""


class Load(msgspec.Struct, frozen=True):
    """How busy a worker says it is. queued_tokens: prompt tokens that it has still to compute."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0


class Missing(msgspec.Struct, frozen=True):
    """Rows of one prompt that a worker does not hold."""

    target: int
    draft: int


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as a router sees it for one request.

    alive: it answers, and is what it was said to be. resting: it failed recently. missing: None if
    it did not say in time. used: when a request was last sent there, in any unit that grows.
    """

    url: str
    role: str
    alive: bool = True
    resting: bool = False
    load: Load = Load()
    missing: Missing | None = None
    used: float = 0


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """decode: the url that answers, None if no decode worker is left. prefill: the url that
    computes the prompt, None if the decode worker does. reason: why these, in words.
    """

    decode: str | None
    prefill: str | None
    reason: str


def choose(views: Sequence[View], num_tokens: int, *, hands_off: bool = True) -> Choice:
    """The workers for one request over a prompt of num_tokens (0 if nobody said how many).

    hands_off: whether its prompt may be computed by another worker than the one that answers.
    """
    decode, prefill = (
        [view for view in views if view.role == role and view.alive]
        for role in ("decode", "prefill")
    )
    if not decode:
        return Choice(decode=None, prefill=None, reason="no decode worker is alive")
    giver = None
    if hands_off and prefill:
        giver = _least(prefill, num_tokens, shipped=False)
    taker = _least(decode, num_tokens, shipped=giver is not None)
    reason = f"{_words(taker, num_tokens)} answers, the best of {len(decode)}; "
    if giver is not None:
        reason += f"{_words(giver, num_tokens)} computes, the best of {len(prefill)}"
    elif not hands_off:
        reason += "it computes the prompt too: only one choice over one prompt is handed over"
    else:
        reason += "it computes the prompt too: no prefill worker is alive"
    return Choice(decode=taker.url, prefill=giver and giver.url, reason=reason)


def cost(view: View, num_tokens: int, *, shipped: bool = False) -> float:
    """What a request costs there, in tokens. shipped: what it lacks is computed elsewhere."""
    lacks = lacked(view, num_tokens)
    rows = lacks.target + lacks.draft
    queued = view.load.queued_tokens
    if view.role == "prefill":
        return rows + queued
    requests = view.load.running + view.load.waiting
    return (SHIPPED if shipped else 1) * rows + queued + REQUEST_TOKENS * requests


def lacked(view: View, num_tokens: int) -> Missing:
    """The rows that a worker lacks; all, if it did not say."""
    return Missing(num_tokens, num_tokens) if view.missing is None else view.missing


def is_one_prompt(body: dict[str, Any]) -> bool:
    """Whether a request body asks for one choice over one prompt: what can be handed over."""
    n = body.get("n")
    if n is not None and (n != 1 or isinstance(n, bool)):
        return False
    prompt = body.get("prompt")
    if body.get("messages") is not None or isinstance(prompt, str):
        return True
    if not isinstance(prompt, list):
        return False
    return len(prompt) == 1 or not any(isinstance(item, str | list) for item in prompt)


def _least(views: Sequence[View], num_tokens: int, *, shipped: bool) -> View:
    rested: Iterable[View] = [view for view in views if not view.resting] or views
    return min(rested, key=lambda v: (cost(v, num_tokens, shipped=shipped), v.used, v.url))


def _words(view: View, num_tokens: int) -> str:
    lacks, load = lacked(view, num_tokens), view.load
    held = "its rows unknown" if view.missing is None else ""
    held = held or f"lacks {lacks.target} target and {lacks.draft} draft rows"
    busy = f"{load.running + load.waiting} requests, {load.queued_tokens} tokens queued"
    return f"{view.url} ({held}, {busy}{', failed recently' if view.resting else ''})"
