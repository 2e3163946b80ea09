"""Linear layers stored as float16 and multiplied in float32: half the bytes to read, with float32
arithmetic (FBGEMM).

For processors without products of half types. It knows no checkpoint; weights beyond float16's
range are FBGEMM's to saturate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.layers.linear import Linear, LinearOp


class HalfStoredLinear:
    __slots__ = ("_packed",)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], bias [out], both float32."""
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def __call__(self, x: Tensor, /) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product


def prepare_half_stored(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    assert (device.type, dtype) == ("cpu", torch.float32)  # the only products that FBGEMM has
    bias = linear.bias
    return HalfStoredLinear(linear.weight.float(), None if bias is None else bias.float())
