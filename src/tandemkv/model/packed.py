"""Linear layers on CPU with weights in the layout that the matrix kernel reads.

Law: a packed layer computes what nn.Linear computes, up to the order of float32 sums. The kernel
otherwise lays a weight out anew on every call, which for the few rows of a decode or verify step
costs more than the product: packing once makes five rows about as dear as one. This module
changes nothing on other devices, or where torch has no such kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROWS = 8
"""The row count the layout is chosen for: a verify step. It holds for any number of rows."""


class PackedLinear(nn.Module):
    """y = x W^T + b. weight [out, in] on CPU, which the packed copy does not keep alive.

    Moved to a device or dtype without the kernel, it becomes a plain product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._hold(weight.detach())

    @property
    def weight(self) -> Tensor:
        """The weight laid out plainly [out, in]: a copy, made on each use, while it is packed."""
        return self._packed.to_dense() if self._plain is None else self._plain

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self._plain is not None:
            return F.linear(x, self._plain, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def _hold(self, weight: Tensor) -> None:
        self._plain = None if can_pack(weight) else weight
        if self._plain is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
            self._packed = packed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """What nn.Module.to calls: the weight is moved as parameters are."""
        super()._apply(fn, recurse)
        self._hold(fn(self.weight))
        return self


def can_pack(weight: Tensor) -> bool:
    """Whether this weight's device and dtype have the packed kernel."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    if not hasattr(ops, "_linear_pointwise") or not hasattr(ops, "_reorder_linear_weight"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """A module for y = x W^T + b: packed where that is possible, else a plain nn.Linear.

    weight [out, in], bias [out] or None.
    """
    if can_pack(weight):
        return PackedLinear(weight, bias)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def pack_modules(root: nn.Module) -> None:
    """Replace every nn.Linear below root that can be packed; its plain weight is let go."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
