"""The gated MLP: `y = (act(x W_gate^T) * (x W_up^T)) W_down^T`, with act one of ACTIVATIONS.

Source: https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from torch import Tensor
from torch.nn import functional

from aserve.gpu.layers.linear import LinearOp

Activation: TypeAlias = Callable[[Tensor], Tensor]

# The keys are the names that model configurations use.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


class GatedActivation:
    """`y = act(gate) * up`."""

    __slots__ = ("_activation",)

    def __init__(self, activation: str) -> None:
        self._activation = ACTIVATIONS[activation]

    def __call__(self, joined: Tensor) -> Tensor:
        """joined [tokens, 2 * size], gate before up -> [tokens, size]."""
        gate, up = joined.chunk(2, dim=-1)
        return self._activation(gate) * up


class GatedMlp:
    __slots__ = ("down", "gate_up", "gated")

    def __init__(self, gate_up: LinearOp, down: LinearOp, gated: Activation) -> None:
        self.gate_up = gate_up  # the weight's rows are those of gate, then those of up
        self.down = down
        self.gated = gated  # the contract of `GatedActivation`

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gated(self.gate_up(x)))
