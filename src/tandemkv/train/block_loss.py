"""Where draft blocks are trained, and what they are compared with.

Law: draft k of the block at anchor n is compared with the target's distribution for the token at
n + k; it counts while every token from n + 1 to n + k is an answer of the target, outside loops.
What is drawn comes from the generator that is given. This module holds no weights.
"""

from __future__ import annotations

import math

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.train.dflash import BlockTrainee
from tandemkv.train.loss import soft_loss

FADE = 4.0
"""Draft k weighs exp(-(k - 1) / FADE)."""
_ALIGNED = 16


class Blocks(msgspec.Struct, frozen=True):
    """Draft blocks of a batch: anchors [B, A]; valid [B, A, K], which drafts count."""

    anchors: Tensor
    valid: Tensor

    @property
    def labels(self) -> Tensor:
        """Positions that the drafts predict [B, A, K]; those past the end are not valid."""
        ahead = torch.arange(1, self.valid.shape[2] + 1, device=self.anchors.device)
        return self.anchors[..., None] + ahead


def draw_blocks(mask: Tensor, num_drafts: int, per_1024: int, generator: torch.Generator) -> Blocks:
    """Blocks at random anchors whose next token has loss (mask [B, T]), as many in every row."""
    rows, length = mask.shape
    count = max(1, min(length, round(per_1024 * length / 1024)))
    if count > _ALIGNED:
        count -= count % _ALIGNED
    answered = F.pad(mask[:, 1:], (0, 1))
    drawn = torch.rand(rows, length, generator=generator).to(mask.device)
    anchors = drawn.masked_fill(~answered, -1.0).topk(count, 1).indices.sort(1).values
    label = anchors[..., None] + torch.arange(1, num_drafts + 1, device=mask.device)
    inside = label < length
    said = mask.gather(1, label.clamp_max(length - 1).flatten(1)).view(label.shape)
    return Blocks(anchors, (said & inside).long().cumprod(-1).bool())


def drop_context(
    anchors: Tensor, share: float, window: int | None, generator: torch.Generator
) -> Tensor | None:
    """First context row that each block still has [B, A]; 0 but for a share of them.

    The rows that are left are drawn evenly from none to all that the window would show.
    """
    if not share:
        return None
    drawn = torch.rand(2, *anchors.shape, generator=generator).to(anchors.device)
    seen = anchors if window is None else anchors.clamp_max(window - 1)
    kept = (drawn[1] * (seen + 1)).long()
    return torch.where(drawn[0] < share, anchors - kept, 0)


class BlockReport(msgspec.Struct, frozen=True):
    """ce, l1: weighted means, 0-d tensors. accept [B, A, K]: chance 1 - TV, 0 where not valid."""

    ce: Tensor
    l1: Tensor
    accept: Tensor
    valid: Tensor

    @property
    def count(self) -> int:
        """Drafts that counted."""
        return int(self.valid.sum())

    def tau(self) -> float:
        """1 + expected accepted drafts of a block, over blocks whose every draft counts."""
        whole = self.valid.all(-1)
        if not bool(whole.any()):
            return 1.0
        return float(1 + self.accept[whole].cumprod(-1).sum(-1).mean())


def block_loss(
    trainee: BlockTrainee,
    captures: list[Tensor],
    teacher_hidden: Tensor,
    tokens: Tensor,
    blocks: Blocks,
    head: tuple[Tensor, Tensor | None],
    first_row: Tensor | None,
    mix: tuple[float, float],
) -> tuple[Tensor, BlockReport]:
    """The loss over the drafts that count, teacher forced; with the confidence head's, if any.

    teacher_hidden [B, T, d], past the final norm. head: rows [v, d] of the target's head and the
    ids that they are of, None: all.
    """
    states = trainee(trainee.context(captures), tokens, blocks.anchors, first_row=first_row)
    matrix, ids = head
    at = torch.nonzero(blocks.valid.flatten()).flatten()
    row = torch.arange(len(tokens), device=tokens.device)[:, None, None] * tokens.shape[1]
    before = (blocks.labels - 1 + row).flatten()[at]
    hidden, teacher = states.flatten(0, 2)[at], teacher_hidden.flatten(0, 1)[before]
    fade = torch.arange(blocks.valid.shape[2], device=at.device) / -FADE
    weight = fade.exp().expand(blocks.valid.shape).flatten()[at]
    weight = weight / weight.sum().clamp_min(math.ulp(1.0))
    prefix, table = trainee.prefix(tokens.flatten()[before], hidden.dtype), None
    outer = hidden
    if prefix is not None:
        table = trainee.markov_head.markov_w2.weight
        table = table if ids is None else table[ids]
        outer = torch.cat([hidden, prefix], -1)
    loss, ce, l1, apart = soft_loss(outer[None], teacher, matrix, weight[None], mix, table)
    accept = 1 - apart[0] / 2
    if trainee.shape.confidence:
        foreseen = trainee.confidence(hidden, prefix)
        miss = F.binary_cross_entropy_with_logits(foreseen, accept, reduction="none")
        loss = loss + (weight * miss).sum()
    everywhere = torch.zeros(blocks.valid.numel(), device=at.device)
    everywhere[at] = accept
    return loss, BlockReport(ce, l1, everywhere.view(blocks.valid.shape), blocks.valid)
