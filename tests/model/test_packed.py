"""Packed linear layers compute what nn.Linear computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tandemkv.model.packed import PackedLinear, can_pack, pack_linear, pack_modules


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 33])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_packed_layer_equals_the_plain_one(num_rows, bias):
    linear = nn.Linear(48, 80, bias=bias)
    x = torch.randn(1, num_rows, 48)
    packed = pack_linear(linear.weight, linear.bias)
    torch.testing.assert_close(packed(x), linear(x), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_bfloat16_is_packed_too_where_the_machine_has_it():
    linear = nn.Linear(48, 80).bfloat16()
    packed = pack_linear(linear.weight, linear.bias)
    assert isinstance(packed, PackedLinear) == can_pack(linear.weight)
    x = torch.randn(3, 48).bfloat16()
    torch.testing.assert_close(packed(x), linear(x), atol=0.02, rtol=0.02)


@torch.inference_mode()
def test_a_dtype_without_the_kernel_stays_plain():
    linear = nn.Linear(8, 4).double()
    packed = pack_linear(linear.weight, linear.bias)
    assert type(packed) is nn.Linear
    x = torch.randn(2, 8).double()
    assert torch.equal(packed(x), linear(x))


def test_the_weight_can_be_had_back():
    weight = torch.randn(80, 48)
    assert torch.equal(pack_linear(weight).weight, weight)


@torch.inference_mode()
def test_every_linear_of_a_model_is_replaced():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))
    x = torch.randn(2, 8)
    before = model(x)
    pack_modules(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_a_packed_layer_may_be_moved_to_another_dtype_and_back():
    linear = nn.Linear(8, 4)
    x = torch.randn(2, 8)
    packed = pack_linear(linear.weight, linear.bias)
    moved = packed.double()
    torch.testing.assert_close(moved(x.double()), linear(x).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(moved.float()(x), linear(x), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_a_bias_that_is_lost_is_caught():
    linear = nn.Linear(8, 4)
    x = torch.randn(2, 8)
    assert (pack_linear(linear.weight)(x) - linear(x)).abs().max() > 1e-3
