"""The trained drafter on disk, and back: by the reader and writer that the engine uses.

Law: what is written is what the engine reads. Head and embedding are the target's and are not
written; draft_vocab ranks the target's ids, so that a reader may draft over the first k of them.
This module knows no file format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandemkv.model import dflash_checkpoint, eagle3_checkpoint
from tandemkv.model.dflash_config import DFlashConfig
from tandemkv.model.eagle3_config import Eagle3Config
from tandemkv.train.dflash import BlockShape, BlockTrainee
from tandemkv.train.eagle3 import Eagle3Trainee, Shape
from tandemkv.train.teacher import Teacher

HEAD = "the target's own, frozen and tied: none is stored"


def config_of(shape: Shape, teacher: Teacher) -> Eagle3Config:
    """The checkpoint's config: one normalised capture per tap, whole vocabulary, own plain RoPE."""
    return Eagle3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=teacher.vocab_size,
        draft_vocab_size=teacher.vocab_size,
        rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=teacher.max_length,
        taps=shape.taps,
        fc_norm=True,
    )


def export(
    directory: Path,
    trainee: Eagle3Trainee,
    teacher: Teacher,
    ranking: Tensor,
    num_ranked: int,
    record: dict[str, Any] | None = None,
) -> None:
    """Write the drafter in bf16 with the first num_ranked ids of the ranking.

    record: what config.json is to remember of the training.
    """
    tensors = {name: value.detach() for name, value in trainee.state_dict().items()}
    tensors[eagle3_checkpoint.RANKING] = ranking[:num_ranked].int()
    extra = {"layer_id_convention": "output", "head": HEAD, **(record or {})}
    eagle3_checkpoint.save(directory, tensors, config_of(trainee.shape, teacher), extra=extra)


def load_trainee(directory: Path, teacher: Teacher) -> tuple[Eagle3Trainee, Tensor]:
    """The drafter of an exported directory and its ranked ids (unranked ones follow, by id)."""
    _, tensors = eagle3_checkpoint.read(directory)
    ranked = tensors.pop(eagle3_checkpoint.RANKING).long()
    norms = [name for name in tensors if name.startswith("fc_norm.")]
    stacked = torch.stack([tensors.pop(f"fc_norm.{i}.weight") for i in range(len(norms))])
    tensors["fc_norm.weight"] = stacked
    trainee = Eagle3Trainee(Shape.of(teacher), teacher.embedding)
    trainee.load_state_dict({name: value.float() for name, value in tensors.items()})
    return trainee.to(teacher.device), _whole(ranked, teacher.vocab_size)


def block_config(shape: BlockShape, teacher: Teacher) -> DFlashConfig:
    """The checkpoint's config: one normalised capture per tap, a mask vector, own plain RoPE."""
    return DFlashConfig(
        method="dspark" if shape.anchor_drafts else "dflash",
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        num_draft_tokens=shape.num_drafts,
        taps=shape.taps,
        windows=(shape.window,) * shape.num_layers,
        rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=teacher.max_length,
        fc_norm=True,
        markov_rank=shape.markov_rank,
        confidence=shape.confidence,
    )


def block_shape(config: DFlashConfig) -> BlockShape:
    """The shape that `block_config` was made of."""
    return BlockShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        taps=config.taps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        eps=config.rms_norm_eps,
        num_layers=config.num_layers,
        num_drafts=config.num_draft_tokens,
        window=config.windows[0],
        anchor_drafts=config.method == "dspark",
        markov_rank=config.markov_rank,
        confidence=config.confidence,
    )


def export_blocks(
    directory: Path,
    trainee: BlockTrainee,
    teacher: Teacher,
    ranking: Tensor,
    num_ranked: int,
    record: dict[str, Any] | None = None,
) -> None:
    """Write a block drafter, matrices in 8 bits with one scale per row, with its first ids."""
    tensors = {name: value.detach() for name, value in trainee.state_dict().items()}
    tensors[dflash_checkpoint.RANKING] = ranking[:num_ranked].int()
    config, extra = block_config(trainee.shape, teacher), {"head": HEAD, **(record or {})}
    dflash_checkpoint.save(directory, tensors, config, quantise=True, extra=extra)


def load_blocks(directory: Path, teacher: Teacher) -> tuple[BlockTrainee, Tensor]:
    """The block drafter of an exported directory and its ranked ids, as `load_trainee`."""
    config, tensors = dflash_checkpoint.read(directory)
    ranked = tensors.pop(dflash_checkpoint.RANKING).long()
    trainee = BlockTrainee(block_shape(config), teacher.embedding)
    trainee.load_state_dict({name: value.float() for name, value in tensors.items()})
    return trainee.to(teacher.device), _whole(ranked, teacher.vocab_size)


def _whole(ranked: Tensor, vocab_size: int) -> Tensor:
    """A ranking of all ids: the ranked ones, then the others by id."""
    rest = torch.ones(vocab_size, dtype=torch.bool)
    rest[ranked] = False
    return torch.cat([ranked, torch.nonzero(rest).flatten()])
