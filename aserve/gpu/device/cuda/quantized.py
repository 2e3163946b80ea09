"""Linear layers and experts of CUDA with weights of fp8, 8 and 4 bits, and which of them a model
has.

Those that a checkpoint has in fp8, MXFP4, 8 or 4 bits are multiplied as they are stored, and
`--quantization` rounds the others while they are loaded. Up to FEW_TOKENS tokens, where a step is
as long as the weights take to be read, activations keep their dtype. More tokens are quantised to
fp8, if the weights have it and the device multiplies it; those of experts never are.
`--deterministic` has one kernel for any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.device.cuda.ops import KERNEL_DTYPES
from aserve.gpu.layers.grouped_linear import (
    ExpertWeights,
    GroupedLinearOp,
    Groups,
    PrepareGrouped,
    linears_of,
)
from aserve.gpu.layers.linear import Linear, LinearOp, Prepare
from aserve.gpu.weights.format import WeightFormat, WeightRequest, dtype_name
from aserve.gpu.weights.fp8 import FP8, Fp8Weight, rounded_to_fp8
from aserve.gpu.weights.int4 import BITS as INT4_BITS
from aserve.gpu.weights.int4 import INT4, MIDDLE, CodedWeight
from aserve.gpu.weights.mxfp4 import GROUP as MXFP4_GROUP
from aserve.gpu.weights.mxfp4 import MXFP4, Mxfp4Weight
from aserve.gpu.weights.quantized import (
    GROUP,
    INT8,
    QuantizedLinear,
    QuantizedWeight,
    rounded,
)
from aserve_kernels import fp8_linear as kernels
from aserve_kernels.grouped_coded_linear import CodedExperts, grouped_coded_linear
from aserve_kernels.weight_only_linear import (
    FEW_TOKENS,
    CodedMatrix,
    block_of,
    pack_4_bits,
    weight_only_linear,
)

LIBRARY_MULTIPLE = 16  # of the inputs and outputs of torch's product of fp8
ROUND: Mapping[str, Callable[[Tensor], QuantizedWeight]] = {
    FP8: rounded_to_fp8,
    INT8: lambda weight: rounded(weight, 8),
    INT4: lambda weight: rounded(weight, 4),
}
OWN_NAMES = {Fp8Weight: FP8, CodedWeight: INT4, Mxfp4Weight: MXFP4}
FACTOR_BITS = 2 * 32  # of the scale and the offset of a group of codes
# Of a weight in each format that is rounded to.
BITS: Mapping[str, float] = {FP8: 8, INT8: 8, INT4: 4 + FACTOR_BITS / GROUP}


def with_quantized(format_: WeightFormat, request: WeightRequest, *, has_fp8: bool) -> WeightFormat:
    """Returns the format with the quantized layers that the request asks for, or that the
    checkpoint has. `has_fp8`: the device multiplies fp8."""
    name = request.quantization
    if format_.dtype not in KERNEL_DTYPES:
        if name is None:
            return format_
        raise ConfigError(
            f"--quantization {name} multiplies in float32, bfloat16 or float16 on CUDA, not in "
            f"{dtype_name(format_.dtype)}; choose one of them with --dtype",
            param="dtype",
        )
    if name is None and request.stored_quantization is None:
        return format_
    prepare = PrepareQuantized(
        format_.prepare,
        name,
        has_fp8=has_fp8,
        is_invariant=request.is_deterministic,
    )
    format_ = replace(
        format_,
        prepare=prepare,
        prepare_grouped=PrepareQuantizedExperts(format_.prepare_grouped, prepare),
        prepare_moved=format_.prepare_grouped,
    )
    if name is None:
        about = f"{format_.about}, quantized layers as they are"
        return replace(format_, about=about, factor_bits=FACTOR_BITS)
    about = f"{format_.about} with {name} weights"
    return replace(format_, about=about, stored_bits=BITS[name])


@dataclass(frozen=True, slots=True)
class PrepareQuantized:
    """A `Prepare` for float32, bfloat16 and float16. `name` is the format to which layers are
    rounded; None: they are made by `others`."""

    others: Prepare
    name: str | None
    has_fp8: bool
    is_invariant: bool

    def __call__(self, linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        weight = self.quantized(linear, device)
        if weight is None:
            return self.others(linear, device, dtype=dtype)
        matrix = matrix_of(weight)
        bias = None if linear.bias is None else linear.bias.to(device, dtype)
        has_product = self.has_fp8 and not self.is_invariant and _has_whole_steps(matrix)
        if isinstance(weight, Fp8Weight) and has_product:
            return Fp8Linear(matrix, bias, weight.input_scale, has_library=_library(matrix, dtype))
        return WeightOnlyLinear(matrix, bias, is_invariant=self.is_invariant)

    def quantized(self, linear: Linear, device: torch.device) -> QuantizedWeight | None:
        """Returns the weight in the format in which it is multiplied; None: as numbers."""
        if isinstance(linear, QuantizedLinear) and self._keeps(linear.stored):
            return linear.stored
        return None if self.name is None else ROUND[self.name](linear.weight.to(device))

    def _keeps(self, stored: QuantizedWeight) -> bool:
        return self.name in (None, OWN_NAMES[type(stored)]) and _block_of(stored) is not None


class WeightOnlyLinear:
    """Weights of any format, and activations in the model's dtype."""

    __slots__ = ("_bias", "_is_invariant", "_weight")

    def __init__(self, weight: CodedMatrix, bias: Tensor | None, *, is_invariant: bool) -> None:
        self._weight = weight
        self._bias = bias
        self._is_invariant = is_invariant

    def __call__(self, x: Tensor, /) -> Tensor:
        return weight_only_linear(x, self._weight, self._bias, is_invariant=self._is_invariant)


class Fp8Linear:
    """Weights in fp8. So are the activations of more than FEW_TOKENS tokens: with a scale for each
    group of inputs where the weights have scales of blocks, else with one for each token."""

    __slots__ = ("_bias", "_has_library", "_input_scale", "_weight")

    def __init__(
        self,
        weight: CodedMatrix,
        bias: Tensor | None,
        input_scale: Tensor | None,
        *,
        has_library: bool,
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._input_scale = input_scale
        self._has_library = has_library

    def __call__(self, x: Tensor, /) -> Tensor:
        weight, bias = self._weight, self._bias
        if len(x) <= FEW_TOKENS:
            return weight_only_linear(x, weight, bias)
        has_groups = len(weight.scales) > 1 and self._input_scale is None
        group = kernels.GROUP if has_groups else weight.num_inputs
        rows = kernels.quantize_rows(x, group, self._input_scale)
        if not self._has_library:
            return kernels.fp8_linear(rows, weight, bias, dtype=x.dtype)
        product: Tensor = torch._scaled_mm(
            rows.elements, weight.codes.t(), rows.scales, weight.scales, bias, out_dtype=x.dtype
        )
        return product


class GroupedCodedLinear:
    """The weights of experts in any format, and activations in the model's dtype. It is a
    `GroupedLinearOp` that reads the bounds on the device."""

    __slots__ = ("_biases", "_weights")

    def __init__(self, weights: CodedExperts, biases: Tensor | None) -> None:
        self._weights = weights
        self._biases = biases

    def __call__(self, x: Tensor, groups: Groups, /) -> Tensor:
        return grouped_coded_linear(x, self._weights, self._biases, groups.starts, groups.ends)


@dataclass(frozen=True, slots=True)
class PrepareQuantizedExperts:
    """A `PrepareGrouped` for float32, bfloat16 and float16, whose experts have the formats of
    `layers`. `others` makes those that have none."""

    others: PrepareGrouped
    layers: PrepareQuantized

    def __call__(
        self, weights: ExpertWeights, biases: Tensor | None, prepare: Prepare, /
    ) -> GroupedLinearOp:
        matrices = []
        for linear in linears_of(weights, biases):
            weight = self.layers.quantized(linear, weights.device)
            if weight is None:
                return self.others(weights, biases, prepare)
            matrices.append(matrix_of(weight))
        return GroupedCodedLinear(_stacked(matrices), biases)


def _stacked(matrices: Sequence[CodedMatrix]) -> CodedExperts:
    """Joins experts of one shape and format. NOTE: torch stacks no elements of fp8."""
    first = matrices[0]
    bits = torch.stack([each.codes.view(torch.uint8) for each in matrices])
    offsets = None
    if any(each.offsets is not None for each in matrices):
        none = torch.zeros_like(first.scales)
        offsets = torch.stack([none if each.offsets is None else each.offsets for each in matrices])
    scales = torch.stack([each.scales for each in matrices])
    codes = bits.view(first.codes.dtype)
    return CodedExperts(codes, scales, offsets, *first[3:])


def matrix_of(weight: QuantizedWeight) -> CodedMatrix:
    """Returns the weight in the layout of the kernels, which support its groups."""
    scales = weight.scales.t().contiguous()
    if isinstance(weight, Fp8Weight):
        rows, group = weight.block
        num_inputs = weight.elements.shape[1]
        return CodedMatrix(
            weight.elements.contiguous(), scales, None, num_inputs, min(group, num_inputs), rows
        )
    num_inputs, block = weight.shape[1], _block_of(weight)
    assert block is not None
    if isinstance(weight, Mxfp4Weight):
        packed = pack_4_bits(weight.elements.to(torch.int8) - MIDDLE, block)
        return CodedMatrix(packed, scales, None, num_inputs, MXFP4_GROUP, is_e2m1=True)
    offsets = weight.offsets.t().contiguous() if weight.offsets.any() else None
    codes = weight.codes.contiguous()
    if weight.bits == INT4_BITS:
        codes = pack_4_bits(codes, block)
    return CodedMatrix(codes, scales, offsets, num_inputs, weight.group)


def _block_of(weight: QuantizedWeight) -> int | None:
    if isinstance(weight, Fp8Weight):
        return block_of(weight.elements.shape[1], weight.block[1])
    group = MXFP4_GROUP if isinstance(weight, Mxfp4Weight) else weight.group
    return block_of(weight.shape[1], group)


def _has_whole_steps(matrix: CodedMatrix) -> bool:
    """Whether the product of fp8 supports the groups of the weight."""
    return matrix.group == matrix.num_inputs or matrix.group % kernels.GROUP == 0


def _library(matrix: CodedMatrix, dtype: torch.dtype) -> bool:
    """Whether torch has the product: with a scale per row and per token, in bfloat16."""
    is_by_row = len(matrix.scales) == 1 and matrix.rows == 1
    return (
        is_by_row
        and dtype == torch.bfloat16
        and not any(n % LIBRARY_MULTIPLE for n in matrix.codes.shape)
    )
