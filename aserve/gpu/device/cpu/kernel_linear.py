"""Linear layers of the CPU through aserve's own kernels: y = x W^T + b with weights in tiles, and
with weights of 8 and 4 bits.

device/cpu/weights.py decides where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.device.cpu.linear import linear_per_expert, prepare_packed
from aserve.gpu.layers.grouped_linear import GroupedLinearOp, Groups
from aserve.gpu.layers.linear import Linear, LinearOp, Prepare
from aserve.gpu.weights.int4 import BITS, CodedLinear
from aserve_kernels.cpu.bf16 import Floats
from aserve_kernels.cpu.gemm import (
    compile_grouped_linear,
    compile_packed_linear,
    pack,
    packed_grouped_linear,
    packed_linear,
)
from aserve_kernels.cpu.quant_codes import CODES_PER_WORD, SMALLEST
from aserve_kernels.cpu.quant_linear import (
    QuantWeight,
    compile_quant_linear,
    pack_quantized,
    quant_linear,
)


class TiledLinear:
    """Weights packed in the tiles of aserve_kernels.cpu.gemm. The fused decoder reads them too."""

    __slots__ = ("bias", "num_in", "num_workers", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, num_workers: int = 1) -> None:
        """weight [out, in], in the model's dtype, bias [out]."""
        self.num_in = weight.shape[1]
        self.num_workers = num_workers
        self.packed = pack(weight)
        self.bias = (torch.zeros(len(weight)) if bias is None else bias.float()).numpy()

    @property
    def num_out(self) -> int:
        return len(self.bias)

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


INT8_MAX = 127
INT4_MAX = 15  # of unsigned codes
GROUP = 128  # inputs that share a scale and an offset of 4 bits
PART = 4096  # outputs that are rounded at a time, which bounds the float32 copy


class QuantLinear:
    """y = x W^T + b with weights of 8 bits, and a scale for each output, or of 4 bits, and a scale
    and an offset for each group of inputs. The fused decoder reads them too."""

    __slots__ = ("num_workers", "weight")

    def __init__(self, weight: QuantWeight, *, num_workers: int = 1) -> None:
        self.weight = weight
        self.num_workers = num_workers

    @property
    def num_in(self) -> int:
        return self.weight.num_in

    @property
    def num_out(self) -> int:
        return len(self.weight.bias)

    @classmethod
    def rounded(
        cls, weight: Tensor, bias: Tensor | None, *, bits: int = 8, num_workers: int = 1
    ) -> QuantLinear:
        """weight [out, in], of any floating dtype; bias [out], in the model's dtype."""
        round_part = rounded_to_8_bits if bits == 8 else rounded_to_4_bits
        parts = [round_part(weight[at : at + PART].float()) for at in range(0, len(weight), PART)]
        codes, scales, offsets = (torch.cat(values) for values in zip(*parts, strict=True))
        packed = pack_quantized(codes, scales, offsets, bias, bits=bits)
        return cls(packed, num_workers=num_workers)

    def __call__(self, x: Tensor, /) -> Tensor:
        return quant_linear(x, self.weight, num_workers=self.num_workers)


def rounded_to_8_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight float32 [out, in] -> codes int8 [out, in], scales [out, 1], max|w| / 127, and no
    offsets [out, 0]."""
    largest = weight.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / INT8_MAX, 1)
    return (weight / scales).round_().to(torch.int8), scales, scales[:, :0]


def rounded_to_4_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight float32 [out, in] -> codes int8 [out, in] from -8 to 7, scales and offsets
    [out, groups], which span the weights of each group. A layer whose inputs are no whole groups
    has one group."""
    num_in = weight.shape[1]
    groups = weight.unflatten(1, (-1, num_in if num_in % GROUP else GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    scales = torch.where(high > low, (high - low) / INT4_MAX, 1)
    codes = ((groups - low) / scales).round_().clamp_(0, INT4_MAX) + SMALLEST
    offsets = low - SMALLEST * scales
    return codes.flatten(1).to(torch.int8), scales.squeeze(2), offsets.squeeze(2)


def prepare_quantized(bits: int) -> Prepare:
    """Returns a `Prepare` for float32 or bfloat16, which rounds what is not coded already."""

    def prepare(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        assert device.type == "cpu"
        num_workers = torch.get_num_threads()
        compile_quant_linear(dtype, num_workers, bits=bits)
        return QuantLinear.rounded(linear.weight, linear.bias, bits=bits, num_workers=num_workers)

    return with_codes(prepare) if bits == BITS else prepare


def with_codes(others: Prepare) -> Prepare:
    """Returns a `Prepare` that keeps the codes of layers of 4 bits as they are."""

    def prepare(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        if not isinstance(linear, CodedLinear) or linear.coded.group % CODES_PER_WORD:
            return others(linear, device, dtype=dtype)
        num_workers = torch.get_num_threads()
        compile_quant_linear(dtype, num_workers, bits=BITS)
        coded = linear.coded
        packed = pack_quantized(coded.codes, coded.scales, coded.offsets, linear.bias, bits=BITS)
        return QuantLinear(packed, num_workers=num_workers)

    return prepare


QUANTIZATIONS: Mapping[str, int] = {"int8": 8, "int4": 4}  # the bits of --quantization
PREPARE_QUANTIZED = {name: prepare_quantized(bits) for name, bits in QUANTIZATIONS.items()}
