"""Linear layers, `y = x W^T + b`, and `Prepare`, through which a device takes them over.

The loader builds each layer as a `Linear` from the checkpoint's values and calls `Prepare` on it
once. A device that packs or quantises weights has its own `Prepare`, which returns another
callable. Weights never change afterwards.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class LinearOp(Protocol):
    """A linear layer that is ready to run."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """x [tokens, in] -> [tokens, out], in the model's dtype."""


class Linear:
    """`y = x W^T + b` in torch.

    The rows of several checkpoint tensors may be stacked in one weight when they multiply the same
    input, as q, k and v do.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]

    def __call__(self, x: Tensor, /) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Prepare(Protocol):
    """Called once for every linear layer. The weight holds the checkpoint's values and may be on
    the device or on the CPU."""

    def __call__(
        self, linear: Linear, device: torch.device, /, *, dtype: torch.dtype
    ) -> LinearOp: ...


def prepare(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """The default `Prepare`: moves the weight to the device and converts it to `dtype`.

    A weight that already is there keeps its storage, so a tied head takes no extra memory.
    """
    bias = linear.bias
    return Linear(linear.weight.to(device, dtype), None if bias is None else bias.to(device, dtype))
