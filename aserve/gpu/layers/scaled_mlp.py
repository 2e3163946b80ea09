"""The gated MLP with a factor for its gates and one for its output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aserve.gpu.layers.mlp import Activation, GatedMlp


@dataclass(frozen=True, slots=True)
class ScaledGate:
    """`y = act(factor * gate) * up`, with the contract of `GatedActivation`."""

    activation: Activation
    factor: float

    def __call__(self, joined: Tensor) -> Tensor:
        gate, up = joined.chunk(2, dim=-1)
        return self.activation(gate * self.factor) * up


class ScaledMlp:
    """A `Mlp`."""

    __slots__ = ("factor", "gate_factor", "mlp")

    def __init__(
        self, mlp: GatedMlp, activation: Activation, *, gate_factor: float, factor: float
    ) -> None:
        """The activation takes the place of that of `mlp`; `factor` is that of the output."""
        self.mlp = GatedMlp(mlp.gate_up, mlp.down, ScaledGate(activation, gate_factor))
        self.gate_factor = gate_factor
        self.factor = factor

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.mlp(x) * self.factor
