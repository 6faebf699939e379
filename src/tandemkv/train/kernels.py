"""Triton kernels of the training path: one-token attention over a static cache, soft-target loss.

Law: each computes the function of its torch counterpart (teacher.static_attention,
loss.soft_targets), to bf16 rounding. Import this module on CUDA only; it holds no policy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, step_ptr, scale, capacity, window,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (row, KV head): its GROUP queries over cache slots [first, step]."""
    pair = tl.program_id(0).to(tl.int64)
    stop = tl.load(step_ptr).to(tl.int32) + 1
    first = tl.maximum(stop - window, 0)
    group = tl.arange(0, 16)
    dim = tl.arange(0, DIM_PAD)
    q_at = (pair * GROUP + group[:, None]) * DIM + dim[None, :]
    q_mask = (group[:, None] < GROUP) & (dim[None, :] < DIM)
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)
    best = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, DIM_PAD], tl.float32)
    for start in range((first // BLOCK) * BLOCK, stop, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        live = (slot >= first) & (slot < stop)
        at = (pair * capacity + slot[:, None]) * DIM + dim[None, :]
        mask = live[:, None] & (dim[None, :] < DIM)
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(live[None, :], score, -1e30)
        top = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp(score - top[:, None])
        fade = tl.exp(best - top)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v)
        best = top
    tl.store(out_ptr + q_at, (acc / total[:, None]).to(q.dtype), mask=q_mask)


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, step: Tensor, scale: float, window: int | None
) -> Tensor:
    """query [B, H, hd] over keys, values [B, Hkv, S, hd], slots 0..step (step: [1], on device)."""
    query = query.contiguous()
    rows, heads, dim = query.shape
    _, kv_heads, capacity, _ = keys.shape
    out = torch.empty_like(query)
    _decode_kernel[(rows * kv_heads,)](
        query, keys, values, out, step, scale, capacity, window or capacity + 1,
        GROUP=heads // kv_heads, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), BLOCK=64,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _log_sum_kernel(logits_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    best = -float("inf")
    total = 0.0
    for start in range(0, width, BLOCK):
        x = tl.load(
            logits_ptr + row * width + start + at, mask=start + at < width, other=-float("inf")
        ).to(tl.float32)
        top = tl.maximum(best, tl.max(x, 0))
        total = total * tl.exp(best - top) + tl.sum(tl.exp(x - top), 0)
        best = top
    tl.store(out_ptr + row, best + tl.log(total))


def log_sum(logits: Tensor) -> Tensor:
    """log sum exp of each row [n, V] -> [n] float32."""
    out = torch.empty(len(logits), device=logits.device, dtype=torch.float32)
    _log_sum_kernel[(len(logits),)](logits, out, logits.shape[1], BLOCK=4096, num_warps=8)
    return out


@triton.jit
def _soft_target_kernel(
    student_ptr, teacher_ptr, teacher_lse_ptr, weight_ptr, ce_ptr, l1_ptr,
    ce_share, l1_share, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per row: CE(p, q), |q - p|_1, and over the student's logits their weighted gradient."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    student_ptr += row * width
    teacher_ptr += row * width
    best = -float("inf")
    total = 0.0
    for start in range(0, width, BLOCK):
        mask = start + at < width
        a = tl.load(student_ptr + start + at, mask=mask, other=-float("inf")).to(tl.float32)
        top = tl.maximum(best, tl.max(a, 0))
        total = total * tl.exp(best - top) + tl.sum(tl.exp(a - top), 0)
        best = top
    student_lse = best + tl.log(total)
    teacher_lse = tl.load(teacher_lse_ptr + row)
    ce = 0.0
    l1 = 0.0
    signed = 0.0
    for start in range(0, width, BLOCK):
        mask = start + at < width
        a = tl.load(student_ptr + start + at, mask=mask, other=-1e30).to(tl.float32) - student_lse
        b = tl.load(teacher_ptr + start + at, mask=mask, other=-1e30).to(tl.float32) - teacher_lse
        q = tl.exp(a)
        p = tl.exp(b)
        ce -= tl.sum(tl.where(mask, p * a, 0.0), 0)
        l1 += tl.sum(tl.abs(q - p), 0)
        signed += tl.sum(tl.where(q > p, q, -q), 0)
    weight = tl.load(weight_ptr + row)
    for start in range(0, width, BLOCK):
        mask = start + at < width
        a = tl.load(student_ptr + start + at, mask=mask, other=-1e30).to(tl.float32) - student_lse
        b = tl.load(teacher_ptr + start + at, mask=mask, other=-1e30).to(tl.float32) - teacher_lse
        q = tl.exp(a)
        p = tl.exp(b)
        slope = ce_share * (q - p) + l1_share * q * (tl.where(q > p, 1.0, -1.0) - signed)
        tl.store(
            student_ptr + start + at, (weight * slope).to(student_ptr.dtype.element_ty), mask=mask
        )
    tl.store(ce_ptr + row, ce)
    tl.store(l1_ptr + row, l1)


def soft_targets(
    student: Tensor, teacher: Tensor, teacher_lse: Tensor, weight: Tensor, mix: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """As loss.soft_targets, in place: the gradient takes the memory of the student's logits."""
    rows, width = student.shape
    ce = torch.empty(rows, device=student.device, dtype=torch.float32)
    l1 = torch.empty_like(ce)
    _soft_target_kernel[(rows,)](
        student, teacher, teacher_lse, weight, ce, l1, mix[0], mix[1], width,
        BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return student, ce, l1
