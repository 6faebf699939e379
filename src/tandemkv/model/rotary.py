"""A drafter's own rotary embedding: its parameters in one form, angles at absolute positions.

Law: a row's angle is a function of its position alone, so a row may be computed in any pass; types
that rescale with the length of a batch are refused by name. Half rotation, as Hugging Face lays
heads out. This module rotates; it knows no layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tandemkv.base.errors import ConfigError

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OF_POSITION = ("default", "linear", "llama3", "yarn")


def head_size(config: Mapping[str, Any]) -> int:
    """head_dim of a config.json, or hidden size over heads where it is not given."""
    return int(
        config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"])
    )


def parse_rope(config: Mapping[str, Any], origin: str = "drafter") -> tuple[dict[str, Any], int]:
    """RoPE parameters and longest context, whatever version of transformers wrote the config.

    Raises ConfigError for heads of odd size, which cannot be turned by halves.
    """
    from transformers import LlamaConfig

    heads, head_dim = int(config["num_attention_heads"]), head_size(config)
    _check_even(head_dim, origin)
    names = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    given = {name: config[name] for name in names if config.get(name) is not None}
    full = LlamaConfig(hidden_size=head_dim * heads, num_attention_heads=heads, **given)
    return {**(full.rope_parameters or {})}, int(full.max_position_embeddings)


def _check_even(head_dim: int, origin: str) -> None:
    if head_dim % 2:
        raise ConfigError(f"{origin}: head_dim must be even for RoPE, got {head_dim}")


class Rotary:
    """RoPE of heads of size head_dim on one device; parameters as `parse_rope` gives them."""

    def __init__(
        self,
        parameters: Mapping[str, Any],
        head_dim: int,
        max_positions: int,
        device: torch.device,
        dtype: torch.dtype,
        origin: str,
    ) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        _check_even(head_dim, origin)
        kind = parameters.get("rope_type", "default")
        if kind not in _OF_POSITION:
            raise ConfigError(
                f"{origin}: RoPE of type {kind!r} is not a function of position alone"
            )
        rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                rope_parameters=dict(parameters),
                max_position_embeddings=max_positions,
            )
        )
        self._inv_freq = rotary.inv_freq.float().to(device)
        self._scale = float(rotary.attention_scaling)
        self._dtype = dtype
        self._half = head_dim // 2

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin [..., hd] at absolute positions [...]: x cos + (x turned) sin."""
        angles = positions.to(self._inv_freq.device)[..., None].float() * self._inv_freq
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return torch.cat((cos, cos), -1).to(self._dtype), torch.cat((-sin, sin), -1).to(self._dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads x [R, H, hd] turned by the angles [R, hd] of their rows."""
        return torch.addcmul(x * cos[:, None], x.roll(self._half, -1), sin[:, None])
