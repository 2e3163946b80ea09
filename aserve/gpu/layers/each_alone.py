"""Linear layers and activations that take one token at a time, so that its result does not depend
on how many others a step has, nor on its place among them. For the CPU.

What a library computes of several rows promises neither: which of its loops has a number depends on
both, and on how threads share them. So a prompt is read as slowly as it would be written. It knows
no form of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.layers.activation import Activation, GatedBy
from aserve.gpu.layers.elementwise import Elementwise
from aserve.gpu.layers.linear import Linear, LinearOp, Prepare


@dataclass(frozen=True, slots=True)
class EachAlone:
    op: LinearOp

    def __call__(self, x: Tensor, /) -> Tensor:
        # Copies begin at the same alignment, on which sums may depend too.
        return torch.cat([self.op(row.clone()) for row in x.split(1)])


def each_alone(form: Prepare) -> Prepare:
    def prepare(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        return EachAlone(form(linear, device, dtype=dtype))

    return prepare


def _gated_alone(activation: str) -> Activation:
    return EachAlone(GatedBy(activation))


# Norms and sums round alike in all loops of torch; exp, tanh and erf do not.
ALONE = Elementwise(gated=_gated_alone)
