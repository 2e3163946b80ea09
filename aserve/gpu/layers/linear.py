"""Linear layers, and the one seam through which every one of them reaches its device.

It knows no checkpoint and no device: `prepare` only moves; a device that packs or quantises its
weights has a `Prepare` of its own, which gives back another callable. Weights are set once, by the
loader, and never change.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class LinearOp(Protocol):
    """x [tokens, in] -> [tokens, out], in the model's dtype."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Linear:
    """x W^T + b.

    One product may serve several checkpoint tensors that read the same input: their rows are
    joined.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]

    def __call__(self, x: Tensor, /) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Prepare(Protocol):
    """Called once for every linear layer, with the checkpoint's values, on the device or the
    CPU.
    """

    def __call__(
        self, linear: Linear, device: torch.device, /, *, dtype: torch.dtype
    ) -> LinearOp: ...


def prepare(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """The plain form.

    Values that are already there keep their storage, so that a tied head costs nothing.
    """
    bias = linear.bias
    return Linear(linear.weight.to(device, dtype), None if bias is None else bias.to(device, dtype))
