"""Branches: prompts that share a long system prompt, run one after the other in one namespace.

    S + q0    first: leaves the rows of S
    S + q1    the first branch: finds them, or pays for what the drafter lacks at the fork
    S + q2    a later branch: finds what the first one left, and pays the lookahead alone

Law: all prompts part at the same token, the fork, so that every branch needs the same rows. What a
branch recomputed, hit and lacked is the cache's own count for that request. This module runs no
prompt; evicting pages is all that it does to an engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from tandemkv.base.errors import ConfigError
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.lab import measures, prompts
from tandemkv.lab.experiments import Job
from tandemkv.lab.measures import Trace, common_prefix
from tandemkv.lab.options import WINDOWS_SHARED
from tandemkv.lab.prompts import Conversation, PromptTokens

if TYPE_CHECKING:
    from tandemkv.engine.engine import Engine

NAMESPACE = "shared prompt"
INTRODUCTION = (
    "You are the assistant of a reading circle and answer the user's message. These are the"
    " circle's texts; use them where they help."
)


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """One branch beside a cold run of its prompt, all in tokens. The names are the JSON file's.

    fork_context: draft rows that a request ending at the fork reads, of the group that reads
    most; needed: those of them that this one reads at its prompt's end (0: its own part covers
    the drafter's window).
    """

    id: str
    prompt_tokens: int
    cached_tokens: int
    fork_context: int
    needed: int
    draft_hit_tokens: int
    draft_gap_tokens: int
    recomputed_lookahead_tokens: int
    recomputed_hole_tokens: int
    al: float
    al_cold: float
    steps_compared: int
    steps_equal: int


def make_jobs(
    encode: PromptTokens,
    conversations: Sequence[Conversation],
    *,
    branches: int,
    shared_tokens: int,
    max_tokens: int,
) -> list[Job]:
    """S + q0 and then `branches` prompts, in the order of the conversations, of their first turns.

    Conversations about a text of S are left out, and those that share their first token with an
    earlier one. Raises ConfigError if too few are left.
    """
    text = shared_text(encode, shared_tokens)
    asked = [c for c in conversations if not _occurs(c, text)]
    found = [(c.id, encode.opening(_with_system(c, text))) for c in asked]
    fork = min((common_prefix(found[0][1], other) for _, other in found[1:]), default=0)
    chosen: dict[int, Job] = {}
    for name, prompt in found:
        if len(prompt) > fork:
            chosen.setdefault(prompt[fork], Job(name, tuple(prompt), max_tokens, NAMESPACE))
    if len(chosen) <= branches:
        raise ConfigError(
            f"--branches {branches} needs {branches + 1} prompts that differ in their first token;"
            f" --prompts and --limit give {len(chosen)}"
        )
    return list(chosen.values())[: branches + 1]


def shared_text(encode: PromptTokens, num_tokens: int) -> str:
    """A system prompt of num_tokens tokens, of the bundled set's texts; a word more at most."""
    texts = [passage for c in prompts.load("bundled") if (passage := _passage(c))]
    words = "\n\n".join([INTRODUCTION, *texts]).split(" ")
    while encode.length(" ".join(words)) < num_tokens:
        words += ["\n\n", *words]
    sizes = range(len(words) + 1)
    return " ".join(
        words[: bisect_left(sizes, num_tokens, key=lambda k: encode.length(" ".join(words[:k])))]
    )


def _passage(conversation: Conversation) -> str:
    """The text that a conversation is about, without what is asked of it; "" if there is none."""
    if conversation.kind not in ("retrieval", "copying"):
        return ""
    body = conversation.opening[-1]["content"].partition("\n\n")[2]
    return body.partition("\n\nQuestion:")[0]


def _occurs(conversation: Conversation, text: str) -> bool:
    passage = _passage(conversation)
    return bool(passage) and passage in text


def _with_system(conversation: Conversation, text: str) -> list[dict[str, str]]:
    first, *rest = conversation.opening
    if first["role"] == "system":
        return [{"role": "system", "content": f"{text}\n\n{first['content']}"}, *rest]
    return [{"role": "system", "content": text}, first, *rest]


def check_room(engine: Engine, shared_tokens: int, max_tokens: int) -> None:
    """Refuse a shared prompt too short to leave the drafter's window, or too long to be served."""
    widest = max(
        (engine.layout.groups[g].window or 0 for g in engine.layout.draft_groups), default=0
    )
    if shared_tokens < WINDOWS_SHARED * widest:
        raise ConfigError(
            f"--shared-tokens must be at least {WINDOWS_SHARED} windows of the drafter,"
            f" {WINDOWS_SHARED * widest}, got {shared_tokens}"
        )
    if shared_tokens + max_tokens >= engine.max_model_len:
        raise ConfigError(
            f"--shared-tokens {shared_tokens} and --max-tokens {max_tokens} do not fit"
            f" --max-model-len {engine.max_model_len}"
        )


def evict_draft_pages(engine: Engine) -> None:
    """Evict every draft page that nobody holds, as other requests do when they need the room."""
    engine.reset_cache(Domain.DRAFT)


def describe(layout: Layout, done: Sequence[Trace], cold: Sequence[Trace]) -> list[Branch]:
    """The branches in the order in which they ran, each beside the cold run of its id."""
    groups = [layout.groups[g] for g in layout.draft_groups]
    return measures.pair(done, cold, lambda path, reference: _describe(groups, path, reference))


def _describe(groups: Sequence[LayerGroup], path: Trace, cold: Trace) -> Branch:
    fork, size = path.cached_tokens, len(path.prompt)
    agreement = measures.compare(path, cold)
    return Branch(
        id=path.id,
        prompt_tokens=size,
        cached_tokens=fork,
        fork_context=max((fork - g.first_needed(fork) for g in groups), default=0),
        needed=max((max(0, fork - g.first_needed(size)) for g in groups), default=0),
        draft_hit_tokens=path.draft_hit_tokens,
        draft_gap_tokens=path.draft_gap_tokens,
        recomputed_lookahead_tokens=path.recomputed_lookahead_tokens,
        recomputed_hole_tokens=path.recomputed_hole_tokens,
        al=measures.tally(path).al,
        al_cold=measures.tally(cold).al,
        steps_compared=agreement.compared,
        steps_equal=agreement.equal,
    )


def problems(branches: Sequence[Branch]) -> Iterator[str]:
    """Branches that recomputed more than a branch may: the first a window, a later one nothing."""
    for i, branch in enumerate(branches):
        holes, most = branch.recomputed_hole_tokens, branch.fork_context
        if i == 0 and holes > most:
            yield f"the first branch recomputed {holes} positions for draft rows, of {most} it may"
        if i > 0 and holes:
            yield (
                f"branch {branch.id} recomputed {holes} positions for draft rows that a branch"
                " before it had left"
            )
