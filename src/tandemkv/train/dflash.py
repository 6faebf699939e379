"""DFlash and DSpark as they are trained: many draft blocks of a row at once, over target captures.

Law: a block at anchor n has the token x_n in its first row and mask vectors in the others; all its
rows see each other and the context rows before n, so a trained row is the row that a server drafts.
Context rows are k, v of c = hidden_norm(fc(captures)), which no draft layer touches. DFlash draws
draft j >= 1 from row j, DSpark from row j - 1, with a bias by the token before it (Markov head).
Parameter names are those of published checkpoints. Sources: DFlash, arXiv 2602.06036; DSpark, arXiv
2607.05147. Embedding and head are the target's, frozen. This module holds no cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandemkv.base.errors import ConfigError
from tandemkv.train.block_attention import BlockSight
from tandemkv.train.evaluate import Pick, Variant
from tandemkv.train.layers import FeedForward, Matrix, Norm, angles, rotate, split_heads
from tandemkv.train.options import DFlashOptions, DSparkOptions
from tandemkv.train.teacher import Teacher, spread_taps

CAPTURES = 5


class BlockShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a block drafter. num_drafts: K. anchor_drafts: whether the anchor's own row drafts
    (DSpark: K rows) or not (DFlash: K + 1 rows). markov_rank 0: no Markov head."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    taps: tuple[int, ...]
    rope_theta: float
    eps: float
    num_layers: int
    num_drafts: int
    window: int | None
    anchor_drafts: bool = False
    markov_rank: int = 0
    confidence: bool = False

    @classmethod
    def of(cls, options: DFlashOptions, teacher: Teacher) -> BlockShape:
        """The drafter that fits a target: its heads, its feed-forward width, five captures."""
        if options.num_layers > teacher.num_layers:
            raise ConfigError(f"num_layers must be at most the target's {teacher.num_layers}")
        heads = {}
        if isinstance(options, DSparkOptions):
            heads = {
                "anchor_drafts": True,
                "markov_rank": options.markov_rank,
                "confidence": options.confidence,
            }
        return cls(
            hidden_size=teacher.hidden_size,
            num_heads=teacher.num_heads,
            num_kv_heads=teacher.num_kv_heads,
            head_dim=teacher.head_dim,
            intermediate_size=int(teacher.config.intermediate_size),
            vocab_size=teacher.vocab_size,
            taps=spread_taps(teacher.num_layers, CAPTURES),
            rope_theta=teacher.rope_theta,
            eps=float(teacher.config.rms_norm_eps),
            num_layers=options.num_layers,
            num_drafts=options.num_draft_tokens,
            window=options.window,
            **heads,
        )

    @property
    def rows(self) -> int:
        """Rows of a draft block."""
        return self.num_drafts + (not self.anchor_drafts)


class Vector(nn.Module):
    """One learned vector."""

    def __init__(self, size: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size) * std)


class Attention(nn.Module):
    """Projections of one layer; keys and values of the context by the same matrices."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        d, hd = shape.hidden_size, shape.head_dim
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.q_proj = Matrix(d, shape.num_heads * hd, 0.02)
        self.k_proj = Matrix(d, shape.num_kv_heads * hd, 0.02)
        self.v_proj = Matrix(d, shape.num_kv_heads * hd, 0.02)
        self.o_proj = Matrix(shape.num_heads * hd, d, 0.01)
        self.q_norm = Norm(hd, shape.eps)
        self.k_norm = Norm(hd, shape.eps)

    def query(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, R, d] -> [B, H, R, hd], rotated."""
        return rotate(self.q_norm(split_heads(self.q_proj(x), self.num_heads)), *rope)

    def key_value(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [B, R, d] -> k (rotated), v [B, Hkv, R, hd]."""
        k = rotate(self.k_norm(split_heads(self.k_proj(x), self.num_kv_heads)), *rope)
        return k, split_heads(self.v_proj(x), self.num_kv_heads)


class Layer(nn.Module):
    """One decoder layer over draft blocks."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape.hidden_size, shape.intermediate_size)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        sight: BlockSight,
        rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        attn = self.self_attn
        normed = self.input_layernorm(x)
        both = zip(attn.key_value(context, context_rope), attn.key_value(normed, rope), strict=True)
        repeat = attn.num_heads // attn.num_kv_heads
        key, value = (torch.cat(parts, 2).repeat_interleave(repeat, 1) for parts in both)
        seen = sight.attend(attn.query(normed, rope), key, value)
        x = x + attn.o_proj(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """Bias of a draft's logits by the token before it: markov_w2 @ markov_w1[token]."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = Matrix(rank, vocab_size, 0.0)
        nn.init.normal_(self.markov_w1.weight, std=0.1)


class ConfidenceHead(nn.Module):
    """Chance that a draft is accepted, from its hidden state and the token before it."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


CHUNK = 64
"""Draft blocks of a row that are filled at a time."""


class BlockTrainee(nn.Module):
    """The trainable drafter: `forward` runs draft blocks, `draft` also fills them, greedily."""

    def __init__(self, shape: BlockShape, embedding: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self._embedding = embedding
        d, taps = shape.hidden_size, len(shape.taps)
        self.fc_norm = nn.ModuleList(Norm(d, shape.eps) for _ in range(taps))
        self.fc = Matrix(taps * d, d, 0.02)
        self.hidden_norm = Norm(d, shape.eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(d, shape.eps)
        self.mask_embedding = Vector(d, float(embedding.float().std()))
        if shape.markov_rank:
            self.markov_head = MarkovHead(shape.vocab_size, shape.markov_rank)
        if shape.confidence:
            self.confidence_head = ConfidenceHead(d + shape.markov_rank)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs it reads."""
        return self.shape.taps

    def tables(self) -> list[nn.Parameter]:
        """The Markov head's."""
        return list(self.markov_head.parameters()) if self.shape.markov_rank else []

    def aside(self) -> list[nn.Parameter]:
        """The confidence head's, which has a loss of its own."""
        return list(self.confidence_head.parameters()) if self.shape.confidence else []

    def context(self, captures: Sequence[Tensor]) -> Tensor:
        """Captures [B, T, d] each -> c [B, T, d]."""
        parts = [norm(x) for norm, x in zip(self.fc_norm, captures, strict=True)]
        return self.hidden_norm(self.fc(torch.cat(parts, -1)))

    def forward(
        self,
        context: Tensor,
        tokens: Tensor,
        anchors: Tensor,
        *,
        first_row: Tensor | None = None,
    ) -> Tensor:
        """Draft blocks at anchors [B, A] of tokens [B, T] -> normalised states [B, A, K, d].

        State k - 1 of a block drafts the token at anchor + k. first_row [B, A] or [B, 1]: context
        rows below it are absent.
        """
        shape, size = self.shape, self.shape.rows
        length, dtype = context.shape[1], context.dtype
        sight = BlockSight(anchors, size, length, shape.window, first_row)
        slots = torch.arange(length, device=context.device)
        context_rope = angles(slots, shape.head_dim, shape.rope_theta, dtype)
        cos, sin = angles(sight.positions, shape.head_dim, shape.rope_theta, dtype)
        rope = cos[:, None], sin[:, None]
        known = F.embedding(tokens.gather(1, anchors), self._embedding).to(dtype)[:, :, None]
        masks = self.mask_embedding.weight.to(dtype).expand(*anchors.shape, size - 1, -1)
        x = torch.cat([known, masks], 2).flatten(1, 2)
        for layer in self.layers:
            x = layer(x, context, sight, rope, context_rope)
        x = x.unflatten(1, (anchors.shape[1], size))
        return self.norm(x[:, :, size - shape.num_drafts :])

    def prefix(self, previous: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The Markov head's row of each token [...] -> [..., r]; None without one."""
        if not self.shape.markov_rank:
            return None
        return self.markov_head.markov_w1(previous).to(dtype)

    def confidence(self, hidden: Tensor, prefix: Tensor | None) -> Tensor:
        """Logit of acceptance of each draft; its gradient stops at the head's inputs."""
        seen = hidden if prefix is None else torch.cat([hidden, prefix], -1)
        head = self.confidence_head.proj
        return F.linear(seen.detach().float(), head.weight, head.bias)[..., 0]

    @torch.no_grad()
    def draft(
        self,
        context: Tensor,
        tokens: Tensor,
        anchors: Tensor,
        pick: Pick,
        *,
        first_row: Tensor | None = None,
        markov: bool = True,
    ) -> Tensor:
        """Greedy drafts [B, A, K] at every anchor, each biased by the draft before it."""
        states = self(context, tokens, anchors, first_row=first_row)
        previous, drafts = tokens.gather(1, anchors).flatten(), []
        table = self.markov_head.markov_w2.weight if self.shape.markov_rank and markov else None
        for k in range(states.shape[2]):
            hidden = states[:, :, k].flatten(0, 1)
            prefix = None if table is None else self.prefix(previous, hidden.dtype)
            previous = pick(hidden, prefix, table)
            drafts.append(previous.view(anchors.shape))
        return torch.stack(drafts, -1)

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
        """Greedy drafts at anchors [B, A]: the first of whole draft blocks [B, A, num_drafts]."""
        context = self.context(captures)
        parts = [
            self.draft(
                context,
                tokens,
                part,
                pick,
                first_row=None if first_row is None else first_row[:, None],
                markov=variant.markov,
            )
            for part in anchors.split(CHUNK, 1)
        ]
        return torch.cat(parts, 1)[..., : variant.num_drafts]

    @torch.no_grad()
    def start_from(self, teacher: Teacher, *, copy_layers: bool) -> None:
        """Final norm from the target's; with copy_layers, the layers from the target's last ones,
        and c from the last capture as the layer above reads it."""
        self.norm.weight.copy_(teacher.final_norm)
        if not copy_layers:
            return
        taps, d = self.shape.taps, self.shape.hidden_size
        for layer, source in zip(
            self.layers, teacher.layers[-self.shape.num_layers :], strict=True
        ):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                ours, theirs = getattr(layer.self_attn, name), getattr(source.self_attn, name)
                ours.weight.copy_(theirs.weight)
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(layer.mlp, name).weight.copy_(getattr(source.mlp, name).weight)
            for name in ("input_layernorm", "post_attention_layernorm"):
                getattr(layer, name).weight.copy_(getattr(source, name).weight)
        self.hidden_norm.weight.copy_(teacher.layers[taps[-1] + 1].input_layernorm.weight)
        self.fc.weight.mul_(0.2)
        self.fc.weight[:, -d:] += torch.eye(d, device=self.fc.weight.device)
