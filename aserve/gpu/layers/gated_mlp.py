"""The gated feed-forward block: down(activation(gate(x)) * up(x)).

It knows no configuration and no checkpoint names.
"""

from __future__ import annotations

from torch import Tensor

from aserve.gpu.layers.activation import Activation
from aserve.gpu.layers.linear import LinearOp


class GatedMlp:
    __slots__ = ("activation", "down", "gate_up")

    def __init__(self, gate_up: LinearOp, down: LinearOp, activation: Activation) -> None:
        self.gate_up = gate_up  # the rows of gate, then those of up
        self.down = down
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)
