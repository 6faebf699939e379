"""The trained drafter on disk: config.json and model.safetensors under the published names.

Law: the directory says everything a reader must know (captured layers as output-of ids, and that it
says so), and each file is replaced whole. Head and embedding are the target's and are not written;
draft_vocab ranks the target's ids so that a reader may draft over the first k of them. Reading is
model/eagle3_checkpoint's part; `load_trainee` here only takes parameters back for evaluation.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandemkv.train.eagle3 import Eagle3Trainee, Shape
from tandemkv.train.options import write_atomically
from tandemkv.train.teacher import Teacher


def config_of(shape: Shape, teacher: Teacher, num_ranked: int) -> dict[str, Any]:
    """config.json of a drafter: Hugging Face names, EAGLE's own under eagle_config."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "tandemkv_format": 1,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": teacher.vocab_size,
        "draft_vocab_size": teacher.vocab_size,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": teacher.max_length,
        "fc_norm": True,
        "norm_before_residual": False,
        "tie_lm_head": True,
        "ranked_vocab_size": num_ranked,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(shape.taps),
            "layer_id_convention": "output",
        },
        "torch_dtype": "bfloat16",
    }


def export(
    directory: Path, trainee: Eagle3Trainee, teacher: Teacher, ranking: Tensor, num_ranked: int
) -> None:
    """Write the drafter in bf16, and the first num_ranked ids of the ranking as draft_vocab."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    ranked = ranking[:num_ranked].to(torch.int32).cpu().contiguous()
    tensors = {
        name: value.detach().to(torch.bfloat16).cpu().contiguous()
        for name, value in trainee.state_dict().items()
    }
    tensors["draft_vocab"] = ranked
    config = config_of(trainee.shape, teacher, len(ranked))
    temporary = directory / f".model.safetensors.{os.getpid()}"
    save_file(tensors, temporary, {"format": "pt"})
    os.replace(temporary, directory / "model.safetensors")
    write_atomically(directory / "config.json", json.dumps(config, indent=2) + "\n")


def load_trainee(directory: Path, teacher: Teacher) -> tuple[Eagle3Trainee, Tensor]:
    """The drafter of an exported directory and its ranked ids (unranked ones follow, by id)."""
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    ranked = tensors.pop("draft_vocab").long()
    trainee = Eagle3Trainee(Shape.of(teacher), teacher.embedding)
    trainee.load_state_dict({name: value.float() for name, value in tensors.items()})
    rest = torch.ones(teacher.vocab_size, dtype=torch.bool)
    rest[ranked] = False
    ranking = torch.cat([ranked, torch.nonzero(rest).flatten()])
    return trainee.to(teacher.device), ranking
