"""Linear layers of the CPU through aserve's own kernels: y = x W^T + b with weights in tiles, and
with int8 weights.

device/cpu/weights.py decides where they are used.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.device.cpu.linear import linear_per_expert, prepare_packed
from aserve.gpu.layers.grouped_linear import GroupedLinearOp, Groups
from aserve.gpu.layers.linear import Linear, LinearOp, Prepare
from aserve_kernels.cpu.bf16 import Floats
from aserve_kernels.cpu.gemm import (
    compile_grouped_linear,
    compile_packed_linear,
    pack,
    packed_grouped_linear,
    packed_linear,
)
from aserve_kernels.cpu.int8_linear import compile_int8_linear, int8_linear


class TiledLinear:
    """Weights packed in the tiles of aserve_kernels.cpu.gemm. The fused decoder reads them too."""

    __slots__ = ("bias", "num_workers", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, num_workers: int = 1) -> None:
        """weight [out, in], in the model's dtype, bias [out]."""
        self.num_workers = num_workers
        self.packed = pack(weight)
        self.bias = (torch.zeros(len(weight)) if bias is None else bias.float()).numpy()

    def __call__(self, x: Tensor, /) -> Tensor:
        return packed_linear(x, self.packed, self.bias, num_workers=self.num_workers)


def prepare_tiled(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """dtype: float32 or bfloat16. The kernel reads input features in pairs, so a layer with an odd
    number of them goes to oneDNN. Threads share the products in bfloat16; in float32, small models
    have tiles only."""
    if linear.weight.shape[1] % 2:
        return prepare_packed(linear, device, dtype=dtype)
    num_workers = torch.get_num_threads() if dtype == torch.bfloat16 else 1
    compile_packed_linear(dtype, num_workers)
    return TiledLinear(linear.weight.to(device, dtype), linear.bias, num_workers=num_workers)


class TiledExperts:
    """The tiles of all experts, multiplied in one call."""

    __slots__ = ("_biases", "_packed")

    def __init__(self, experts: tuple[TiledLinear, ...]) -> None:
        self._packed: Floats = np.array([expert.packed for expert in experts])
        self._biases = np.stack([expert.bias for expert in experts])

    def __call__(self, x: Tensor, groups: Groups, /) -> Tensor:
        starts, ends = (bounds.numpy() for bounds in groups)
        return packed_grouped_linear(x, self._packed, self._biases, starts, ends)


def prepare_experts(weights: Tensor, biases: Tensor | None, prepare: Prepare, /) -> GroupedLinearOp:
    """A `PrepareGrouped` of any format: one kernel where the experts are in tiles."""
    layer = linear_per_expert(weights, biases, prepare)
    tiled = tuple(expert for expert in layer.experts if isinstance(expert, TiledLinear))
    if len(tiled) < len(layer.experts):
        return layer
    compile_grouped_linear(weights.dtype)
    return TiledExperts(tiled)


# PERF: up to this number of tokens the kernel, which reads one byte per weight, is faster than a
# product with widened weights: 0.6 ms against 5.2 at 1 token of 1024 x 6144 in float32, 3.3 against
# 6.2 at 8 in bfloat16, 12 against 6 at 32.
MAX_KERNEL_TOKENS = 8
INT8_MAX = 127


class Int8Linear:
    """y = x (q * s)^T + b with int8 weights q and one scale s = max|w| / 127 per output row."""

    __slots__ = ("_bias", "_scales", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], of any floating dtype; bias [out], in the model's dtype."""
        largest = weight.abs().amax(dim=1).float()
        self._scales = torch.where(largest > 0, largest / INT8_MAX, 1)  # [out]
        self._weight = torch.empty(weight.shape, dtype=torch.int8)
        for part in range(0, len(weight), 4096):  # bounds the float32 copy
            rows = slice(part, part + 4096)
            self._weight[rows] = (weight[rows].float() / self._scales[rows, None]).round_()
        self._bias = bias

    def __call__(self, x: Tensor, /) -> Tensor:
        if len(x) <= MAX_KERNEL_TOKENS:
            product = int8_linear(x, self._weight, self._scales)
        else:
            product = functional.linear(x, self._weight.to(x.dtype)).mul_(self._scales.to(x.dtype))
        return product if self._bias is None else product.add_(self._bias)


def prepare_int8(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """dtype: float32 or bfloat16."""
    assert device.type == "cpu"
    compile_int8_linear(dtype)
    bias = linear.bias
    return Int8Linear(linear.weight, None if bias is None else bias.to(dtype))
