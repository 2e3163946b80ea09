"""Products with weights of 8 and 4 bits by dot products of integers.

    y[t, o] = b[o] + sum_g (scales[o, g] sum_s step[t, s] sum_i n[t, i] code[o, i]
                            + offsets[o, g] sum_i x[t, i])

The integers n of the inputs of a span s of a group g are those of quant_rows.py: bytes (BYTE_DOTS:
vpdpbusd of AVX-512 VNNI, or vpmaddubsw), or int16 (vpmaddwd). Sums of integers are exact, and spans
and groups have the same order in every tile, so a row's result is the same in every batch.

Instructions multiply bytes without a sign by bytes with one, and half a byte of a code has no sign.
So codes have their kind's `zero` added, and a sum begins with what that adds, subtracted.

The plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.bf16 import Float32s, Floats, narrow
from aserve_kernels.cpu.gemm import BLOCK_BYTES
from aserve_kernels.cpu.matrix_tiles import PAIR_ROWS
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT32_LIKE, UINT8_LIKE, scratch
from aserve_kernels.cpu.precompile import NO_REFCOUNT
from aserve_kernels.cpu.processor import HAS_AMX_INT8, HAS_VNNI
from aserve_kernels.cpu.quant_codes import (
    Codes,
    Factors,
    QuantWeight,
    factor_values,
    kind_of,
    kind_of_array,
    unpack_codes,
)
from aserve_kernels.cpu.quant_matrices import Bytes, multiply_pairs, scratch_size
from aserve_kernels.cpu.quant_rows import INTEGERS_LIKE, Integers, RoundedRows, round_row, rows_from
from aserve_kernels.cpu.quant_tiles import INTEGERS_PER_WORD, DotEmitter, ProductSizes
from aserve_kernels.cpu.simd import (
    FLOAT16X16,
    FLOAT32X16,
    INDEX,
    INT8X16,
    INT32X16,
    LANES,
    Intrinsic,
)
from aserve_kernels.cpu.tiles import HALF_WORD, OUTPUTS, WORD, minimum, outputs_of

TILE_ROWS = 8 if HAS_VNNI else 4  # that pass over the codes together
UNIT_ROWS = PAIR_ROWS if HAS_AMX_INT8 else TILE_ROWS  # of which a block of rows has a multiple


@njit(nogil=True)
def multiply_by_dots(
    x: Floats, weight: QuantWeight, out: Floats, worker: int, num_workers: int
) -> None:
    """x [tokens, in, padded to whole groups], contiguous -> out [tokens, out], contiguous, of any
    floating dtype: a worker's share of the outputs, for all rows."""
    first, last = outputs_of(out.shape[1], worker, num_workers)
    num_whole = last // OUTPUTS * OUTPUTS
    num_rows, num_in = x.shape
    num_groups = num_in // weight.group
    longest, zero = span_and_zero(weight.codes)
    span = min(longest, weight.group)
    num_spans = num_groups * -(-weight.group // span)
    like = integers_like(weight.codes)
    # PERF: the rows that pass over the weights together stay in the L2 cache.
    most = max(UNIT_ROWS, BLOCK_BYTES // (num_in * like.itemsize) // UNIT_ROWS * UNIT_ROWS)
    most = min(most, max(1, num_rows))
    integers = scratch((most, num_in), like)
    zeros = scratch((most, num_spans), INT32_LIKE)
    steps = scratch((most, num_spans), FLOAT32_LIKE)
    sums = scratch((most, num_groups), FLOAT32_LIKE)
    bytes_ = scratch((scratch_size(weight.codes, min(most, num_rows), num_in),), UINT8_LIKE)
    tail, tail_bias = scratch((most, OUTPUTS), out), scratch((OUTPUTS,), FLOAT32_LIKE)
    tail_bias[:] = np.float32(0)
    tail_bias[: last - num_whole] = weight.bias[num_whole:last]
    for start in range(0, num_rows, most):
        num = min(most, num_rows - start)
        rows = RoundedRows(integers[:num], zeros[:num], steps[:num], sums[:num], weight.group, span)
        for row in range(num):
            round_row(x[start + row], zero, weight.unit, rows, row)
        for output in range(first, num_whole, OUTPUTS):
            bias = weight.bias[output : output + OUTPUTS]
            _multiply_block(rows, weight, bias, output, bytes_, out[start:], output)
        if num_whole < last:
            _multiply_block(rows, weight, tail_bias, num_whole, bytes_, tail, 0)
            out[start : start + num, num_whole:last] = tail[:num, : last - num_whole]


@njit(nogil=True, **NO_REFCOUNT)
def _multiply_block(
    rows: RoundedRows,
    weight: QuantWeight,
    bias: Float32s,
    output: int,
    bytes_: Bytes,
    out: Floats,
    column: int,
) -> None:
    """Computes one block of outputs, from number `output` on, which is written to `out`
    [rows, any], from `column` on. bias [OUTPUTS]; `bytes_` is scratch of `multiply_pairs`."""
    num_rows, num_groups = rows.sums.shape
    num_factors = num_groups * weight.per_group * OUTPUTS
    block = output // OUTPUTS
    factors = weight.factors[block * num_factors : (block + 1) * num_factors]
    size_of_block = len(weight.codes) // (len(weight.factors) // num_factors)
    codes = weight.codes[block * size_of_block : (block + 1) * size_of_block]
    weights, stride, outputs = (codes, factors, bias), out.shape[1], out.reshape(-1)
    num_done = multiply_pairs(rows, weights, bytes_, outputs[column:], stride)
    for row in range(num_done, num_rows, TILE_ROWS):
        own = rows_from(rows, row)
        target, rest = outputs[row * stride + column :], num_rows - row
        if rest > 4:
            multiply_integers(own, weights, target, stride, TILE_ROWS)
        elif rest > 2:
            multiply_integers(own, weights, target, stride, 4)
        elif rest == 2:
            multiply_integers(own, weights, target, stride, 2)
        else:
            multiply_integers(own, weights, target, stride, 1)


def integers_like(codes: Codes) -> Integers:
    """Returns the array that stands for the integers which are multiplied by `codes`."""
    return INTEGERS_LIKE[kind_of(codes.dtype)]


def span_and_zero(codes: Codes) -> tuple[int, np.float32]:
    """Returns the longest span of inputs, and what is added to `codes`."""
    kind = kind_of(codes.dtype)
    return kind.span, np.float32(kind.zero)


def multiply_integers(
    rows: RoundedRows,
    weights: tuple[Codes, Factors, Float32s],
    out: Floats,
    stride: int,
    size: int,
) -> None:
    """Computes the products of the first 1 to `size` rows with a block of outputs, plus bias.

    `weights` are of the block: the codes [n], the scales and offsets
    [groups * 1 or 2 * OUTPUTS], and the bias [OUTPUTS]. Row r of the result is
    out[r * stride : r * stride + OUTPUTS], which is rounded if `out` is bfloat16. `size` is a
    literal.
    """
    integers, _, steps, sums, group, span = rows
    codes, factors, bias = weights
    inputs = np.arange(integers.shape[1])
    spans = inputs // group * -(-group // span) + inputs % group // span
    by_group = factor_values(factors).reshape(sums.shape[1], -1, OUTPUTS)
    scaled = by_group[inputs // group, 0] * unpack_codes(codes, len(inputs)).T
    for row in range(min(size, len(integers))):
        product = integers[row] * steps[row, spans] @ scaled + bias
        product += sums[row] @ by_group[:, 1:].sum(axis=1)
        narrow(product.astype(np.float32), out[row * stride : row * stride + OUTPUTS])


@intrinsic(prefer_literal=True)
def _multiply_integers(
    typing: Any, rows: Any, weights: Any, out: Any, stride: Any, size: Any
) -> Intrinsic | None:
    if not isinstance(size, types.IntegerLiteral):
        return None
    kinds = (*rows.types[:4], *weights.types, out)
    kind, has_exponents = kind_of_array(weights.types[0]), weights.types[1].dtype == types.uint8

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *of_rows, width, span = cgutils.unpack_tuple(builder, args[0])
        values = [*of_rows, *cgutils.unpack_tuple(builder, args[1]), args[2]]
        arrays = [
            context.make_array(array)(context, builder, value)
            for array, value in zip(kinds, values, strict=True)
        ]
        element = HALF_WORD if out.dtype == types.uint16 else ir.FloatType()
        scalar = ir.FloatType()
        of_factors = INT8X16 if has_exponents else FLOAT16X16
        vectors = (WORD, WORD, scalar, scalar, INT32X16, of_factors, FLOAT32X16, element)
        *of_inputs, codes, factors, bias, target = (
            builder.bitcast(array.data, vector.as_pointer())
            for array, vector in zip(arrays, vectors, strict=True)
        )
        (num_rows, num_in), _, (_, num_spans), (_, num_groups) = (
            cgutils.unpack_tuple(builder, array.shape) for array in arrays[:4]
        )
        num_factors = builder.udiv(arrays[5].nitems, INDEX(LANES))
        per_group = [builder.udiv(count, num_groups) for count in (num_spans, num_factors)]
        if kind.group is not None:  # PERF: LLVM unrolls the loops over what it knows
            width, span, per_group[0] = INDEX(kind.group), INDEX(kind.group), INDEX(1)
        sizes = ProductSizes(num_groups, width, span, *per_group)
        words = builder.udiv(num_in, INDEX(INTEGERS_PER_WORD[kind]))
        dots = DotEmitter(builder, kind, size.literal_value, has_exponents=has_exponents)
        places = [*of_inputs, target]
        per_row = [words, num_spans, num_spans, num_groups, args[3]]
        # Missing rows repeat the last one: it is computed and stored again.
        last = builder.sub(num_rows, INDEX(1))
        numbers = [minimum(builder, INDEX(row), last) for row in range(size.literal_value)]
        own = [dots.row(number, places, per_row, bias) for number in numbers]
        with cgutils.for_range(builder, num_groups, intp=INDEX) as loop:
            dots.add_group(own, codes, factors, sizes, loop.index)
        for row in own:
            dots.store(row.totals, row.target)
        return context.get_dummy_value()

    return types.void(rows, weights, out, types.intp, size), emit


@overload(integers_like, strict=False)
def _overload_integers_like(codes: Any) -> Callable[[Codes], Integers]:
    like = INTEGERS_LIKE[kind_of_array(codes)]
    return lambda codes: like


@overload(span_and_zero, strict=False)
def _overload_span_and_zero(codes: Any) -> Callable[[Codes], tuple[int, np.float32]]:
    kind = kind_of_array(codes)
    span, zero = kind.span, np.float32(kind.zero)
    return lambda codes: (span, zero)


@overload(multiply_integers, strict=False, prefer_literal=True)
def _overload_multiply_integers(
    rows: Any, weights: Any, out: Any, stride: Any, size: Any
) -> Callable[..., None]:
    return lambda rows, weights, out, stride, size: _multiply_integers(
        rows, weights, out, stride, size
    )
