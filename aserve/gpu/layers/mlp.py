"""What a gated MLP does to its gate, by the names that configurations use.

It knows no configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from torch import Tensor
from torch.nn import functional

from aserve.gpu.layers.linear import LinearOp

Activation: TypeAlias = Callable[[Tensor], Tensor]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


class GatedBy:
    """activation(gate) * up."""

    __slots__ = ("_activation",)

    def __init__(self, activation: str) -> None:
        self._activation = ACTIVATIONS[activation]

    def __call__(self, joined: Tensor) -> Tensor:
        """joined [tokens, 2 * size]: gate, then up -> [tokens, size]."""
        gate, up = joined.chunk(2, dim=-1)
        return self._activation(gate) * up


class GatedMlp:
    __slots__ = ("down", "gate_up", "gated")

    def __init__(self, gate_up: LinearOp, down: LinearOp, gated: Activation) -> None:
        self.gate_up = gate_up  # the rows of gate, then those of up
        self.down = down
        self.gated = gated  # as `GatedBy`

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gated(self.gate_up(x)))
