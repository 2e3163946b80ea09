"""Packs weights of 8 and 4 bits for products on the CPU.

    W[o, i] = scales[o, g] * code[o, i] + offsets[o, g],  g = i // group

Scales and offsets are float16 times a power of two, the unit of the weight. So the largest of them
is about 2^15, and those that are 2^-29 of it still have all bits of float16.

A block has one or two vectors of 16 outputs, as in gemm. The order within a block is that of the
dot products which the processor has (quant_dots.py):

of bytes (BYTE_DOTS): 32-bit words [blocks, words of inputs, vectors, 16 outputs], codes without a
sign. A word of 8 bits has 4 inputs, a byte each, with 128 added. One of 4 bits has 8, with 8 added:
byte k has input k in its lower half, and input 4 + k in its upper one.

of int16: 8 bits are int8 [blocks, in / 2, vectors, 16 outputs, 2 inputs]. 4
bits are 32-bit words [blocks, in / 8, vectors, 16 outputs], with 8 added: bits 4 k of a word have
input 2 k, and bits 16 + 4 k input 2 k + 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from aserve_kernels.cpu.bf16 import Float32s
from aserve_kernels.cpu.simd import HAS_AVX2, HAS_VNNI, LANES
from aserve_kernels.cpu.tiles import OUTPUTS, VECTORS

Codes: TypeAlias = npt.NDArray[np.int8] | npt.NDArray[np.int32]
Halves: TypeAlias = npt.NDArray[np.uint16]  # the bits of float16, which numba has no arrays of

CODES_PER_WORD = 8  # of 4 bits
BYTES_PER_WORD = 4
# Whether codes of this many bits are multiplied by inputs that are bytes. vpdpbusd of AVX-512 VNNI
# adds four products exactly. vpmaddubsw of AVX2 adds two in 16 bits, which codes of 8 bits exceed.
BYTE_DOTS = {8: HAS_VNNI, 4: HAS_VNNI or HAS_AVX2}
ADJACENT_INPUTS = BYTES_PER_WORD if BYTE_DOTS[8] else 2  # of an output, in 8 bits
# Added to codes that shall have no sign.
ZEROS = {8: 128 if BYTE_DOTS[8] else 0, 4: 8}


class QuantWeight(NamedTuple):
    """A packed weight. Outputs are padded to whole blocks, and inputs to whole groups, by zeros."""

    codes: Codes  # flat; int8 for 8 bits, int32 for 4
    factors: Halves  # [blocks * groups * per_group * OUTPUTS]: scales, then offsets if any
    bias: Float32s  # [out], zeros for no bias
    num_in: int  # of the layer
    group: int  # inputs that share a scale
    per_group: int  # 2 with offsets, else 1
    unit: np.float32  # of the factors

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype == np.int8 else 4

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
    rows = -num_out // OUTPUTS * -OUTPUTS - num_out
    padded = functional.pad(codes, (0, group * num_groups - num_in, 0, rows))

    both = torch.stack([scales, offsets] if offsets.numel() else [scales], dim=2).float()
    unit = _unit_of(both)
    halves = (both / unit).to(torch.float16)
    blocks = functional.pad(halves, (0, 0, 0, 0, 0, rows)).unflatten(0, (-1, OUTPUTS))
    return QuantWeight(
        pack_codes(padded, bits),
        blocks.permute(0, 2, 3, 1).contiguous().flatten().numpy().view(np.uint16),
        (torch.zeros(num_out) if bias is None else bias.float()).numpy(),
        num_in,
        group,
        both.shape[2],
        np.float32(unit),
    )


def _unit_of(factors: Tensor) -> float:
    """Returns the power of two by which the largest factor is from 2^14 to 2^15."""
    _, exponent = math.frexp(float(factors.abs().max()))
    return math.ldexp(1.0, min(max(exponent - 15, -100), 100))


def dequantized(weight: QuantWeight) -> Tensor:
    """Returns the weight as float32 [out, in]."""
    num_in = weight.group * weight.num_groups
    halves = torch.from_numpy(weight.factors.view(np.float16)).float() * float(weight.unit)
    by_block = halves.view(-1, weight.num_groups, weight.per_group, OUTPUTS)
    factors = by_block.permute(2, 0, 3, 1).flatten(1, 2).repeat_interleave(weight.group, dim=2)
    whole = torch.from_numpy(unpack_codes(weight.codes, num_in)) * factors[0]
    if weight.per_group == 2:
        whole += factors[1]
    return whole[: len(weight.bias), : weight.num_in]


def pack_codes(codes: Tensor, bits: int) -> Codes:
    """codes int8 [out, in], `out` a multiple of OUTPUTS and `in` of 8 -> packed, flat."""
    by_output = codes.view(-1, VECTORS, LANES, codes.shape[1])
    if bits == 8:
        packed = _ordered_bytes(by_output)
    else:
        digits = by_output + ZEROS[4]
        shifts = torch.tensor(_shifts_of_4_bits())
        words = (digits.unflatten(3, (-1, CODES_PER_WORD)).to(torch.int64) << shifts).sum(dim=4)
        packed = words.permute(0, 3, 1, 2).to(torch.int32)
    flat: Codes = packed.contiguous().flatten().numpy()
    return flat


def _ordered_bytes(by_output: Tensor) -> Tensor:
    """[blocks, vectors, 16 outputs, in] -> codes of 8 bits in the order of the product."""
    words: Tensor = by_output.unflatten(3, (-1, ADJACENT_INPUTS)).permute(0, 3, 1, 2, 4)
    return words.contiguous().view(torch.uint8).bitwise_xor(ZEROS[8]).view(torch.int8)


def _shifts_of_4_bits() -> list[int]:
    """Returns the bit at which each input of a word begins."""
    if BYTE_DOTS[4]:
        return [8 * (i % BYTES_PER_WORD) + 4 * (i // BYTES_PER_WORD) for i in range(CODES_PER_WORD)]
    return [16 * (i % 2) + 4 * (i // 2) for i in range(CODES_PER_WORD)]


def unpack_codes(packed: Codes, num_in: int) -> npt.NDArray[np.int8]:
    """Returns the codes, int8 [out, in]."""
    if packed.dtype == np.int8:
        bytes_ = packed.reshape(-1, num_in // ADJACENT_INPUTS, VECTORS, LANES, ADJACENT_INPUTS)
        codes: npt.NDArray[np.int8] = (bytes_.view(np.uint8) ^ np.uint8(ZEROS[8])).view(np.int8)
        return codes.transpose(0, 2, 3, 1, 4).reshape(-1, num_in)
    words = packed.reshape(-1, num_in // CODES_PER_WORD, VECTORS, LANES)
    digits = (words[..., None] >> np.array(_shifts_of_4_bits())) & 15
    codes = (digits - ZEROS[4]).astype(np.int8)
    return codes.transpose(0, 2, 3, 1, 4).reshape(-1, num_in)
