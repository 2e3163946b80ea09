"""The feed-forward block of the Llama family: down(silu(gate(x)) * up(x)).

It knows no configuration and no checkpoint names.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from aserve.gpu.layers.linear import LinearOp


class GatedMlp:
    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: LinearOp, down: LinearOp) -> None:
        self.gate_up = gate_up  # the rows of gate, then those of up
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)
