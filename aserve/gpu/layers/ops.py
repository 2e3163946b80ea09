"""The constructors of the layers between matrix products, which a device may replace by its own.

Replacements must give the same numbers up to the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aserve.gpu.layers.mlp import Activation, GatedActivation
from aserve.gpu.layers.norm import Norm, RmsNorm, SumAndNorm, add_rms_norm


class MakeNorm(Protocol):
    """Makes a layer with the contract of `RmsNorm`."""

    def __call__(self, weight: Tensor, /, *, eps: float) -> Norm: ...


class MakeAddNorm(Protocol):
    """Makes a layer with the contract of `AddNorm` over an `RmsNorm`."""

    def __call__(self, weight: Tensor, /, *, eps: float, scale: float) -> SumAndNorm: ...


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Each constructor is called once per layer. `gated` takes the activation's name. Where heads
    are divided among ranks, `mean` returns the mean over these."""

    norm: MakeNorm = RmsNorm
    add_norm: MakeAddNorm = add_rms_norm
    gated: Callable[[str], Activation] = GatedActivation
    mean: Callable[[Tensor], Tensor] | None = None


PLAIN = Elementwise()
