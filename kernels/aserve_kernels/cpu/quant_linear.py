"""A linear layer whose weights have 8 or 4 bits, in groups: y = x W^T + b.

    W[o, i] = scales[o, g] * code[o, i] + offsets[o, g],  g = i // group
    y[t, o] = b[o] + sum_g (scales[o, g] * sum_i x[t, i] code[o, i] + offsets[o, g] * sum_i x[t, i])

Decode reads every weight once, so memory bandwidth is the limit, and such weights take half or a
quarter of the bytes of bfloat16. For a few rows codes are multiplied as they are (bfloat16 and
float32 have them exactly), and the sums are scaled. For more, a block of weights is decoded once,
rounded to the dtype of x, and multiplied as in gemm. Threads share the outputs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numba import njit, prange, types
from numba.core.types import containers
from torch import Tensor
from torch.nn import functional

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, numba_type, widened
from aserve_kernels.cpu.gemm import OUTPUTS, multiply_blocks, outputs_of
from aserve_kernels.cpu.memory import array_at
from aserve_kernels.cpu.precompile import NO_REFCOUNT, Callback, cached_njit, compile_ahead
from aserve_kernels.cpu.product import FLOAT32_LIKE, LIKE, RECORD_LIKE, compile_product
from aserve_kernels.cpu.quant_codes import (
    CODES_PER_WORD,
    Codes,
    decode_group,
    multiply_codes,
    pack_codes,
    unpack_codes,
)

MAX_TILE_ROWS = 8
# Rows that pass over the codes together. PERF: 8 rows took 0.66 ms with 8 bits, and 0.74 in halves,
# but 0.65 and 0.50 with 4 bits (6,144 outputs, 1,024 inputs, one thread).
MOST_AT_ONCE, MOST_OF_4_BITS = 8, 4
NO_BIAS = np.zeros(OUTPUTS, np.float32)
INT8_LIKE, INT32_LIKE = np.empty(0, np.int8), np.empty(0, np.int32)  # for `array_at`
WIDE_ROWS = 256  # that are multiplied with a decoded block at a time


class QuantWeight(NamedTuple):
    """A packed weight. Outputs are padded to whole blocks, and inputs to whole groups, by zeros."""

    codes: Codes
    factors: Float32s  # [blocks * groups * 1 or 2 * 32]: scales, and offsets unless all are zero
    bias: Float32s  # [out], zeros for no bias
    num_in: int  # of the layer
    group: int  # inputs that share a scale
    per_group: int  # 2 with offsets, else 1

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
    zero, bias [out]. A group has in / groups inputs; if it is alone, any number."""
    num_out, num_in = codes.shape
    num_groups = scales.shape[1]
    group = -(-num_in // num_groups // 8) * 8 if num_groups == 1 else num_in // num_groups
    rows = -num_out // OUTPUTS * -OUTPUTS - num_out
    padded = functional.pad(codes, (0, group * num_groups - num_in, 0, rows))

    both = torch.stack([scales, offsets] if offsets.numel() else [scales], dim=2).float()
    blocks = functional.pad(both, (0, 0, 0, 0, 0, rows)).unflatten(0, (-1, OUTPUTS))
    return QuantWeight(
        pack_codes(padded, bits),
        blocks.permute(0, 2, 3, 1).contiguous().flatten().numpy(),
        (torch.zeros(num_out) if bias is None else bias.float()).numpy(),
        num_in,
        group,
        both.shape[2],
    )


def quant_linear(x: Tensor, weight: QuantWeight, *, num_workers: int = 1) -> Tensor:
    """x [tokens, in] float32 or bfloat16 on the CPU -> [tokens, out] like x."""
    padding = weight.group * weight.num_groups - weight.num_in
    inputs = functional.pad(x, (0, padding)) if padding else x.contiguous()
    out = torch.empty((len(x), len(weight.bias)), dtype=x.dtype)
    product = _multiply_alone if num_workers == 1 else _multiply
    product(as_array(inputs), weight, as_array(out), num_workers)
    return out


def dequantized(weight: QuantWeight) -> Tensor:
    """Returns the weight as float32 [out, in]."""
    num_in = weight.group * weight.num_groups

    by_block = torch.from_numpy(weight.factors).view(
        -1, weight.num_groups, weight.per_group, OUTPUTS
    )
    factors = by_block.permute(2, 0, 3, 1).flatten(1, 2).repeat_interleave(weight.group, dim=2)
    whole = torch.from_numpy(unpack_codes(weight.codes, num_in)) * factors[0]
    if weight.per_group == 2:
        whole += factors[1]
    return whole[: len(weight.bias), : weight.num_in]


def quant_linear_ref(x: Tensor, weight: QuantWeight) -> Tensor:
    product = x.float() @ dequantized(weight).t() + torch.from_numpy(weight.bias)
    return product.to(x.dtype)


def compile_quant_linear(dtype: torch.dtype, num_workers: int = 1, *, bits: int) -> None:
    """Compiles for this dtype, and either for one worker or for several."""
    floats = numba_type(dtype)
    rows, flat = types.Array(floats, 2, "C"), types.Array(types.float32, 1, "C")
    codes = types.Array(types.int8 if bits == 8 else types.int32, 1, "C")
    product = _multiply_alone if num_workers == 1 else _multiply
    fields = (codes, flat, flat, types.int64, types.int64, types.int64)
    weight = containers.NamedTuple(fields, QuantWeight)
    compile_ahead(product, rows, weight, rows, types.int64)
    codes_product(dtype, bits)


@cache
def codes_product(dtype: torch.dtype, bits: int) -> Callback:
    """Returns the product with a weight of 8 or 4 bits whose inputs are whole
    groups, and inputs of this dtype."""
    like, codes_like = LIKE[dtype], INT8_LIKE if bits == 8 else INT32_LIKE
    per_word = 1 if bits == 8 else CODES_PER_WORD

    def multiply_coded(
        record: int, x: int, num_tokens: int, out: int, worker: int, num_workers: int
    ) -> None:
        layer = array_at(record, (1,), RECORD_LIKE)[0]
        num_in, num_out = layer["num_in"], layer["num_out"]
        num_codes = -(-num_out // OUTPUTS) * OUTPUTS * num_in
        weight = QuantWeight(
            array_at(layer["weight"], (num_codes // per_word,), codes_like),
            array_at(
                layer["factors"], (num_codes // layer["group"] * layer["per_group"],), FLOAT32_LIKE
            ),
            array_at(layer["bias"], (num_out,), FLOAT32_LIKE),
            num_in,
            layer["group"],
            layer["per_group"],
        )
        inputs = array_at(x, (num_tokens, num_in), like)
        wide = array_at(out, (num_tokens, num_out), FLOAT32_LIKE)
        multiply_quantized(inputs, weight, wide, worker, num_workers)

    return compile_product(multiply_coded)


@cached_njit(parallel=True, nogil=True)
def _multiply(x: Floats, weight: QuantWeight, out: Floats, num_workers: int) -> None:
    for worker in prange(num_workers):
        multiply_quantized(x, weight, out, worker, num_workers)


@cached_njit(nogil=True)
def _multiply_alone(x: Floats, weight: QuantWeight, out: Floats, num_workers: int) -> None:
    for worker in range(num_workers):
        multiply_quantized(x, weight, out, worker, num_workers)


@njit(nogil=True)
def multiply_quantized(
    x: Floats, weight: QuantWeight, out: Floats, worker: int, num_workers: int
) -> None:
    """x [tokens, in, padded to whole groups], contiguous -> out [tokens, out], of any floating
    dtype: a worker's share of the outputs, for all rows."""
    first, last = outputs_of(out.shape[1], worker, num_workers)
    num_rows, num_in = x.shape
    if num_rows > MAX_TILE_ROWS:
        weights = np.empty(OUTPUTS * num_in, x.dtype)
        wide = np.empty((min(num_rows, WIDE_ROWS), OUTPUTS), np.float32)
        for output in range(first, last, OUTPUTS):
            _multiply_decoded(x, weight, out, output, weights, wide)
        return
    num_groups = num_in // weight.group if weight.per_group == 2 else 0
    sums = np.empty((num_rows, num_groups), np.float32)
    _sum_groups(x, weight.group, sums)
    tile = np.empty(num_rows * OUTPUTS, np.float32)
    for output in range(first, last, OUTPUTS):
        _multiply_block(x, weight, out, output, sums, tile)


@njit(nogil=True)
def _sum_groups(x: Floats, group: int, sums: Float32s) -> None:
    """Writes the sums of each row's groups to sums [rows, groups]."""
    for row in range(x.shape[0]):
        for number in range(sums.shape[1]):
            total = np.float32(0)
            for i in range(number * group, (number + 1) * group):
                total += widened(x[row, i])
            sums[row, number] = total


@njit(nogil=True, **NO_REFCOUNT)
def _multiply_block(
    x: Floats, weight: QuantWeight, out: Floats, output: int, sums: Float32s, tile: Float32s
) -> None:
    """Computes one block of outputs for at most MAX_TILE_ROWS rows. tile [rows * 32] is scratch."""
    num_rows, num_in = x.shape
    num_groups = num_in // weight.group
    size = min(OUTPUTS, out.shape[1] - output)
    inputs, results, group_sums = x.reshape(-1), out.reshape(-1), sums.reshape(-1)
    tile[:] = 0
    for row in range(num_rows):
        for i in range(size):
            tile[row * OUTPUTS + i] = weight.bias[output + i]
    block, per_row = output // OUTPUTS, sums.shape[1]
    num_factors = num_groups * weight.per_group * OUTPUTS
    factors = weight.factors[block * num_factors : (block + 1) * num_factors]
    size_of_block = len(weight.codes) // (len(weight.factors) // num_factors)
    codes = weight.codes[block * size_of_block : (block + 1) * size_of_block]
    at_once = MOST_AT_ONCE if weight.codes.itemsize == 1 else MOST_OF_4_BITS
    for row in range(0, num_rows, at_once):
        end = min(num_rows, row + at_once)
        rows, added = inputs[row * num_in :], group_sums[row * per_row :]
        target = tile[row * OUTPUTS : end * OUTPUTS]
        if end - row > MOST_OF_4_BITS:
            multiply_codes(rows, codes, factors, added, target, MOST_AT_ONCE)
        elif end - row > 2:
            multiply_codes(rows, codes, factors, added, target, MOST_OF_4_BITS)
        elif end - row == 2:
            multiply_codes(rows, codes, factors, added, target, 2)
        else:
            multiply_codes(rows, codes, factors, added, target, 1)
    for row in range(num_rows):
        start = row * out.shape[1] + output
        narrow(tile[row * OUTPUTS : row * OUTPUTS + size], results[start : start + size])


@njit(nogil=True, **NO_REFCOUNT)
def _multiply_decoded(
    x: Floats, weight: QuantWeight, out: Floats, output: int, weights: Floats, wide: Float32s
) -> None:
    """Computes one block of outputs for any number of rows. weights [in * 32] and wide [rows, 32]
    are scratch."""
    num_rows, num_in = x.shape
    group, num_groups = weight.group, num_in // weight.group
    size = min(OUTPUTS, out.shape[1] - output)
    flat, results = wide.reshape(-1), out.reshape(-1)
    per_group = len(weight.codes) // (len(weight.factors) // (weight.per_group * OUTPUTS))
    factors = flat[: 2 * OUTPUTS]  # scratch
    factors[:] = 0
    for number in range(num_groups):
        at = output // OUTPUTS * num_groups + number
        first = at * weight.per_group * OUTPUTS
        for i in range(weight.per_group * OUTPUTS):
            factors[i] = weight.factors[first + i]
        target = weights[number * group * OUTPUTS : (number + 1) * group * OUTPUTS]
        decode_group(weight.codes[at * per_group : (at + 1) * per_group], factors, target)
    for start in range(0, num_rows, len(wide)):
        rows = min(len(wide), num_rows - start)
        multiply_blocks(x[start : start + rows], weights, NO_BIAS, wide[:rows], 0, OUTPUTS)
        for row in range(rows):
            for i in range(size):
                wide[row, i] += weight.bias[output + i]
            at = (start + row) * out.shape[1] + output
            narrow(wide[row, :size], results[at : at + size])
