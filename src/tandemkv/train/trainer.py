"""The training loop: batches, optimizer, schedule, checkpoints; it stops and goes on anywhere.

Law: with a budget of steps or tokens, a run that was stopped and resumed ends with the very
parameters of one that was not (same device and build). Whatever is drawn at a step is a function of
(seed, step) or lies in the checkpoint. A checkpoint is written whole or not at all. This module
generates no data, writes no report and knows a method by its protocol alone.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tandemkv.train.data import BatchOrder, Pool
from tandemkv.train.methods import Batch, Report, method_of
from tandemkv.train.options import TrainOptions
from tandemkv.train.teacher import Teacher

LOG_EVERY = 20
HELD_OUT_SEED = 1


class Point(msgspec.Struct, frozen=True):
    """One point of the training curve. tau: 1 + expected accepted drafts, teacher forced."""

    step: int
    tokens: int
    seconds: float
    ce: float
    l1: float
    tau: float
    grad_norm: float
    lr: float
    held_out: bool = False


class StopSignal:
    """Ctrl-C asks for a stop after the step in hand; a second one interrupts at once.

    answer: called at the first, from the signal's handler.
    """

    def __init__(self, answer: Callable[[], None] = lambda: None) -> None:
        self.asked, self._answer = False, answer
        self._before: Any = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._answer()


class Trainer:
    """One run: its parameters, its place in the data, its curve. `fit` trains, `save` keeps."""

    def __init__(
        self,
        options: TrainOptions,
        teacher: Teacher,
        trainee: Any,
        pools: dict[str, Pool],
        ranking: Tensor,
    ) -> None:
        self.options, self.teacher, self.trainee, self.pools = options, teacher, trainee, pools
        self.method = method_of(options)
        self.ranking = ranking.to(teacher.device)
        self.order = BatchOrder(pools, options.batch_tokens, options.seed)
        self._rates, self.optimizers = zip(*_optimizers(trainee, options), strict=True)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.curve: list[Point] = []
        self._clipped = _without(list(trainee.parameters()), trainee.aside())

    @property
    def progress(self) -> float:
        """Share of the training budget that is used, 0 to 1."""
        o = self.options
        if o.steps is not None:
            return self.step / o.steps
        if o.tokens is not None:
            return self.tokens / o.tokens
        return self.seconds / (o.seconds or 1.0)

    @property
    def done(self) -> bool:
        """Whether the budget is used up."""
        return self.progress >= 1.0

    def fit(
        self,
        report: Callable[[Point, float], None],
        checkpoint: Path,
        stopping: Callable[[], None] = lambda: None,
    ) -> bool:
        """Train until the budget is used (True) or a pause is due or asked for (False).

        Saves at every checkpoint interval and on the way out. report(point, progress).
        stopping is called when Ctrl-C asks for the stop.
        """
        start = saved = time.monotonic()
        before = self.seconds
        with StopSignal(stopping) as stop:
            while not self.done and not stop.asked and not self._pause_due(start):
                point = self._one_step()
                self.seconds = before + time.monotonic() - start
                if point:
                    self.curve.append(point)
                    report(point, self.progress)
                if time.monotonic() - saved > self.options.checkpoint_s:
                    self.save(checkpoint)
                    saved = time.monotonic()
        self.save(checkpoint)
        return self.done

    def _pause_due(self, start: float) -> bool:
        limit = self.options.pause_after
        return limit is not None and time.monotonic() - start >= limit

    def _one_step(self) -> Point | None:
        o, share = self.options, min(1.0, self.progress)
        lr = self._set_lr(share)
        tokens, mask = self.order.next()
        generator = torch.Generator().manual_seed(o.seed * 1_000_003 + self.step)
        ids = self._head_ids(generator)
        batch = Batch(
            tokens=tokens,
            mask=mask,
            head=self.teacher.head if ids is None else self.teacher.head[ids],
            ids=ids,
            generator=generator,
            mix=self.method.mixes[share >= self.method.mix_turn],
        )
        loss, report = self.method.loss(o, self.teacher, self.trainee, batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._clipped, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self.tokens += tokens.numel()
        if self.step % LOG_EVERY != 1 and not self.done:
            return None
        return self._point(report, float(norm), lr)

    @torch.no_grad()
    def held_out(self, batch_tokens: int = 16384) -> Point | None:
        """Loss and tau over the held-out rows, whole vocabulary and contexts; None without."""
        parts: list[tuple[float, float, float, int]] = []
        for pool in self.pools.values():
            tokens, mask = pool.held_out
            size = max(1, batch_tokens // max(1, pool.length))
            for i in range(0, len(tokens), size):
                batch = Batch(
                    tokens=tokens[i : i + size].long(),
                    mask=mask[i : i + size],
                    head=self.teacher.head,
                    ids=None,
                    generator=torch.Generator().manual_seed(HELD_OUT_SEED),
                    mix=self.method.mixes[-1],
                    held_out=True,
                )
                _, report = self.method.loss(self.options, self.teacher, self.trainee, batch)
                if report.count:
                    found = float(report.ce), float(report.l1), report.tau(), report.count
                    parts.append(found)
        if not parts:
            return None
        weight = sum(p[3] for p in parts)
        ce, l1, tau = (sum(p[i] * p[3] for p in parts) / weight for i in range(3))
        return Point(self.step, self.tokens, self.seconds, ce, l1, tau, 0.0, 0.0, True)

    def _point(self, report: Report, norm: float, lr: float) -> Point:
        ce, l1 = float(report.ce), float(report.l1)
        return Point(self.step, self.tokens, self.seconds, ce, l1, report.tau(), norm, lr)

    def _set_lr(self, share: float) -> float:
        factor = schedule(share, self.options.warmup, self.options.final_lr)
        for rate, optimizer in zip(self._rates, self.optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        return self.options.lr * factor

    def _head_ids(self, generator: torch.Generator) -> Tensor | None:
        """Rows of the target's head that this step's softmax runs over [v]; None: all."""
        total, rare = self.options.head_rows, self.options.head_random
        size = self.teacher.vocab_size
        if not total or total >= size:
            return None
        common = total - rare
        drawn = torch.randperm(size - common, generator=generator)[:rare]
        picked = torch.cat([torch.arange(common), common + drawn])
        return self.ranking[picked.to(self.ranking.device)]

    def save(self, path: Path) -> None:
        """Write the checkpoint, atomically."""
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "model": self.trainee.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "order": self.order.state(),
            "curve": [list(msgspec.structs.astuple(point)) for point in self.curve],
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.trainee.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.order.restore(state["order"])
        self.curve = [Point(*values) for values in state["curve"]]


def schedule(share: float, warmup: float, final: float) -> float:
    """Factor on the learning rate at a share of the budget: linear warm-up, cosine to `final`."""
    if share < warmup:
        return max(share / warmup, 0.02)
    along = (share - warmup) / max(1e-9, 1 - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))


def _optimizers(trainee: Any, options: TrainOptions) -> list[tuple[float, torch.optim.Optimizer]]:
    """Each with its peak rate: AdamW for all, or Muon for the matrices and AdamW for the rest;
    lookup tables, which are no matrices, by an AdamW of their own."""
    tables = trainee.tables()
    rest = _without(list(trainee.parameters()), tables)
    fused = rest[0].is_cuda
    found: list[tuple[float, torch.optim.Optimizer]] = []
    if options.optimizer == "muon":
        matrices = [p for p in rest if p.dim() == 2 and min(p.shape) > 8]
        rest = _without(rest, matrices)
        muon = torch.optim.Muon(
            matrices, lr=options.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        )
        found.append((options.lr, muon))
    found.append((options.lr, _adamw(rest, options.lr, fused)))
    if tables:
        rate = float(getattr(options, "table_lr", options.lr))
        found.append((rate, _adamw(tables, rate, fused)))
    return found


def _without(parameters: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [p for p in parameters if all(p is not other for other in others)]


def _adamw(parameters: list[Any], lr: float, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused or None
    )
