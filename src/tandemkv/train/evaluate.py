"""Acceptance on held-out prompts: the target's greedy answers, and greedy drafts at every anchor.

Law: drafts are what a server would draft at that anchor (its own tokens fed back, context rows from
the target's captures), so walking the accepted counts gives the serving engine's steps.
Answers are cut at the first 12-gram that occurred twice before: loops would flatter. AL counts
tokens per step, recovered or bonus token included, the prompt's own first token excluded. This
module trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.train.data import LOOP, repeats
from tandemkv.train.prompts import Prompt, TurnScripts
from tandemkv.train.selfplay import SelfPlay
from tandemkv.train.teacher import Teacher

EARLY_STEPS = 16
NO_DRAFT = -2
"""Drafted where nothing could be drafted; no token and no padding."""
_PADDING = -1
_HEAD_CHUNK = 8192

Pick = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""(hidden [n, d], prefix [n, r] | None, table [V, r] | None) -> the likeliest ids [n]; prefix @
table.T biases the logits."""


class Answer(msgspec.Struct, frozen=True):
    """One greedy answer. tokens: prompt and answer; start: the first answer token; count: answer
    tokens up to the cut; looped: whether a loop was cut."""

    set: str
    tokens: list[int]
    start: int
    count: int
    looped: bool


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """How to draft. head_rows: rows of the ranked vocabulary, None: all. keep: prompt rows that the
    drafter still has, None: all of them. markov: whether a Markov head has its say."""

    name: str
    num_drafts: int = 4
    head_rows: int | None = None
    keep: int | None = None
    markov: bool = True


class Drafting(Protocol):
    """A drafter that drafts at many anchors at once."""

    @property
    def taps(self) -> tuple[int, ...]: ...
    def drafts_at(
        self,
        captures: Sequence[Tensor],
        tokens: Tensor,
        anchors: Tensor,
        variant: Variant,
        first_row: Tensor | None,
        pick: Pick,
    ) -> Tensor:
        """Drafts [B, A, num_drafts] at anchors [B, A] of tokens [B, T], each as a server drafts
        there whose context rows below first_row [B] are absent."""
        ...


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Pooled over a set. low, high: 95 % bootstrap interval over prompts. by_position: share of
    steps with room for draft j in which it was accepted. early: AL of the first 16 steps."""

    set: str
    variant: str
    num_drafts: int
    prompts: int
    looped: int
    steps: int
    tokens: int
    al: float
    low: float
    high: float
    early: float
    by_position: list[float]


def answer_prompts(
    teacher: Teacher,
    scripts: TurnScripts,
    sets: Mapping[str, Sequence[Prompt]],
    max_new_tokens: int,
    bounds: Sequence[int] = (256, 640, 1280, 1 << 30),
) -> list[Answer]:
    """Greedy answers to every prompt that fits the target's context, in batches of like length."""
    room = teacher.max_length - max_new_tokens - 8
    flat = [(name, p) for name, prompts in sets.items() for p in prompts if len(p.tokens) <= room]
    answers: list[Answer] = []
    low = 0
    for high in bounds:
        part = [x for x in flat if low < len(x[1].tokens) <= high]
        low = high
        if part:
            answers += _answer_batch(teacher, scripts, part, max_new_tokens)
    return answers


def _answer_batch(
    teacher: Teacher,
    scripts: TurnScripts,
    part: Sequence[tuple[str, Prompt]],
    max_new_tokens: int,
) -> list[Answer]:
    length = max(len(p.tokens) for _, p in part) + max_new_tokens + 8
    player = SelfPlay(teacher, scripts, len(part), length)
    prompts = [msgspec.structs.replace(p, max_answer=None) for _, p in part]
    played, _ = player.run(prompts, [0.0] * len(part), max_answer=1 << 20)
    del player
    answers: list[Answer] = []
    for i, (name, prompt) in enumerate(part):
        start = len(prompt.tokens)
        said = played[i, start : start + max_new_tokens]
        ends = torch.nonzero(torch.isin(said, torch.tensor(teacher.eos_token_ids).to(said)))
        count = int(ends[0]) + 1 if len(ends) else len(said)
        loops = torch.nonzero(
            repeats(said[None, :count], torch.ones_like(said[None, :count], dtype=torch.bool))[0]
            >= LOOP
        )
        cut = int(loops[0]) if len(loops) else count
        tokens = played[i, : start + count].tolist()
        answers.append(Answer(name, tokens, start, cut, bool(len(loops))))
    return answers


@torch.no_grad()
def accepted_drafts(
    teacher: Teacher,
    trainee: Drafting,
    answers: Sequence[Answer],
    variant: Variant,
    ranking: Tensor,
    batch_tokens: int = 16384,
) -> list[list[int]]:
    """Per answer, accepted drafts (0..num_drafts) at each anchor: its tokens 0 .. count - 2."""
    ids = None if variant.head_rows is None else ranking[: variant.head_rows].to(teacher.device)
    pick = greedy(teacher.head, ids)
    order = sorted(range(len(answers)), key=lambda i: len(answers[i].tokens))
    result: list[list[int]] = [[] for _ in answers]
    while order:
        size = max(1, batch_tokens // (len(answers[order[-1]].tokens) + 8))
        batch, order = order[-size:], order[:-size]
        counts = _accepted_batch(teacher, trainee, [answers[i] for i in batch], variant, pick)
        for i, row in zip(batch, counts, strict=True):
            result[i] = row
    return result


def greedy(head: Tensor, ids: Tensor | None) -> Pick:
    """Picks the likeliest of all ids of a head [V, d], or of some."""
    rows = head if ids is None else head[ids]

    def pick(hidden: Tensor, prefix: Tensor | None, table: Tensor | None) -> Tensor:
        bias = None if table is None else (table if ids is None else table[ids]).to(rows.dtype)
        found: list[Tensor] = []
        for at in range(0, len(hidden), _HEAD_CHUNK):
            part = slice(at, at + _HEAD_CHUNK)
            logits = hidden[part].to(rows.dtype) @ rows.T
            if bias is not None and prefix is not None:
                logits += prefix[part].to(rows.dtype) @ bias.T
            found.append(logits.argmax(-1))
        best = torch.cat(found)
        return best if ids is None else ids[best]

    return pick


def _accepted_batch(
    teacher: Teacher,
    trainee: Drafting,
    answers: Sequence[Answer],
    variant: Variant,
    pick: Pick,
) -> list[list[int]]:
    k, device = variant.num_drafts, teacher.device
    length = max(len(a.tokens) for a in answers) + k + 2
    padded = torch.stack(
        [
            F.pad(torch.tensor(a.tokens), (0, length - len(a.tokens)), value=_PADDING)
            for a in answers
        ]
    ).to(device)
    tokens = padded.clamp_min(0)
    captures, _ = teacher.dense(tokens, trainee.taps)
    starts = torch.tensor([a.start for a in answers], device=device)
    first_row = None if variant.keep is None else (starts - variant.keep).clamp_min(0)
    ahead = torch.arange(max(1, *(a.count - 1 for a in answers)), device=device)
    anchors = (starts[:, None] + ahead).clamp_max(length - k - 1)
    drafts = trainee.drafts_at(captures, tokens, anchors, variant, first_row, pick)
    label = anchors[..., None] + torch.arange(1, k + 1, device=device)
    hits = drafts == padded.gather(1, label.flatten(1)).view(label.shape)
    accepted = hits.long().cumprod(-1).sum(-1).tolist()
    return [row[: max(0, a.count - 1)] for row, a in zip(accepted, answers, strict=True)]


def walk(accepted: Sequence[int], num_drafts: int) -> list[tuple[int, int]]:
    """Serving steps over one answer: (tokens emitted, drafts that had room) of each step.

    accepted[i]: accepted drafts with the answer's token i as anchor, i = 0 .. count - 2.
    """
    steps: list[tuple[int, int]] = []
    at, end = 0, len(accepted)
    while at < end:
        room = min(num_drafts, end - at - 1)
        emitted = min(accepted[at], room) + 1
        steps.append((emitted, room))
        at += emitted
    return steps


def summarise(
    name: str, variant: Variant, answers: Sequence[Answer], accepted: Sequence[Sequence[int]]
) -> Acceptance:
    """One set's acceptance under one variant."""
    walks = [walk(row, variant.num_drafts) for row in accepted]
    walks = [w for w in walks if w]
    tokens = np.array([sum(e for e, _ in w) for w in walks])
    steps = np.array([len(w) for w in walks])
    flat = [step for w in walks for step in w]
    early = [e for w in walks for e, _ in w[:EARLY_STEPS]]
    low, high = interval(tokens, steps)
    by_position = []
    for j in range(1, variant.num_drafts + 1):
        kept = [emitted > j for emitted, room in flat if room >= j]
        by_position.append(round(float(np.mean(kept)), 4) if kept else 0.0)
    return Acceptance(
        set=name,
        variant=variant.name,
        num_drafts=variant.num_drafts,
        prompts=len(walks),
        looped=sum(a.looped for a in answers),
        steps=int(steps.sum()),
        tokens=int(tokens.sum()),
        al=round(float(tokens.sum() / max(1, steps.sum())), 4),
        low=round(low, 4),
        high=round(high, 4),
        early=round(float(np.mean(early)), 4) if early else 0.0,
        by_position=by_position,
    )


def interval(tokens: np.ndarray, steps: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval over prompts of pooled tokens per step."""
    if not len(tokens):
        return 0.0, 0.0
    rng = np.random.default_rng(0)
    pick = rng.integers(0, len(tokens), (draws, len(tokens)))
    al = tokens[pick].sum(1) / steps[pick].sum(1)
    return float(np.quantile(al, 0.025)), float(np.quantile(al, 0.975))


def evaluate(
    teacher: Teacher,
    trainee: Drafting,
    answers: Sequence[Answer],
    variants: Sequence[Variant],
    ranking: Tensor,
) -> list[Acceptance]:
    """Every set under every variant, ordered by set."""
    results: list[Acceptance] = []
    names = sorted({a.set for a in answers})
    for variant in variants:
        accepted = accepted_drafts(teacher, trainee, answers, variant, ranking)
        for name in names:
            at = [i for i, a in enumerate(answers) if a.set == name]
            results.append(
                summarise(name, variant, [answers[i] for i in at], [accepted[i] for i in at])
            )
    return sorted(results, key=lambda r: r.set)
