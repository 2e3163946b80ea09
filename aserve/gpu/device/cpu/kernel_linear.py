"""Linear layers of the CPU through aserve's own kernels: y = x W^T + b with weights in tiles, and
with weights of 8 and 4 bits.

device/cpu/weights.py decides where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.device.cpu.linear import linear_per_expert, prepare_packed
from aserve.gpu.layers.grouped_linear import ExpertWeights, GroupedLinearOp, Groups
from aserve.gpu.layers.linear import Linear, LinearOp, Prepare
from aserve.gpu.weights.int4 import BITS, CodedWeight
from aserve.gpu.weights.mxfp4 import Mxfp4Weight
from aserve.gpu.weights.quantized import QuantizedLinear, rounded
from aserve_kernels.cpu.bf16 import Floats
from aserve_kernels.cpu.gemm import (
    compile_grouped_linear,
    compile_packed_linear,
    pack,
    packed_grouped_linear,
    packed_linear,
)
from aserve_kernels.cpu.quant_codes import E2M1, INTEGERS, QuantWeight, pack_e2m1, pack_quantized
from aserve_kernels.cpu.quant_linear import compile_quant_linear, quant_linear
from aserve_kernels.cpu.simd import LANES

GROWTH = 16  # of factors, for which new weights have room


class TiledLinear:
    """Weights packed in the tiles of aserve_kernels.cpu.gemm. The fused decoder reads them too."""

    __slots__ = ("bias", "num_in", "num_workers", "packed", "stored")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, num_workers: int = 1) -> None:
        """weight [out, in], in the model's dtype or bfloat16, bias [out]."""
        self.num_in, self.stored = weight.shape[1], weight.dtype
        self.num_workers = num_workers
        self.packed = pack(weight)
        self.bias = (torch.zeros(len(weight)) if bias is None else bias.float()).numpy()

    @property
    def num_out(self) -> int:
        return len(self.bias)

    def __call__(self, x: Tensor, /) -> Tensor:
        return packed_linear(x, self.packed, self.bias, num_workers=self.num_workers)


def prepare_tiled(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """dtype: float32 or bfloat16."""
    return _tiled(linear, device, dtype=dtype, stored=dtype)


def prepare_bf16_stored(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """dtype: float32. Weights are bfloat16."""
    return _tiled(linear, device, dtype=dtype, stored=torch.bfloat16)


def _tiled(
    linear: Linear, device: torch.device, *, dtype: torch.dtype, stored: torch.dtype
) -> LinearOp:
    """The kernel reads input features in pairs, so a layer with an odd number of them goes to
    oneDNN. Threads share the products with weights of bfloat16; those of float32 are in small
    models only."""
    if linear.weight.shape[1] % 2:
        return prepare_packed(linear, device, dtype=dtype)
    num_workers = torch.get_num_threads() if stored == torch.bfloat16 else 1
    compile_packed_linear(dtype, num_workers, stored)
    return TiledLinear(linear.weight.to(device, stored), linear.bias, num_workers=num_workers)


class TiledExperts:
    """The tiles of all experts, multiplied in one call. Those of `experts` become parts of them,
    which the fused decoder reads."""

    __slots__ = ("_biases", "_packed", "experts")

    def __init__(self, experts: tuple[TiledLinear, ...]) -> None:
        self._packed: Floats = np.array([expert.packed for expert in experts])
        self._biases = np.stack([expert.bias for expert in experts])
        self.experts = experts
        for expert, packed, bias in zip(experts, self._packed, self._biases, strict=True):
            expert.packed, expert.bias = packed, bias

    def __call__(self, x: Tensor, groups: Groups, /) -> Tensor:
        starts, ends = (bounds.numpy() for bounds in groups)
        return packed_grouped_linear(x, self._packed, self._biases, starts, ends)


def prepare_experts(
    weights: ExpertWeights, biases: Tensor | None, prepare: Prepare, /
) -> GroupedLinearOp:
    """A `PrepareGrouped` of any format: one kernel where the experts are in tiles."""
    layer = linear_per_expert(weights, biases, prepare)
    tiled = tuple(expert for expert in layer.experts if isinstance(expert, TiledLinear))
    if len(tiled) < len(layer.experts):
        return layer
    compile_grouped_linear(weights.dtype)
    return TiledExperts(tiled)


class QuantLinear:
    """y = x W^T + b with weights of 8 bits, and a scale for each output, of 4 bits, and a scale and
    an offset for each group of inputs, or in MXFP4. The fused decoder reads them too."""

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
        return cls(_packed(rounded(weight, bits), bias, bits=bits), num_workers=num_workers)

    def __call__(self, x: Tensor, /) -> Tensor:
        return quant_linear(x, self.weight, num_workers=self.num_workers)

    def in_own_form(self, new: QuantLinear, /) -> QuantLinear:
        return QuantLinear(_in_unit(new.weight, self.weight.unit), num_workers=new.num_workers)


def _packed(stored: CodedWeight, bias: Tensor | None, *, bits: int) -> QuantWeight:
    """Packs a weight, and leaves its factors room to grow in their unit."""
    packed = pack_quantized(stored.codes, stored.scales, stored.offsets, bias, bits=bits)
    return _in_unit(packed, np.float32(packed.unit * GROWTH))


def _in_unit(weight: QuantWeight, unit: np.float32) -> QuantWeight:
    """Returns the weight with factors in this unit, which shifts their exponents. Only factors
    below 2^-24 of the largest one lose bits. Weights in MXFP4 have one unit. Raises ConfigError."""
    if weight.unit == unit:
        return weight
    factors = weight.factors.view(np.float16).astype(np.float32) * (weight.unit / unit)
    if np.abs(factors).max(initial=0) > np.finfo(np.float16).max:
        raise ConfigError(
            f"the scales of a layer with {weight.kind.bits} bits are more than {GROWTH} times as "
            "large as those of the running model: start the server with this checkpoint instead"
        )
    return weight._replace(factors=factors.astype(np.float16).view(np.uint16), unit=unit)


def prepare_quantized(bits: int) -> Prepare:
    """Returns a `Prepare` for float32 or bfloat16, which rounds what is not coded already."""

    def prepare(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        assert device.type == "cpu"
        num_workers = torch.get_num_threads()
        compile_quant_linear(dtype, num_workers, kind=INTEGERS[bits])
        return QuantLinear.rounded(linear.weight, linear.bias, bits=bits, num_workers=num_workers)

    return with_codes(prepare, kept=(BITS,)) if bits == BITS else prepare


def with_codes(others: Prepare, *, kept: tuple[int, ...] = (BITS, 8)) -> Prepare:
    """Returns a `Prepare` that keeps the codes of layers that have some of these bits, or are in
    MXFP4, as they are."""

    def prepare(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        coded = linear.stored if isinstance(linear, QuantizedLinear) else None
        num_workers = torch.get_num_threads()
        if isinstance(coded, Mxfp4Weight):
            compile_quant_linear(dtype, num_workers, kind=E2M1)
            packed = pack_e2m1(coded.elements, coded.exponents, linear.bias)
            return QuantLinear(packed, num_workers=num_workers)
        if not isinstance(coded, CodedWeight) or coded.group % LANES or coded.bits not in kept:
            return others(linear, device, dtype=dtype)
        compile_quant_linear(dtype, num_workers, kind=INTEGERS[coded.bits])
        return QuantLinear(_packed(coded, linear.bias, bits=coded.bits), num_workers=num_workers)

    return prepare


QUANTIZATIONS: Mapping[str, int] = {"int8": 8, "int4": 4}  # the bits of --quantization
PREPARE_QUANTIZED = {name: prepare_quantized(bits) for name, bits in QUANTIZATIONS.items()}
