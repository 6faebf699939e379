"""The loss against float64 autograd, and which rows count."""

from __future__ import annotations

import pytest
import torch

from tandemkv.train import loss
from tandemkv.train.loss import LossReport, Rows, countable_rows, expected_length, unrolled_loss

MIXES = [(1.0, 0.0), (0.0, 1.0), (0.3, 0.7)]


@pytest.mark.parametrize("mix", MIXES)
def test_the_hand_written_gradient_is_that_of_autograd(mix):
    torch.manual_seed(0)
    student = torch.randn(7, 50, dtype=torch.float64, requires_grad=True)
    teacher, weight = torch.randn(7, 50, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    log_q, p = student.log_softmax(-1), teacher.softmax(-1)
    ce, l1 = -(p * log_q).sum(-1), (log_q.exp() - p).abs().sum(-1)
    wanted = torch.autograd.grad((weight * (mix[0] * ce + mix[1] * l1)).sum(), student)[0]
    got, got_ce, got_l1 = loss.soft_targets(student.detach().float(), teacher, weight.float(), mix)
    assert torch.allclose(got.double(), wanted, atol=1e-6)
    assert torch.allclose(got_ce.double(), ce, atol=1e-4)
    assert torch.allclose(got_l1.double(), l1, atol=1e-5)


def _unrolled(monkeypatch, chunk: int):
    monkeypatch.setitem(loss.CHUNK, "cpu", chunk)
    torch.manual_seed(0)
    mask = torch.rand(3, 20) < 0.8
    rows = countable_rows(mask, 3)
    outputs = [torch.randn(3, 20, 8, requires_grad=True) for _ in range(3)]
    teacher, head = torch.randn(3, 20, 8), torch.randn(30, 8)
    value, report = unrolled_loss(outputs, teacher, head, rows, 0.8, (0.3, 0.7))
    return value, report, torch.autograd.grad(value, outputs), (outputs, teacher, head, rows)


def test_chunks_do_not_change_the_loss(monkeypatch: pytest.MonkeyPatch):
    small, whole = _unrolled(monkeypatch, 4), _unrolled(monkeypatch, 1000)
    assert torch.allclose(small[0], whole[0])
    for a, b in zip(small[2], whole[2], strict=True):
        assert torch.allclose(a, b, atol=1e-7)


def test_the_unrolled_loss_compares_step_s_of_row_i_with_the_token_after_next_plus_s(monkeypatch):
    value, _, _, (outputs, teacher, head, rows) = _unrolled(monkeypatch, 1000)
    share = torch.tensor([1.0, 0.8, 0.64]) / 2.44
    total = torch.zeros(())
    for step in range(3):
        parts = []
        for at, ok in zip(rows.label.tolist(), rows.valid[step].tolist(), strict=True):
            if ok:
                p = (teacher.flatten(0, 1)[at - 1] @ head.T).softmax(-1)
                log_q = (outputs[step].flatten(0, 1)[at - 2 - step] @ head.T).log_softmax(-1)
                parts.append(0.3 * -(p * log_q).sum() + 0.7 * (log_q.exp() - p).abs().sum())
        total = total + share[step] * torch.stack(parts).mean()
    assert torch.allclose(value, total, atol=1e-5)


def test_a_row_counts_while_every_token_it_predicts_is_an_answer():
    mask = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1]]).bool()
    rows = countable_rows(mask, 2)
    assert rows.label.tolist() == [3, 4, 6, 7]
    assert rows.valid[0].tolist() == [True, True, True, True]
    assert rows.valid[1].tolist() == [False, True, False, True]
    assert rows.row(1).tolist() == [0, 1, 3, 4]


def test_a_row_without_context_does_not_count():
    mask = torch.ones(2, 6).bool()
    rows = countable_rows(mask, 1, torch.tensor([0, 3]))
    counted = [int(x) for x, ok in zip(rows.label, rows.valid[0], strict=True) if ok]
    assert counted == [2, 3, 4, 5, 11]


def test_rows_do_not_reach_into_the_row_above():
    rows = countable_rows(torch.ones(2, 4).bool(), 2)
    assert rows.valid[1].tolist() == [False, False, False, True] * 2


def test_the_expected_length_multiplies_along_a_chain():
    rows = Rows(torch.tensor([5, 6]), torch.tensor([[True, True], [False, True]]))
    accept = torch.tensor([[0.5, 0.9], [0.0, 0.4]])
    report = LossReport(torch.zeros(()), torch.zeros(()), accept)
    assert expected_length(report, rows) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
