"""The MLP without a gate: `y = act(x W_up^T) W_down^T`, with act one of PLAIN_ACTIVATIONS.

Source: https://arxiv.org/abs/2109.08668 (relu2)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.mlp import Activation

RELU2 = "relu2"


def relu2(x: Tensor) -> Tensor:
    """relu(x)^2."""
    return functional.relu(x).square()


PLAIN_ACTIVATIONS: Mapping[str, Activation] = {RELU2: relu2}


class PlainMlp:
    __slots__ = ("activation", "down", "up")

    def __init__(self, up: LinearOp, down: LinearOp, activation: str) -> None:
        self.up = up
        self.down = down
        self.activation = activation  # the key

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.down(PLAIN_ACTIVATIONS[self.activation](self.up(x)))
