"""Where a model gets its weights from while it is built.

A model is built twice: from an `Inventory`, which only notes what is asked for, and, when that fits
the checkpoint and the memory, from a `WeightReader`. So a layer has its final weights from the
start, and nothing is ever initialised at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.layers.elementwise import Elementwise
from aserve.gpu.layers.linear import LinearOp


class WeightSource(Protocol):
    """Names are the checkpoint's."""

    device: torch.device
    dtype: torch.dtype
    elementwise: Elementwise  # makes the layers that are no products

    def tensor(self, name: str, shape: tuple[int, ...], *, offset: float = 0.0) -> Tensor:
        """A plain weight, on the device and in the model's dtype.

        `offset` is added to what is stored; the sum is never rounded to a half type.
        """

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        """That of the first name which the checkpoint has; it need not have any."""

    def linear(self, parts: Mapping[str, int], *, in_features: int, bias: bool) -> LinearOp:
        """One product over the rows of several layers: `parts` are their names (without ".weight")
        and row counts.
        """

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        """A layer that has another's weight; the checkpoint may hold a copy of it under `name`,
        too.
        """
