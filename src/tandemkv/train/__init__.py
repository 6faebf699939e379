"""Drafter training by self-distillation: prompts, the target's own answers, training, report.

Law: a drafter learns from what its target says, never from an evaluation set; a run that was
stopped goes on from its directory as if it had not been. `train_eagle3(TrainOptions(...))` is the
whole interface. This package serves nothing and knows no cache.
"""

from tandemkv.train.options import PoolOptions, TrainOptions
from tandemkv.train.run import train_eagle3

__all__ = ["PoolOptions", "TrainOptions", "train_eagle3"]
