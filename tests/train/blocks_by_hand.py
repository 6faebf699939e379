"""A draft block served by hand: one sequence, a growing context, every softmax written out."""

from __future__ import annotations

import torch
from torch import Tensor

from tandemkv.train.dflash import BlockShape, BlockTrainee
from tandemkv.train.layers import rotate

VOCAB = 40
KINDS = ("dflash", "dspark")


def shape_of(kind: str, window: int | None = None, drafts: int = 4) -> BlockShape:
    """A drafter of a few thousand parameters."""
    return BlockShape(
        hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=24,
        vocab_size=VOCAB, taps=(0, 1, 2), rope_theta=1e4, eps=1e-5, num_layers=2,
        num_drafts=drafts, window=window, anchor_drafts=kind == "dspark",
        markov_rank=3 if kind == "dspark" else 0, confidence=kind == "dspark",
    )  # fmt: skip


def drafter(shape: BlockShape, seed: int = 0) -> BlockTrainee:
    """A drafter none of whose parameters is at its start."""
    torch.manual_seed(seed)
    trainee = BlockTrainee(shape, torch.randn(shape.vocab_size, shape.hidden_size))
    with torch.no_grad():
        for parameter in trainee.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return trainee


@torch.no_grad()
def serve(
    trainee: BlockTrainee,
    captures: list[Tensor],
    anchor: int,
    token: int,
    head: Tensor,
    *,
    first: int = 0,
    window_error: int = 0,
    markov: bool = True,
    barred: Tensor | None = None,
) -> tuple[list[int], Tensor]:
    """Drafts and states [K, d] of one block, as a server makes them that holds the context rows
    first .. anchor - 1. captures: [T, d] each. window_error: for the negative control. barred [V]:
    added to the logits."""
    shape = trainee.shape
    span = shape.rows

    def turned(x: Tensor, norm, heads: int, position: int) -> Tensor:
        angle = position * shape.rope_theta ** (
            -torch.arange(0, shape.head_dim, 2) / shape.head_dim
        )
        angle = torch.cat([angle, angle])
        return rotate(norm(x.view(heads, -1)), angle.cos(), angle.sin())

    rows = [trainee._embedding[token], *[trainee.mask_embedding.weight] * (span - 1)]
    context = [trainee.context([c[i : i + 1] for c in captures])[0] for i in range(anchor)]
    for layer in trainee.layers:
        attn = layer.self_attn
        normed = [layer.input_layernorm(x) for x in rows]
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        for at, x in [*enumerate(context), *((anchor + j, x) for j, x in enumerate(normed))]:
            k = turned(attn.k_proj(x), attn.k_norm, shape.num_kv_heads, at)
            seen[at] = k, attn.v_proj(x).view(shape.num_kv_heads, -1)
        after = []
        for j, x in enumerate(normed):
            position = anchor + j
            q = turned(attn.q_proj(x), attn.q_norm, shape.num_heads, position)
            low = first
            if shape.window is not None:
                low = max(first, position - shape.window + 1 + window_error)
            keys = [at for at in seen if at >= anchor or at >= low]
            out = []
            for h in range(shape.num_heads):
                pair = h // (shape.num_heads // shape.num_kv_heads)
                k = torch.stack([seen[at][0][pair] for at in keys])
                v = torch.stack([seen[at][1][pair] for at in keys])
                out.append((k @ q[h] * shape.head_dim**-0.5).softmax(0) @ v)
            mixed = rows[j] + attn.o_proj(torch.cat(out))
            after.append(mixed + layer.mlp(layer.post_attention_layernorm(mixed)))
        rows = after
    states = torch.stack([trainee.norm(x) for x in rows])[span - shape.num_drafts :]
    drafts: list[int] = []
    for state in states:
        logits = head @ state
        if shape.markov_rank and markov:
            w1, w2 = (
                p.weight for p in (trainee.markov_head.markov_w1, trainee.markov_head.markov_w2)
            )
            logits = logits + w2 @ w1[drafts[-1] if drafts else token]
        drafts.append(int((logits if barred is None else logits + barred).argmax()))
    return drafts, states
