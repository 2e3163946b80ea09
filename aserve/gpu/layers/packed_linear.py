"""Linear layers whose weights oneDNN has packed once, in float32 or bfloat16.

It knows no checkpoint and no machine: whether bfloat16 products are fast, or there at all, is known
where this form is chosen (`gpu/device/cpu_weights.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.layers.linear import Linear, LinearOp

# PERF: one layout serves all numbers of tokens. Float32 linears of Qwen3-0.6B, ms per step at 1, 8
# and 32 tokens: packed for 32 tokens 55, 74, 153; packed for 1 token 80, 111, 197.
PACKED_FOR = 32


class PackedLinear:
    __slots__ = ("_bias", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], bias [out], in the dtype of the products."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        self._bias = bias

    def __call__(self, x: Tensor, /) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return product


def prepare_packed(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    bias = linear.bias
    return PackedLinear(
        linear.weight.to(device, dtype), None if bias is None else bias.to(device, dtype)
    )
