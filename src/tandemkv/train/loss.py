"""The loss: the drafter's distribution against the target's, and its form for unrolled steps.

Law: step s of row i is compared with the target's distribution for x_{i+2+s}; a row counts at step
s when every token from its first prediction to this one is an answer of the target, outside loops,
and its context holds the row. The vocabulary's logits never live at once and never meet autograd: a
chunk's gradient is written over its logits and carried to the hidden states, and to the table where
the student's logits are biased. This module chooses no data and holds no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

CHUNK = {"cuda": 16384, "cpu": 256}


class Rows(msgspec.Struct, frozen=True):
    """Which rows count. label [n]: flat positions of predicted tokens; valid [S, n] bool."""

    label: Tensor
    valid: Tensor

    def row(self, step: int) -> Tensor:
        """Flat drafter row of each label at a step (clamped at 0 where invalid)."""
        return (self.label - 2 - step).clamp_min(0)


def countable_rows(mask: Tensor, steps: int, first_row: Tensor | None = None) -> Rows:
    """mask [B, T] bool: tokens with loss. first_row [B]: rows below it have no context."""
    length = mask.shape[1]
    label = torch.nonzero(mask.flatten()).flatten()
    column, row = label % length, label // length
    said = torch.nn.functional.pad(mask.long().cumsum(1), (1, 0))
    low = first_row[row] if first_row is not None else torch.zeros_like(row)
    valid = []
    for step in range(steps):
        start = (column - step).clamp_min(0)
        unbroken = said[row, column + 1] - said[row, start] == step + 1
        valid.append(unbroken & (column - 2 - step >= low))
    return Rows(label, torch.stack(valid))


class LossReport(msgspec.Struct, frozen=True):
    """ce, l1: weighted sums, 0-d tensors. accept [S, n]: chance 1 - TV of acceptance per row."""

    ce: Tensor
    l1: Tensor
    accept: Tensor


def soft_targets(
    student: Tensor, teacher: Tensor, weight: Tensor, mix: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """d/d student of sum(weight * (mix[0] * CE + mix[1] * L1)) [n, V], CE [n], L1 [n].

    CE is -sum p log q, L1 is sum |q - p|, p = softmax(teacher), q = softmax(student).
    """
    log_q = student.float().log_softmax(-1)
    q, p = log_q.exp(), teacher.float().softmax(-1)
    ce = -(p * log_q).sum(-1)
    l1 = (q - p).abs().sum(-1)
    sign = torch.where(q > p, 1.0, -1.0)
    slope = mix[0] * (q - p) + mix[1] * q * (sign - (sign * q).sum(-1, keepdim=True))
    return (weight[:, None] * slope).to(student.dtype), ce, l1


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        teacher: Tensor,
        head: Tensor,
        weight: Tensor,
        mix: tuple[float, float],
        hidden: Tensor,
        table: Tensor | None,
    ):
        steps, count, width = hidden.shape
        grad = torch.empty_like(hidden)
        rank = 0 if table is None else table.shape[1]
        whole = head if table is None else torch.cat([head, table.to(head.dtype)], 1)
        table_grad = None if table is None else torch.zeros_like(table, dtype=torch.float32)
        ce, l1 = torch.zeros_like(weight), torch.zeros_like(weight)
        chunk = CHUNK.get(hidden.device.type, 4096)
        for start in range(0, count, chunk):
            part = slice(start, min(start + chunk, count))
            targets = _Targets(teacher[part] @ head.T)
            for s in range(steps):
                slope, ce[s, part], l1[s, part] = targets.compare(
                    hidden[s, part] @ whole.T, weight[s, part].contiguous(), mix
                )
                grad[s, part] = slope @ whole
                if table_grad is not None:
                    table_grad += slope.T @ hidden[s, part, width - rank :]
        ctx.save_for_backward(grad, table_grad)
        total_ce, total_l1 = (weight * ce).sum(), (weight * l1).sum()
        ctx.mark_non_differentiable(total_ce, total_l1, l1)
        return mix[0] * total_ce + mix[1] * total_l1, total_ce, total_l1, l1

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        grad, table_grad = ctx.saved_tensors
        to_table = None if table_grad is None else table_grad * grads[0]
        return None, None, None, None, grad * grads[0].to(grad.dtype), to_table


def soft_loss(
    hidden: Tensor,
    teacher: Tensor,
    head: Tensor,
    weight: Tensor,
    mix: tuple[float, float],
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sum(weight * (mix[0] * CE + mix[1] * L1)), differentiable; weighted CE, L1; each row's L1.

    hidden [S, n, d] against teacher [n, d] (past the final norm) over the rows of head [v, d];
    weight [S, n]. table [v, r]: hidden is [S, n, d + r], its last r columns biasing the logits by
    their product with the table.
    """
    return _ChunkedLoss.apply(teacher, head, weight, mix, hidden, table)


class _Targets:
    """The teacher's logits of a chunk, compared with several students."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.lse: Tensor | None = None
        if logits.is_cuda:
            from tandemkv.train import kernels

            self.lse = kernels.log_sum(logits)

    def compare(
        self, student: Tensor, weight: Tensor, mix: tuple[float, float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.lse is None:
            return soft_targets(student, self.logits, weight, mix)
        from tandemkv.train import kernels

        return kernels.soft_targets(student, self.logits, self.lse, weight, mix)


def unrolled_loss(
    outputs: Sequence[Tensor],
    teacher_hidden: Tensor,
    head: Tensor,
    rows: Rows,
    decay: float,
    mix: tuple[float, float],
) -> tuple[Tensor, LossReport]:
    """outputs: per step [B, T, d]; teacher_hidden [B, T, d] (past the final norm); head [v, d].

    Steps weigh decay ** s, normalised; within a step, counted rows weigh the same. Returns the
    differentiable loss and its report.
    """
    steps = len(outputs)
    share = torch.tensor([decay**s for s in range(steps)], device=head.device)
    share = share / share.sum()
    weight = rows.valid.float() * (share / rows.valid.sum(1).clamp_min(1))[:, None]
    teacher = teacher_hidden.flatten(0, 1)[(rows.label - 1).clamp_min(0)]
    hidden = torch.stack(
        [x.flatten(0, 1).index_select(0, rows.row(s)) for s, x in enumerate(outputs)]
    )
    loss, ce, l1, per_row = soft_loss(hidden, teacher, head, weight, mix)
    accept = (1 - per_row / 2) * rows.valid
    return loss, LossReport(ce, l1, accept)


def expected_length(report: LossReport, rows: Rows) -> float:
    """tau: 1 + expected accepted drafts of a chain from each row, teacher forced.

    accept is arranged by label; a chain from row i meets labels i + 2, i + 3, ... at steps 0, 1...
    so step s of label t + s belongs to the chain of label t.
    """
    steps, count = rows.valid.shape
    if not count:
        return 1.0
    index = torch.arange(count, device=rows.label.device)
    alive = torch.ones(count, device=index.device)
    total = torch.zeros(count, device=index.device)
    whole = torch.ones(count, dtype=torch.bool, device=index.device)
    for step in range(steps):
        at = (index + step).clamp_max(count - 1)
        whole &= rows.valid[step, at] & (rows.label[at] == rows.label + step)
        alive = alive * report.accept[step, at]
        total += alive
    return float(1 + total[whole].mean()) if bool(whole.any()) else 1.0
