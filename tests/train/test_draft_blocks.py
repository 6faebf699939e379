"""Draft blocks that are trained together against blocks that are served one by one."""

from __future__ import annotations

import pytest
import torch
from blocks_by_hand import KINDS, VOCAB, drafter, serve, shape_of
from torch import Tensor

from tandemkv.train.block_attention import BlockSight
from tandemkv.train.evaluate import greedy

LENGTH = 18
CASES = [(kind, window) for kind in KINDS for window in (None, 7, 9)]


def setting(kind: str, window: int | None):
    """A drafter, captures of one row [T, d], its tokens, a head."""
    trainee = drafter(shape_of(kind, window))
    captures = [torch.randn(LENGTH, 16) for _ in range(3)]
    return trainee, captures, torch.randint(0, VOCAB, (LENGTH,)), torch.randn(VOCAB, 16)


def trained(
    trainee, captures, tokens, anchors: list[int], first: list[int] | None = None
) -> Tensor:
    """States [A, K, d] of blocks that go through the drafter together."""
    with torch.no_grad():
        return trainee(
            trainee.context([c[None] for c in captures]),
            tokens[None],
            torch.tensor([anchors]),
            first_row=None if first is None else torch.tensor([first]),
        )[0]


@pytest.mark.parametrize(("kind", "window"), CASES)
def test_a_trained_block_is_the_block_that_is_served(kind, window):
    trainee, captures, tokens, head = setting(kind, window)
    anchors = list(range(LENGTH))
    states = trained(trainee, captures, tokens, anchors)
    for n in anchors:
        _, wanted = serve(trainee, captures, n, int(tokens[n]), head)
        assert torch.allclose(states[n], wanted, atol=1e-5), n


@pytest.mark.parametrize(("kind", "window"), CASES)
def test_dropped_context_is_a_context_that_the_server_lost(kind, window):
    trainee, captures, tokens, head = setting(kind, window)
    anchors, first = [5, 11, 11, 16], [5, 8, 0, 15]
    states = trained(trainee, captures, tokens, anchors, first)
    for i, (n, low) in enumerate(zip(anchors, first, strict=True)):
        _, wanted = serve(trainee, captures, n, int(tokens[n]), head, first=low)
        assert torch.allclose(states[i], wanted, atol=1e-5), (n, low)
    assert not torch.allclose(states[1], states[2], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_that_is_off_by_one_is_noticed(kind, off):
    trainee, captures, tokens, head = setting(kind, 7)
    states = trained(trainee, captures, tokens, [12])
    _, wrong = serve(trainee, captures, 12, int(tokens[12]), head, window_error=off)
    assert not torch.allclose(states[0], wrong, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_before_and_after_the_anchor_reach_no_block(kind):
    trainee, captures, tokens, _ = setting(kind, None)
    others = (tokens + 1) % VOCAB
    others[9] = tokens[9]
    before, after = (trained(trainee, captures, x, [9]) for x in (tokens, others))
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("kind", "markov"), [("dflash", True), ("dspark", True), ("dspark", False)]
)
def test_greedy_drafts_are_those_that_are_served(kind, markov):
    trainee, captures, tokens, head = setting(kind, 9)
    anchors = torch.arange(LENGTH)[None]
    context = trainee.context([c[None] for c in captures])
    got = trainee.draft(context, tokens[None], anchors, greedy(head, None), markov=markov)[0]
    for n in range(LENGTH):
        wanted, _ = serve(trainee, captures, n, int(tokens[n]), head, markov=markov)
        assert got[n].tolist() == wanted


def test_the_markov_head_has_its_say():
    trainee, captures, tokens, head = setting("dspark", None)
    drafts = [serve(trainee, captures, 9, int(tokens[9]), head, markov=m)[0] for m in (True, False)]
    assert drafts[0] != drafts[1]


def test_a_reduced_head_takes_its_own_rows_of_the_table():
    trainee, captures, tokens, head = setting("dspark", None)
    ids = torch.randperm(VOCAB)[:25]
    context = trainee.context([c[None] for c in captures])
    anchors = torch.arange(LENGTH)[None]
    got = trainee.draft(context, tokens[None], anchors, greedy(head, ids))[0]
    trainee.markov_head.markov_w2.weight.data = trainee.markov_head.markov_w2.weight[ids]
    for n in range(LENGTH):
        state = serve(trainee, captures, n, int(tokens[n]), head[ids], markov=False)[1]
        previous, wanted = int(tokens[n]), []
        for row in state:
            bias = (
                trainee.markov_head.markov_w2.weight
                @ trainee.markov_head.markov_w1.weight[previous]
            )
            previous = int(ids[(head[ids] @ row + bias).argmax()])
            wanted.append(previous)
        assert got[n].tolist() == wanted


@pytest.mark.parametrize("window", [None, 6, 300])
@pytest.mark.parametrize("dropped", [False, True])
def test_the_sparse_form_of_attention_is_the_masked_one(window, dropped):
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    anchors = torch.stack([torch.randperm(40)[:9].sort().values for _ in range(2)])
    first = (torch.rand(2, 9) * (anchors + 1)).long() if dropped else None
    sight = BlockSight(anchors, 5, 40, window, first)
    query, key, value = (torch.randn(2, 3, n, 16) for n in (45, 85, 85))
    ours = flex_attention(query, key, value, block_mask=sight._block_mask)
    assert torch.allclose(ours, sight._masked(query, key, value), atol=1e-5)
