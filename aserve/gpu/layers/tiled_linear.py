"""Linear layers of small models, whose products are compiled here and run in one thread.

It knows no checkpoint and no machine: where these products are fast is known where this form is
chosen (`gpu/device/cpu_weights.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.layers.linear import Linear, LinearOp
from aserve.gpu.layers.packed_linear import prepare_packed
from aserve_kernels.cpu.products import compile_packed_linear, pack, packed_linear


class TiledLinear:
    __slots__ = ("bias", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], in the dtype of the products, bias [out]."""
        self.packed = pack(weight)
        self.bias = (torch.zeros(len(weight)) if bias is None else bias.float()).numpy()

    def __call__(self, x: Tensor, /) -> Tensor:
        return packed_linear(x, self.packed, self.bias)


def prepare_tiled(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """dtype: float32 or bfloat16, whose products take inputs in pairs."""
    if linear.weight.shape[1] % 2:
        return prepare_packed(linear, device, dtype=dtype)
    compile_packed_linear(dtype)
    return TiledLinear(linear.weight.to(device, dtype), linear.bias)
