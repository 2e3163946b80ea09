"""Weights that stay quantized as the checkpoint has them, and rounding of others while they are
loaded.

A device that multiplies a format takes `QuantizedLinear.stored`; any other reads the widened
weight, which is made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from aserve.gpu.layers.linear import Linear
from aserve.gpu.weights import fp8, int4, mxfp4
from aserve.gpu.weights.fp8 import PART, Fp8Weight
from aserve.gpu.weights.int4 import CodedWeight
from aserve.gpu.weights.mxfp4 import Mxfp4Weight

QuantizedWeight: TypeAlias = CodedWeight | Fp8Weight | Mxfp4Weight
# Of a checkpoint's linear layers, or experts. Those in GGUF are in blocks (gguf.py).
Quantization: TypeAlias = fp8.Fp8 | int4.Method | Literal["gguf", "mxfp4"]
INT8 = "int8"  # the name of a format for devices, beside FP8 and INT4
GROUP = 128  # inputs that share a scale and an offset of 4 bits
INT8_MAX = 127
INT4_MAX = 15  # of unsigned codes


class StoredBits(NamedTuple):
    """The size of a weight in the checkpoint's codes."""

    bits: int  # of a code
    group: int | None = None  # codes with one scale and one offset; None: a row or a block, or more


class QuantizedLinear(Linear):
    """A linear layer that the checkpoint has quantized."""

    __slots__ = ("stored",)

    def __init__(self, stored: QuantizedWeight, bias: Tensor | None) -> None:
        self.stored = stored
        self.bias = bias

    def __getattr__(self, name: str) -> Tensor:
        """NOTE: Python calls this for the slot `weight` while it is empty."""
        if name != "weight":
            raise AttributeError(name)
        self.weight = self.stored.widened()
        return self.weight


def stored_name(quantization: Quantization | None) -> str | None:
    """Returns the name that the format of a checkpoint has for devices."""
    if quantization is None:
        return None
    if quantization == mxfp4.MXFP4:
        return mxfp4.MXFP4
    return fp8.FP8 if isinstance(quantization, fp8.Fp8) else int4.INT4


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Joins the rows of several weights; None if they cannot be one weight."""
    coded = [part for part in parts if isinstance(part, CodedWeight)]
    if len(coded) == len(parts):
        alike = int4.joined(coded)
        if alike is None and len({part.bits for part in coded}) > 1:
            return rounded(torch.cat([part.widened() for part in coded]), 8)
        return alike
    in_mxfp4 = [part for part in parts if isinstance(part, Mxfp4Weight)]
    if len(in_mxfp4) == len(parts):
        return mxfp4.joined(in_mxfp4)
    in_fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
    return fp8.joined(in_fp8) if len(in_fp8) == len(parts) else None


def reordered(weight: QuantizedWeight, row_order: Tensor) -> QuantizedWeight | None:
    """Returns the weight whose row r is row `row_order[r]` of this one; int64 [out]. None if rows
    leave the block whose scale they have."""
    order = row_order.to(weight.scales.device)
    match weight:
        case CodedWeight(codes, scales, offsets, bits):
            return CodedWeight(codes[order], scales[order], offsets[order], bits)
        case Mxfp4Weight(blocks, exponents):
            return Mxfp4Weight(blocks[order], exponents[order])
        case Fp8Weight(elements, scales, block, input_scale):
            size = block[0]
            blocks = torch.arange(len(order), device=order.device) // size
            if size > 1 and not torch.equal(order // size, blocks):
                return None
            own = elements.view(torch.uint8)[order].view(fp8.ELEMENT)
            return Fp8Weight(own, scales[order] if size == 1 else scales, block, input_scale)


def rounded(weight: Tensor, bits: int) -> CodedWeight:
    """weight [out, in], of any floating dtype -> codes of 8 bits, with a scale for each output, or
    of 4 bits, with a scale and an offset for each group of inputs."""
    round_part = rounded_to_8_bits if bits == 8 else rounded_to_4_bits
    parts = [round_part(weight[at : at + PART].float()) for at in range(0, len(weight), PART)]
    codes, scales, offsets = (torch.cat(values) for values in zip(*parts, strict=True))
    return CodedWeight(codes, scales, offsets, bits)


def rounded_to_8_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight float32 [out, in] -> codes int8 [out, in], scales [out, 1], max|w| / 127, and no
    offsets [out, 0]."""
    largest = weight.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / INT8_MAX, 1)
    return (weight / scales).round_().to(torch.int8), scales, scales[:, :0]


def rounded_to_4_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight float32 [out, in] -> codes int8 [out, in] from -8 to 7, scales and offsets
    [out, groups], which span the weights of each group. Equal weights are the offset alone, of
    which a device may keep fewer bits. A layer whose inputs are no whole groups has one group."""
    num_in = weight.shape[1]
    groups = weight.unflatten(1, (-1, num_in if num_in % GROUP else GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    are_equal = ~(high > low)
    scales = torch.where(are_equal, 1, (high - low) / INT4_MAX)
    codes = ((groups - low) / scales).round_().clamp_(0, INT4_MAX) - int4.MIDDLE
    codes.masked_fill_(are_equal, 0)
    offsets = torch.where(are_equal, low, low + int4.MIDDLE * scales)
    return codes.flatten(1).to(torch.int8), scales.squeeze(2), offsets.squeeze(2)
