"""Drafter training by self-distillation: prompts, the target's own answers, training, report.

Law: a drafter learns from what its target says, never from an evaluation set; a run that was
stopped goes on from its directory as if it had not been. `train_eagle3(TrainOptions(...))` is the
whole interface, `resumed` its options from a directory that holds a run. Options are checked
without torch, which is imported when a run begins. This package serves nothing and knows no cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandemkv.train.options import PoolOptions, TrainOptions, resumed

if TYPE_CHECKING:
    from tandemkv.train.run import TrainResult


def train_eagle3(options: TrainOptions) -> TrainResult:
    """Train an EAGLE-3 drafter; `tandemkv.train.run.train_eagle3` says how and what it raises."""
    from tandemkv.train import run

    return run.train_eagle3(options)


__all__ = ["PoolOptions", "TrainOptions", "resumed", "train_eagle3"]
