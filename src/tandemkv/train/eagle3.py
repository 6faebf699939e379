"""EAGLE-3 as it is trained: one layer over target captures, unrolled over its own output.

Law: row i holds (captures of x_i, embedding of x_{i+1}) at position i and predicts x_{i+2}; step s
feeds the un-normalised output of step s - 1 back in at the same row, as position i + s, so that
training sees what a serving chain sees. Parameter names are those of published checkpoints. Source:
EAGLE-3, arXiv 2503.01840 (training-time test). Embedding and head are the target's, frozen. This
module holds no cache and serves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandemkv.train.attention import chain_attention
from tandemkv.train.evaluate import NO_DRAFT, Pick, Variant
from tandemkv.train.layers import FeedForward, Matrix, Norm, angles, rotate, split_heads
from tandemkv.train.teacher import Teacher, default_taps


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the drafter; all from the target unless said otherwise."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    taps: tuple[int, ...]
    rope_theta: float
    eps: float

    @classmethod
    def of(cls, teacher: Teacher) -> Shape:
        """The drafter that fits a target: its heads, its feed-forward width, three captures."""
        config = teacher.config
        return cls(
            hidden_size=teacher.hidden_size,
            num_heads=teacher.num_heads,
            num_kv_heads=teacher.num_kv_heads,
            head_dim=teacher.head_dim,
            intermediate_size=int(config.intermediate_size),
            taps=default_taps(teacher.num_layers),
            rope_theta=teacher.rope_theta,
            eps=float(config.rms_norm_eps),
        )


class Attention(nn.Module):
    """Projections of the drafter's layer; its input is twice as wide (embedding half first)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, hd = shape.hidden_size, shape.head_dim
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.q_proj = Matrix(2 * d, shape.num_heads * hd, 0.02)
        self.k_proj = Matrix(2 * d, shape.num_kv_heads * hd, 0.02)
        self.v_proj = Matrix(2 * d, shape.num_kv_heads * hd, 0.02)
        self.o_proj = Matrix(shape.num_heads * hd, d, 0.01)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, 2d] -> q, k, v [B, H, T, hd], rotated; k and v repeated to the query heads."""
        repeat = self.num_heads // self.num_kv_heads
        q = rotate(split_heads(self.q_proj(x), self.num_heads), *rope)
        k = rotate(split_heads(self.k_proj(x), self.num_kv_heads), *rope)
        v = split_heads(self.v_proj(x), self.num_kv_heads)
        return q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)


class MidLayer(nn.Module):
    """The one decoder layer, under its published name."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, eps = shape.hidden_size, shape.eps
        self.input_layernorm = Norm(d, eps)
        self.hidden_norm = Norm(d, eps)
        self.post_attention_layernorm = Norm(d, eps)
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(d, shape.intermediate_size)


Sampler = Callable[[Tensor], Tensor]


class Eagle3Trainee(nn.Module):
    """The trainable drafter; `unroll` is its training-time test, or a greedy chain at every row."""

    def __init__(self, shape: Shape, embedding: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self._embedding = embedding
        d, taps = shape.hidden_size, len(shape.taps)
        self.fc_norm = Norm(d, shape.eps, taps)
        self.fc = Matrix(taps * d, d, 0.02)
        self.midlayer = MidLayer(shape)
        self.norm = Norm(d, shape.eps)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs it reads."""
        return self.shape.taps

    def tables(self) -> list[nn.Parameter]:
        """None: embedding and head are the target's."""
        return []

    def aside(self) -> list[nn.Parameter]:
        """None: all parameters share one loss."""
        return []

    def project(self, captures: Sequence[Tensor]) -> Tensor:
        """Captures [B, T, d] each -> g [B, T, d], the drafter's input and residual."""
        parts = [self.fc_norm(x, i) for i, x in enumerate(captures)]
        return self.fc(torch.cat(parts, -1))

    def unroll(
        self,
        captures: Sequence[Tensor],
        tokens: Tensor,
        steps: int,
        *,
        first_row: Tensor | None = None,
        sampler: Sampler | None = None,
    ) -> list[Tensor]:
        """tokens [B, T] -> per step s the normalised output [B, T, d]; row i predicts x_{i+2+s}.

        Teacher forced without a sampler: step s reads x_{i+1+s}. With one, step s > 0 reads the
        token that sampler(output of step s - 1) [B, T, d] -> [B, T] drew. first_row [B]: rows below
        it are absent from every context. Rows near the end read padding; mask them.
        """
        length = tokens.shape[1]
        state = self.project(captures)
        ids = _ahead(tokens, 1)
        key = value = None
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs: list[Tensor] = []
        layer = self.midlayer
        for step in range(steps):
            rope = self._rope(step, length, state)
            embedded = F.embedding(ids, self._embedding).to(state.dtype)
            both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)], -1)
            q, k, v = layer.self_attn.project(both, rope)
            if key is None or value is None:
                key, value = k, v
            else:
                own_keys.append(k)
                own_values.append(v)
            seen = chain_attention(q, key, value, own_keys, own_values, first_row)
            mixed = state + layer.self_attn.o_proj(seen.transpose(1, 2).flatten(2))
            state = mixed + layer.mlp(layer.post_attention_layernorm(mixed))
            outputs.append(self.norm(state))
            if step + 1 < steps:
                ids = sampler(outputs[-1]) if sampler else _ahead(tokens, step + 2)
        return outputs

    @torch.no_grad()
    def drafts_at(
        self,
        captures: Sequence[Tensor],
        tokens: Tensor,
        anchors: Tensor,
        variant: Variant,
        first_row: Tensor | None,
        pick: Pick,
    ) -> Tensor:
        """Greedy chains [B, A, K] from anchors [B, A]; NO_DRAFT where the context row is absent."""
        drafts: list[Tensor] = []

        def sample(hidden: Tensor) -> Tensor:
            drafts.append(pick(hidden.flatten(0, 1), None, None).view(hidden.shape[:2]))
            return drafts[-1]

        k = variant.num_drafts
        sample(self.unroll(captures, tokens, k, first_row=first_row, sampler=sample)[-1])
        newest = anchors - 1
        low = torch.zeros_like(anchors[:, :1]) if first_row is None else first_row[:, None]
        at = newest.clamp_min(0)[..., None].expand(-1, -1, k)
        found = torch.stack(drafts, -1).gather(1, at)
        return found.masked_fill((newest < low)[..., None], NO_DRAFT)

    def _rope(self, start: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(start, start + length, device=like.device)
        return angles(at, self.shape.head_dim, self.shape.rope_theta, like.dtype)

    @torch.no_grad()
    def start_from(self, teacher: Teacher, *, copy_layer: bool) -> None:
        """Final norm from the target's; with copy_layer, attention and feed-forward from the layer
        above the last capture, and g from that capture at its typical size."""
        self.norm.weight.copy_(teacher.final_norm)
        if not copy_layer:
            return
        source = teacher.layers[self.shape.taps[-1] + 1]
        layer, d = self.midlayer, self.shape.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):
            wide = getattr(layer.self_attn, name).weight
            wide[:, d:].copy_(getattr(source.self_attn, name).weight)
        layer.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(getattr(source.mlp, name).weight)
        layer.hidden_norm.weight.copy_(source.input_layernorm.weight)
        layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
        self.fc.weight.mul_(0.2)
        self.fc.weight[:, -d:] += torch.eye(d, device=self.fc.weight.device)


def _ahead(tokens: Tensor, by: int) -> Tensor:
    """Token i + by at row i, padded with 0 at the end."""
    return F.pad(tokens, (0, by))[:, by:]
