"""The unrolled drafter against a serving chain: one anchor, a growing cache, plain attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandemkv.train.eagle3 import Eagle3Trainee, Shape, rotate

SHAPE = Shape(
    hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=24, taps=(0, 1, 2),
    rope_theta=1e4, eps=1e-5,
)  # fmt: skip
VOCAB, LENGTH, STEPS = 40, 14, 4


@pytest.fixture
def setting():
    torch.manual_seed(0)
    embedding, head = torch.randn(VOCAB, 16), torch.randn(VOCAB, 16)
    trainee = Eagle3Trainee(SHAPE, embedding)
    with torch.no_grad():
        for parameter in trainee.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    captures = [torch.randn(1, LENGTH, 16) for _ in range(3)]
    tokens = torch.randint(0, VOCAB, (1, LENGTH))
    return trainee, embedding, head, captures, tokens


def serve(setting, anchor: int, first_row: int = 0, shift: int = 0) -> list[int]:
    """Draft STEPS tokens greedily from `anchor` the way an engine does, row by row.

    shift: error in the position of drafted rows, for the negative control.
    """
    trainee, embedding, head, captures, tokens = setting
    layer, attn = trainee.midlayer, trainee.midlayer.self_attn
    g = trainee.project([c[:, :anchor] for c in captures])[0]
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def row(state: Tensor, token: int, position: int) -> Tensor:
        both = torch.cat([layer.input_layernorm(embedding[token]), layer.hidden_norm(state)])
        angle = position * 1e4 ** (-torch.arange(0, 8, 2) / 8)
        angle = torch.cat([angle, angle])
        q = rotate(attn.q_proj(both).view(4, 8), angle.cos(), angle.sin())
        keys.append(rotate(attn.k_proj(both).view(2, 8), angle.cos(), angle.sin()))
        values.append(attn.v_proj(both).view(2, 8))
        seen = []
        for h in range(4):
            k = torch.stack([x[h // 2] for x in keys])
            v = torch.stack([x[h // 2] for x in values])
            seen.append((k @ q[h] * 8**-0.5).softmax(0) @ v)
        mixed = state + attn.o_proj(torch.cat(seen))
        return mixed + layer.mlp(layer.post_attention_layernorm(mixed))

    state = g[0]
    for i in range(first_row, anchor):
        state = row(g[i], int(tokens[0, i + 1]), i)
    drafts: list[int] = []
    for step in range(STEPS):
        drafts.append(int((trainee.norm(state) @ head.T).argmax()))
        if step + 1 < STEPS:
            state = row(state, drafts[-1], anchor + step + shift)
    return drafts


def unroll(setting, first_row: int | None = None) -> Tensor:
    """Drafts [LENGTH, STEPS] of every row at once; row i belongs to anchor i + 1."""
    trainee, _, head, captures, tokens = setting
    drafts: list[Tensor] = []

    def sampler(hidden: Tensor) -> Tensor:
        drafts.append((hidden @ head.T).argmax(-1))
        return drafts[-1]

    first = None if first_row is None else torch.tensor([first_row])
    with torch.no_grad():
        outputs = trainee.unroll(captures, tokens, STEPS, first_row=first, sampler=sampler)
        sampler(outputs[-1])
    return torch.stack(drafts, -1)[0]


def test_every_row_drafts_what_a_serving_chain_drafts(setting):
    rows = unroll(setting)
    for anchor in range(1, LENGTH):
        assert rows[anchor - 1].tolist() == serve(setting, anchor)


def test_a_dropped_context_is_a_shorter_cache(setting):
    rows = unroll(setting, first_row=5)
    for anchor in range(6, LENGTH):
        assert rows[anchor - 1].tolist() == serve(setting, anchor, first_row=5)


def test_a_position_off_by_one_is_noticed(setting):
    rows = unroll(setting)
    wrong = [rows[a - 1].tolist() != serve(setting, a, shift=3) for a in range(1, LENGTH)]
    assert any(wrong)


def test_a_forgotten_context_row_is_noticed(setting):
    rows = unroll(setting)
    wrong = [rows[a - 1].tolist() != serve(setting, a, first_row=a - 1) for a in range(3, LENGTH)]
    assert any(wrong)


def test_teacher_forcing_reads_the_true_tokens(setting):
    trainee, _, _, captures, tokens = setting
    forced = trainee.unroll(captures, tokens, 2)
    shifted = torch.cat([tokens[:, 2:], torch.zeros(1, 2, dtype=torch.long)], 1)
    fed = trainee.unroll(captures, tokens, 2, sampler=lambda _hidden: shifted)
    assert torch.equal(forced[1], fed[1])
