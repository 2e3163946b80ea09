"""The small layers between the products, which a device may make in a way of its own.

It knows no device. Each way gives the same numbers but for float32's last digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aserve.gpu.layers.mlp import Activation, GatedBy
from aserve.gpu.layers.norm import Norm, RmsNorm, SumAndNorm, add_rms_norm


class MakeNorm(Protocol):
    def __call__(self, weight: Tensor, /, *, eps: float) -> Norm:
        """As `RmsNorm`."""


class MakeAddNorm(Protocol):
    def __call__(self, weight: Tensor, /, *, eps: float, scale: float) -> SumAndNorm:
        """As `AddNorm` of a `RmsNorm`."""


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Called once for every layer that has one; `gated` gets the activation's name."""

    norm: MakeNorm = RmsNorm
    add_norm: MakeAddNorm = add_rms_norm
    gated: Callable[[str], Activation] = GatedBy


PLAIN = Elementwise()
