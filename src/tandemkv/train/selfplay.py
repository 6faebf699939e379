"""Self-play: the target writes both sides of many conversations at once, all rows in lock step.

Law: every row is at the same position, so one captured graph serves every step, prompts are fed
token by token and nothing is padded; a row that ends a turn goes on with the other speaker until
the row is full. What was forced and who said what is recorded per token. Source of self-prompting:
Magpie, arXiv 2406.08464. This module judges nothing it generates.

    FORCED  prompt and template      ANSWER  the assistant's words      QUESTION  the user's words
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandemkv.train.prompts import Prompt, TurnScripts
from tandemkv.train.teacher import Teacher

FORCED, ANSWER, QUESTION = 0, 1, 2
USER, ASSISTANT = 0, 1
MIN_P = 0.02
"""Tokens under this share of the likeliest one are never drawn."""
REPORT_EVERY = 16


class SelfPlay:
    """Generates batches of `rows` x `length` tokens; one CUDA graph, captured at first use."""

    def __init__(self, teacher: Teacher, scripts: TurnScripts, rows: int, length: int) -> None:
        self.teacher, self.rows, self.length = teacher, rows, length
        self.opening = scripts.opening
        device = teacher.device
        self.cache = teacher.new_cache(rows, length)
        self._scripts, self._script_len = _table(
            [scripts.before_question, scripts.before_answer], device
        )
        self._eos = torch.tensor(teacher.eos_token_ids, device=device)
        self.tokens = torch.zeros(rows, length + 1, dtype=torch.long, device=device)
        self.kinds = torch.zeros(rows, length + 1, dtype=torch.int8, device=device)
        self._prompt_len = torch.zeros(rows, dtype=torch.long, device=device)
        self._speaker = torch.zeros_like(self._prompt_len)
        self._cursor = torch.zeros_like(self._prompt_len)
        self._spoken = torch.zeros_like(self._prompt_len)
        self._limits = torch.zeros(2, rows, dtype=torch.long, device=device)
        self._temperature = torch.zeros(2, rows, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[Prompt | None],
        temperatures: Sequence[float],
        *,
        max_answer: int,
        max_question: int = 160,
        seed: int = 0,
        steps: int | None = None,
        report: Callable[[int], None] = lambda _: None,
    ) -> tuple[Tensor, Tensor]:
        """Play one batch: tokens [B, T] long and kinds [B, T] int8, on the teacher's device.

        prompts: one per row; None lets the target invent the first question. steps: positions to
        fill (default: the whole row). report(positions filled) is called now and then. Equal
        seeds give equal rows on one device.
        """
        torch.manual_seed(seed)
        self._load(prompts, temperatures, max_answer, max_question)
        if self.teacher.device.type == "cuda" and self._graph is None:
            self._capture()
            self._load(prompts, temperatures, max_answer, max_question)
        for position in range((steps or self.length) - 1):
            if position % REPORT_EVERY == 0:
                report(position)
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()
        stop = steps or self.length
        return self.tokens[:, :stop].clone(), self.kinds[:, :stop].clone()

    def _load(
        self,
        prompts: Sequence[Prompt | None],
        temperatures: Sequence[float],
        max_answer: int,
        max_question: int,
    ) -> None:
        """Put prompts and per-row settings into the tensors that the graph reads."""
        device = self.teacher.device
        given = [(p.tokens if p else self.opening)[: self.length - 8] for p in prompts]
        table, lengths = _table(given, device)
        self.tokens.zero_()
        self.kinds.zero_()
        self.tokens[:, : table.shape[1]] = table
        self._prompt_len.copy_(lengths)
        self._speaker.copy_(torch.tensor([ASSISTANT if p else USER for p in prompts]))
        self._cursor.copy_(self._script_len[self._speaker])
        self._spoken.zero_()
        limits = [(p.max_answer if p else None) or max_answer for p in prompts]
        self._limits[ASSISTANT].copy_(torch.tensor(limits))
        self._limits[USER].fill_(max_question)
        self._temperature[ASSISTANT].copy_(torch.tensor(temperatures))
        self._temperature[USER].fill_(1.0)
        self.cache.step.zero_()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()

    def _step(self) -> None:
        """One position for every row: forward, sample, then forced or spoken token, then turns."""
        here, nxt = self.cache.step, self.cache.step + 1
        logits = self.teacher.step(self.tokens.index_select(1, here)[:, 0], self.cache)
        sampled = draw(logits, self._pick(self._temperature))
        in_prompt = nxt < self._prompt_len
        scripted = ~in_prompt & (self._cursor < self._script_len[self._speaker])
        speaks = ~in_prompt & ~scripted
        self._spoken += speaks
        sampled = torch.where(self._spoken >= self._pick(self._limits), self._eos[0], sampled)
        column = self._cursor.clamp(max=self._scripts.shape[1] - 1)
        forced = torch.where(
            in_prompt, self.tokens.index_select(1, nxt)[:, 0], self._scripts[self._speaker, column]
        )
        token = torch.where(speaks, sampled, forced)
        kind = torch.where(speaks, torch.where(self._speaker == USER, QUESTION, ANSWER), FORCED)
        self.tokens.index_copy_(1, nxt, token[:, None])
        self.kinds.index_copy_(1, nxt, kind.to(torch.int8)[:, None])
        self._cursor += scripted
        ended = speaks & torch.isin(token, self._eos)
        self._speaker.copy_(torch.where(ended, 1 - self._speaker, self._speaker))
        self._cursor.masked_fill_(ended, 0)
        self._spoken.masked_fill_(ended, 0)
        self.cache.step += 1

    def _pick(self, by_speaker: Tensor) -> Tensor:
        return torch.where(self._speaker == USER, by_speaker[USER], by_speaker[ASSISTANT])


def draw(logits: Tensor, temperature: Tensor) -> Tensor:
    """Sample each row of logits [B, V] at its temperature [B]; 0 is greedy. Gumbel, with min-p."""
    logits = logits.float()
    heat = temperature[:, None]
    floor = logits.amax(-1, keepdim=True) + heat * math.log(MIN_P)
    noise = torch.empty_like(logits).exponential_().log_()
    return (logits - heat * noise).masked_fill_(logits < floor, -math.inf).argmax(-1)


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Lists of unequal length as a zero-padded [n, longest] tensor and their lengths [n]."""
    lengths = torch.tensor([len(row) for row in rows])
    table = torch.zeros(len(rows), max(1, int(lengths.max())), dtype=torch.long)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return table.to(device), lengths.to(device)
