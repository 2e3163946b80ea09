"""The gated feed-forward block: down(activation(gate(x)) * up(x)).

It knows no configuration and no checkpoint names.
"""

from __future__ import annotations

from torch import Tensor

from aserve.gpu.layers.activation import Activation
from aserve.gpu.layers.linear import LinearOp


class GatedMlp:
    __slots__ = ("down", "gate_up", "gated")

    def __init__(self, gate_up: LinearOp, down: LinearOp, gated: Activation) -> None:
        self.gate_up = gate_up  # the rows of gate, then those of up
        self.down = down
        self.gated = gated  # as `GatedBy`

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gated(self.gate_up(x)))
