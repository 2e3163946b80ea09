"""The small layers between the products, which a device may make in a way of its own.

It knows no device. Each way gives the same numbers but for float32's last digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from aserve.gpu.layers.norm import RmsNorm
from aserve.gpu.layers.rotary import Rotation, TurnedBy

Norm: TypeAlias = Callable[[Tensor], Tensor]


class MakeNorm(Protocol):
    def __call__(self, weight: Tensor, /, *, eps: float) -> Norm:
        """As `RmsNorm`."""


@dataclass(frozen=True, slots=True)
class Elementwise:
    """`norm` is called once for every norm, `rotation` in each forward, as `TurnedBy`."""

    norm: MakeNorm = RmsNorm
    rotation: Callable[[Tensor], Rotation] = TurnedBy


PLAIN = Elementwise()
