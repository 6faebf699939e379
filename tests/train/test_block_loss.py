"""The loss over draft blocks against plain autograd; where blocks are drawn; what they lose."""

from __future__ import annotations

import pytest
import torch
from blocks_by_hand import KINDS, VOCAB, drafter, serve, shape_of

from tandemkv.train import loss
from tandemkv.train.block_loss import (
    BlockReport,
    Blocks,
    block_loss,
    draw_blocks,
    drop_context,
)

LENGTH, MIX = 14, (0.3, 0.7)


def setting(kind: str, *, confidence: bool = False, ids: bool = True, shift: int = 0):
    """Drafter, the arguments of block_loss after it; `shift`: error in the labels."""
    shape = shape_of(kind, 9)
    trainee = drafter(type(shape)(**{**_fields(shape), "confidence": confidence}))
    captures = [torch.randn(2, LENGTH, 16) for _ in range(3)]
    hidden, head = torch.randn(2, LENGTH, 16), torch.randn(VOCAB, 16)
    tokens = torch.randint(0, VOCAB, (2, LENGTH))
    mask = torch.rand(2, LENGTH) < 0.85
    blocks = draw_blocks(mask, 4, 512, torch.Generator().manual_seed(0))
    if shift:
        hidden = hidden.roll(shift, 1)
    picked = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:30] if ids else None
    rows = head if picked is None else head[picked]
    return trainee, (captures, hidden, tokens, blocks, (rows, picked), None, MIX)


def _fields(shape) -> dict:
    return {name: getattr(shape, name) for name in shape.__struct_fields__}


def rows_that_count(trainee, captures, hidden, tokens, blocks, head, *_):
    """Of every draft that counts: its place, its weight, the target's p and the drafter's log q."""
    states = trainee(trainee.context(captures), tokens, blocks.anchors)
    rows, ids = head
    for b, a, k in torch.nonzero(blocks.valid).tolist():
        label = int(blocks.anchors[b, a]) + k + 1
        logits = rows @ states[b, a, k]
        if trainee.shape.markov_rank:
            w2 = trainee.markov_head.markov_w2.weight
            w1 = trainee.markov_head.markov_w1.weight
            logits = logits + (w2 if ids is None else w2[ids]) @ w1[tokens[b, label - 1]]
        p = (rows @ hidden[b, label - 1]).softmax(0)
        yield (b, a, k), float(torch.tensor(-k / 4.0).exp()), p, logits.log_softmax(0)


def plain(trainee, *rest) -> torch.Tensor:
    """The same loss, one row at a time, all of it left to autograd."""
    total, weights = torch.zeros(()), 0.0
    for _, weight, p, log_q in rows_that_count(trainee, *rest):
        part = MIX[0] * -(p * log_q).sum() + MIX[1] * (log_q.exp() - p).abs().sum()
        total, weights = total + weight * part, weights + weight
    return total / weights


def gradients(value: torch.Tensor, trainee) -> dict[str, torch.Tensor]:
    named = dict(trainee.named_parameters())
    found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    return {n: g for n, g in zip(named, found, strict=True) if g is not None}


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [5, 1000])
def test_loss_and_gradients_are_those_of_autograd(monkeypatch, kind, ids, chunk):
    monkeypatch.setitem(loss.CHUNK, "cpu", chunk)
    trainee, rest = setting(kind, ids=ids)
    value, report = block_loss(trainee, *rest)
    wanted = plain(trainee, *rest)
    assert torch.allclose(value, wanted, atol=1e-5)
    assert torch.allclose(value, MIX[0] * report.ce + MIX[1] * report.l1, atol=1e-6)
    ours, theirs = gradients(value, trainee), gradients(wanted, trainee)
    assert ours.keys() == theirs.keys()
    assert ("markov_head.markov_w2.weight" in ours) == (kind == "dspark")
    for name in theirs:
        assert torch.allclose(ours[name], theirs[name], atol=1e-5), name


@pytest.mark.parametrize("kind", KINDS)
def test_labels_that_are_shifted_by_one_are_noticed(kind):
    trainee, rest = setting(kind)
    _, wrong = setting(kind, shift=1)
    value, _ = block_loss(trainee, *wrong)
    assert not torch.allclose(value, plain(trainee, *rest), atol=1e-3)


def test_the_confidence_head_learns_acceptance_and_leaves_the_rest_alone():
    without, rest = setting("dspark")
    trainee, _ = setting("dspark", confidence=True)
    trainee.load_state_dict(without.state_dict(), strict=False)
    alone, both = block_loss(without, *rest), block_loss(trainee, *rest)
    assert torch.equal(alone[1].ce, both[1].ce)
    found, other = gradients(both[0], trainee), gradients(alone[0], without)
    assert all(torch.equal(found[name], other[name]) for name in other)
    head = {name: g for name, g in found.items() if name.startswith("confidence_head")}
    assert len(head) == 2
    assert all(bool(g.abs().sum() > 0) for g in head.values())


def test_confidence_is_trained_towards_the_chance_that_the_target_accepts():
    """The label is what rejection sampling keeps of the draft, sum min(p, q), said by hand."""
    trainee, rest = setting("dspark", confidence=True, ids=False)
    tokens, blocks = rest[2], rest[3]
    value, report = block_loss(trainee, *rest)
    states = trainee(trainee.context(rest[0]), tokens, blocks.anchors)
    missed, weights = 0.0, 0.0
    for (b, a, k), weight, p, log_q in rows_that_count(trainee, *rest):
        true = torch.minimum(p, log_q.exp()).sum().detach()
        assert float(report.accept[b, a, k]) == pytest.approx(float(true), abs=1e-5)
        before = tokens[b, int(blocks.anchors[b, a]) + k]
        seen = torch.cat([states[b, a, k], trainee.markov_head.markov_w1.weight[before]])
        chance = trainee.confidence_head.proj(seen).sigmoid().detach()
        missed -= weight * float(true * chance.log() + (1 - true) * (1 - chance).log())
        weights += weight
    got = float((value - plain(trainee, *rest)).detach())
    assert got == pytest.approx(missed / weights, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_without_any_row_is_zero_and_has_gradients(kind):
    trainee, rest = setting(kind)
    none = Blocks(rest[3].anchors, torch.zeros_like(rest[3].valid))
    value, report = block_loss(trainee, *rest[:3], none, *rest[4:])
    assert float(value) == 0.0
    assert (report.count, report.tau()) == (0, 1.0)
    assert all(bool((g == 0).all()) for g in gradients(value, trainee).values())


def test_a_draft_counts_while_every_token_from_the_anchors_next_is_an_answer():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1, 0]]).bool()
    blocks = draw_blocks(mask, 3, 1024, torch.Generator().manual_seed(0))
    by_anchor = dict(zip(blocks.anchors[0].tolist(), blocks.valid[0].tolist(), strict=True))
    assert by_anchor[0] == [True, True, False]
    assert by_anchor[3] == [True, True, True]
    assert by_anchor[7] == [True, False, False]
    assert by_anchor[2] == [False, False, False]
    assert by_anchor[9] == [False, False, False]


def test_anchors_are_drawn_from_answers_first_and_differ_from_draw_to_draw():
    mask = torch.zeros(3, 64).bool()
    mask[:, 20:50] = True
    one, two = (draw_blocks(mask, 3, 256, torch.Generator().manual_seed(s)) for s in (1, 2))
    assert one.anchors.shape == (3, 16)
    assert bool(one.valid[..., 0].all())
    assert bool((one.anchors.diff(dim=1) > 0).all())
    assert not torch.equal(one.anchors, two.anchors)
    assert one.labels[0, 0].tolist() == [int(one.anchors[0, 0]) + k for k in (1, 2, 3)]


def test_dropped_context_leaves_anything_from_nothing_to_the_whole_window():
    anchors = torch.arange(0, 400)[None].expand(50, -1)
    generator = torch.Generator().manual_seed(0)
    first = drop_context(anchors, 1.0, 9, generator)
    kept = anchors - first
    assert bool((kept >= 0).all())
    assert kept[:, 100:].unique().tolist() == list(range(9))
    some = drop_context(anchors, 0.25, 9, generator)
    assert 0.2 < float((some[:, 20:] > 0).float().mean()) < 0.3
    assert drop_context(anchors, 0.0, 9, generator) is None


def test_tau_multiplies_along_a_block_and_skips_blocks_that_are_cut():
    accept = torch.tensor([[[0.5, 0.4], [0.9, 0.0]]])
    valid = torch.tensor([[[True, True], [True, False]]])
    report = BlockReport(torch.zeros(()), torch.zeros(()), accept, valid)
    assert report.tau() == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    assert report.count == 3


def test_training_on_one_batch_teaches_what_is_then_served():
    trainee, (captures, hidden, tokens, blocks, head, _, mix) = setting("dspark", ids=False)
    sharp = hidden * 3
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=1e-2)
    for _ in range(60):
        value, report = block_loss(trainee, captures, sharp, tokens, blocks, head, None, mix)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert report.tau() > 2.0
    hits = drafted = 0
    for a in range(blocks.anchors.shape[1]):
        if bool(blocks.valid[0, a, 0]):
            n = int(blocks.anchors[0, a])
            drafts, _ = serve(trainee, [c[0] for c in captures], n, int(tokens[0, n]), head[0])
            hits += drafts[0] == int((head[0] @ sharp[0, n]).argmax())
            drafted += 1
    assert hits > drafted / 2
