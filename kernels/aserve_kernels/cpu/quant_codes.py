"""Packs weights of 8 and 4 bits for products on the CPU.

    W[o, i] = scales[o, g] * code[o, i] + offsets[o, g],  g = i // group

Codes are integers of 8 or 4 bits (INT8, INT4), or the elements of MXFP4 (E2M1), which are looked up
in a table of integers, twice their values.

Scales and offsets are float16 times a power of two, the unit of the weight. So the largest of them
is about 2^15, and those that are 2^-29 of it still have all bits of float16. Scales of E2M1 are the
exponents of powers of two (E8M0): a weight of 4 bits in groups of 32 then takes 4.25.

A block has one or two vectors of 16 outputs, as in gemm. The order within a block is that of the
dot products which the processor has (quant_dots.py):

of bytes (BYTE_DOTS): 32-bit words [blocks, words of inputs, vectors, 16 outputs], codes without a
sign. A word of 8 bits has 4 inputs, a byte each, with 128 added. One of 4 bits has 8, with 8 added:
byte k has input k in its lower half, and input 4 + k in its upper one. Elements of E2M1 are in the
same places as they are: what is added to codes is in their table.

of int16: 8 bits are int8 [blocks, in / 2, vectors, 16 outputs, 2 inputs]. 4
bits are 32-bit words [blocks, in / 8, vectors, 16 outputs], with 8 added: bits 4 k of a word have
input 2 k, and bits 16 + 4 k input 2 k + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numba.np.numpy_support import as_dtype
from torch import Tensor
from torch.nn import functional

from aserve_kernels.cpu.bf16 import Float32s
from aserve_kernels.cpu.processor import HAS_AVX2, HAS_VNNI
from aserve_kernels.cpu.simd import LANES
from aserve_kernels.cpu.tiles import OUTPUTS, VECTORS

Codes: TypeAlias = npt.NDArray[np.int8] | npt.NDArray[np.int32] | npt.NDArray[np.uint32]
# The bits of float16, which numba has no arrays of, or exponents.
Factors: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint8]

CODES_PER_WORD = 8  # of 4 bits
BYTES_PER_WORD = 4
# Whether codes of this many bits are multiplied by inputs that are bytes. vpdpbusd of AVX-512 VNNI
# adds four products exactly. vpmaddubsw of AVX2 adds two in 16 bits, which codes of 8 bits exceed.
BYTE_DOTS = {8: HAS_VNNI, 4: HAS_VNNI or HAS_AVX2}
ADJACENT_INPUTS = BYTES_PER_WORD if BYTE_DOTS[8] else 2  # of an output, in 8 bits


@dataclass(frozen=True, slots=True, eq=False)
class CodeKind:
    """A kind of codes, which compiled code knows by the type of its arrays."""

    name: str
    bits: int
    dtype: npt.DTypeLike  # of an array of packed codes
    zero: int  # added to codes that shall have no sign
    largest: int  # of the codes with that added
    span: int  # inputs that share a step (quant_rows.py), fewer at the end of a group
    table: tuple[int, ...] = ()  # the codes by their bits; empty: the bits less `zero`
    group: int | None = None  # inputs that share a scale; None: any multiple of LANES

    def __str__(self) -> str:
        return self.name

    @property
    def has_byte_dots(self) -> bool:
        return BYTE_DOTS[self.bits]


# Rounding inputs to 8 bits in spans of 32 adds half as much to the error of a product as rounding
# weights to 8 bits did, and as much where some inputs are 50 times as large as others. Weights that
# were rounded to 4 bits are ten times as far off, so that longer spans add nothing to that. Those
# of E2M1 may be exact.
INT8 = CodeKind(
    "int8",
    8,
    np.int8,
    zero=128 if BYTE_DOTS[8] else 0,
    largest=255 if BYTE_DOTS[8] else 127,
    span=32 if BYTE_DOTS[8] else 128,
)
INT4 = CodeKind("int4", 4, np.int32, zero=8, largest=15, span=128)
MX_GROUP = 32  # elements of MXFP4 that share a scale
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes of E2M1
E2M1 = CodeKind(
    "e2m1",
    4,
    np.uint32,
    zero=DOUBLED[-1],
    largest=2 * DOUBLED[-1],
    span=MX_GROUP,
    table=(*DOUBLED, *(-value for value in DOUBLED)),
    group=MX_GROUP,
)
KINDS = (INT8, INT4, E2M1)
INTEGERS = {kind.bits: kind for kind in (INT8, INT4)}  # the kinds of integers, by their bits


def kind_of(dtype: npt.DTypeLike) -> CodeKind:
    """Returns the kind of an array of packed codes of this dtype."""
    return next(kind for kind in KINDS if np.dtype(kind.dtype) == dtype)


def kind_of_array(codes: Any) -> CodeKind:
    """Returns the kind of codes by numba's type of their array."""
    return kind_of(as_dtype(codes.dtype))


class QuantWeight(NamedTuple):
    """A packed weight. Outputs are padded to whole blocks, and inputs to whole groups, by zeros."""

    codes: Codes  # flat, of the dtype of their kind
    factors: Factors  # [blocks * groups * per_group * OUTPUTS]: scales, then offsets if any
    bias: Float32s  # [out], zeros for no bias
    num_in: int  # of the layer
    group: int  # inputs that share a scale
    per_group: int  # 2 with offsets, else 1
    unit: np.float32  # of the factors

    @property
    def kind(self) -> CodeKind:
        return kind_of(self.codes.dtype)

    @property
    def num_groups(self) -> int:
        return -(-self.num_in // self.group)


def pack_quantized(
    codes: Tensor, scales: Tensor, offsets: Tensor, bias: Tensor | None, *, bits: int
) -> QuantWeight:
    """codes int8 [out, in], scales [out, groups], offsets [out, groups], or [out, 0] if all are
    zero, bias [out]. A group has in / groups inputs, a multiple of LANES; if it is alone, any
    number."""
    num_out, num_in = codes.shape
    num_groups = scales.shape[1]
    group = -(-num_in // LANES) * LANES if num_groups == 1 else num_in // num_groups
    padded = functional.pad(codes, (0, group * num_groups - num_in, 0, _padding_of(num_out)))
    both = torch.stack([scales, offsets] if offsets.numel() else [scales], dim=2).float()
    unit = _unit_of(both)
    return QuantWeight(
        pack_codes(padded, INTEGERS[bits]),
        _pack_factors((both / unit).to(torch.float16).view(torch.int16)).view(np.uint16),
        _bias_of(num_out, bias),
        num_in,
        group,
        both.shape[2],
        np.float32(unit),
    )


def pack_e2m1(elements: Tensor, exponents: Tensor, bias: Tensor | None) -> QuantWeight:
    """elements uint8 [out, in], from 0 to 15; exponents uint8 [out, in / 32], of scales
    2^(exponent - 127); bias [out]."""
    num_out, num_in = elements.shape
    padded = functional.pad(elements, (0, 0, 0, _padding_of(num_out)))
    return QuantWeight(
        _pack_words(padded.view(-1, VECTORS, LANES, num_in)).view(np.uint32),
        _pack_factors(exponents[:, :, None]),
        _bias_of(num_out, bias),
        num_in,
        MX_GROUP,
        1,
        np.float32(0.5),  # codes are twice the elements
    )


def _padding_of(num_out: int) -> int:
    """Returns the outputs that whole blocks have beyond these."""
    return -num_out // OUTPUTS * -OUTPUTS - num_out


def _bias_of(num_out: int, bias: Tensor | None) -> Float32s:
    values: Float32s = (torch.zeros(num_out) if bias is None else bias.float()).numpy()
    return values


def _pack_factors(factors: Tensor) -> npt.NDArray[Any]:
    """[out, groups, 1 or 2] -> flat, by blocks of outputs."""
    padded = functional.pad(factors, (0, 0, 0, 0, 0, _padding_of(len(factors))))
    blocks = padded.unflatten(0, (-1, OUTPUTS))
    packed: npt.NDArray[Any] = blocks.permute(0, 2, 3, 1).contiguous().flatten().numpy()
    return packed


def _unit_of(factors: Tensor) -> float:
    """Returns the power of two by which the largest factor is from 2^14 to 2^15."""
    _, exponent = math.frexp(float(factors.abs().max()))
    return math.ldexp(1.0, min(max(exponent - 15, -100), 100))


def dequantized(weight: QuantWeight) -> Tensor:
    """Returns the weight as float32 [out, in]."""
    num_in = weight.group * weight.num_groups
    values = torch.from_numpy(factor_values(weight.factors)) * float(weight.unit)
    by_block = values.view(-1, weight.num_groups, weight.per_group, OUTPUTS)
    factors = by_block.permute(2, 0, 3, 1).flatten(1, 2).repeat_interleave(weight.group, dim=2)
    whole = torch.from_numpy(unpack_codes(weight.codes, num_in)) * factors[0]
    if weight.per_group == 2:
        whole += factors[1]
    return whole[: len(weight.bias), : weight.num_in]


def factor_values(factors: Factors) -> Float32s:
    """Returns the factors in their unit. An exponent of 0 stands for zero."""
    if factors.dtype == np.uint8:
        return (factors.astype(np.uint32) << 23).view(np.float32)
    return factors.view(np.float16).astype(np.float32)


def pack_codes(codes: Tensor, kind: CodeKind) -> Codes:
    """codes int8 [out, in] of integers, `out` a multiple of OUTPUTS and `in` of 8 -> packed,
    flat."""
    by_output = codes.view(-1, VECTORS, LANES, codes.shape[1])
    return _pack_bytes(by_output) if kind is INT8 else _pack_words(by_output + kind.zero)


def _pack_bytes(by_output: Tensor) -> npt.NDArray[np.int8]:
    """[blocks, vectors, 16 outputs, in] -> codes of 8 bits in the order of the product."""
    words: Tensor = by_output.unflatten(3, (-1, ADJACENT_INPUTS)).permute(0, 3, 1, 2, 4)
    packed: npt.NDArray[np.int8] = words.contiguous().flatten().numpy()
    return (packed.view(np.uint8) ^ np.uint8(INT8.zero)).view(np.int8)


def _pack_words(digits: Tensor) -> npt.NDArray[np.int32]:
    """digits from 0 to 15 [blocks, vectors, 16 outputs, in] -> words in the order of the
    product."""
    shifts = torch.tensor(_shifts_of_4_bits())
    words = (digits.unflatten(3, (-1, CODES_PER_WORD)).to(torch.int64) << shifts).sum(dim=4)
    packed: npt.NDArray[np.int32] = (
        words.permute(0, 3, 1, 2).to(torch.int32).contiguous().flatten().numpy()
    )
    return packed


def _shifts_of_4_bits() -> list[int]:
    """Returns the bit at which each input of a word begins."""
    if BYTE_DOTS[4]:
        return [8 * (i % BYTES_PER_WORD) + 4 * (i // BYTES_PER_WORD) for i in range(CODES_PER_WORD)]
    return [16 * (i % 2) + 4 * (i // 2) for i in range(CODES_PER_WORD)]


def unpack_codes(packed: Codes, num_in: int) -> npt.NDArray[np.int8]:
    """Returns the codes, int8 [out, in]."""
    kind = kind_of(packed.dtype)
    if kind is INT8:
        bytes_ = packed.reshape(-1, num_in // ADJACENT_INPUTS, VECTORS, LANES, ADJACENT_INPUTS)
        codes: npt.NDArray[np.int8] = (bytes_.view(np.uint8) ^ np.uint8(kind.zero)).view(np.int8)
        return codes.transpose(0, 2, 3, 1, 4).reshape(-1, num_in)
    words = packed.view(np.int32).reshape(-1, num_in // CODES_PER_WORD, VECTORS, LANES)
    digits = (words[..., None] >> np.array(_shifts_of_4_bits())) & 15
    codes = np.array(kind.table or [bits - kind.zero for bits in range(16)], np.int8)[digits]
    return codes.transpose(0, 2, 3, 1, 4).reshape(-1, num_in)
