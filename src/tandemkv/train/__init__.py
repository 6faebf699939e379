"""Drafter training by self-distillation: prompts, the target's own answers, training, report.

Law: a drafter learns from what its target says, never from an evaluation set; a run that was
stopped goes on from its directory as if it had not been. `train_eagle3`, `train_dflash` and
`train_dspark`, each with the options of its name, are the whole interface; `resumed` finds the
options in a directory that holds a run. Options are checked without torch, which is imported when a
run begins. This package serves nothing and knows no cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandemkv.train.options import (
    DFlashOptions,
    DSparkOptions,
    Eagle3Options,
    PoolOptions,
    TrainOptions,
)
from tandemkv.train.record import resumed

if TYPE_CHECKING:
    from tandemkv.train.run import TrainResult


def train_eagle3(options: Eagle3Options) -> TrainResult:
    """Train an EAGLE-3 drafter; `tandemkv.train.run.train` says how and what it raises."""
    return _train(options)


def train_dflash(options: DFlashOptions) -> TrainResult:
    """Train a DFlash drafter; `tandemkv.train.run.train` says how and what it raises."""
    return _train(options)


def train_dspark(options: DSparkOptions) -> TrainResult:
    """Train a DSpark drafter; `tandemkv.train.run.train` says how and what it raises."""
    return _train(options)


def _train(options: TrainOptions) -> TrainResult:
    from tandemkv.train import run

    return run.train(options)


__all__ = [
    "DFlashOptions",
    "DSparkOptions",
    "Eagle3Options",
    "PoolOptions",
    "TrainOptions",
    "resumed",
    "train_dflash",
    "train_dspark",
    "train_eagle3",
]
