"""Rows of inputs as integers, for dot products with codes (quant_dots.py).

    x[i] = step[s] n[i]

An integer n has 8 bits where the processor multiplies these by the codes (BYTE_DOTS), else 16. A
span s of inputs has a step of its own: its largest magnitude over the largest integer. So an input
is off by at most half of that step.

The plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.bf16 import Float32s, Floats, widen
from aserve_kernels.cpu.precompile import NO_REFCOUNT
from aserve_kernels.cpu.quant_codes import KINDS, CodeKind
from aserve_kernels.cpu.simd import (
    INDEX,
    INT32X16,
    LANES,
    LANES_TYPE,
    Intrinsic,
    Lanes,
    address_of,
    emit_call,
    fma,
    load,
    reduce_sum,
    splat,
    zeros,
)

Integers: TypeAlias = npt.NDArray[np.int8 | np.int16]
Int32s: TypeAlias = npt.NDArray[np.int32]

# Arrays that stand for the type of the integers.
INTEGERS_LIKE: dict[CodeKind, Integers] = {
    kind: np.empty(0, np.int8 if kind.has_byte_dots else np.int16) for kind in KINDS
}
LEAST = np.float32(2.0**-100)  # a span whose largest magnitude is below is zero
INFINITY_BITS = np.int32(0x7F800000)
# A float32 of 1.5 * 2^23 + n has n in its lowest bits, rounded to the nearest, ties to even.
ROUNDER = np.float32(1.5 * 2**23)


class RoundedRows(NamedTuple):
    """Rows of inputs as integers."""

    integers: Integers  # [rows, in]
    zeros: Int32s  # [rows, spans]: what the zeros of the codes add to a sum, negated
    steps: Float32s  # [rows, spans], times the unit of the weight's factors
    sums: Float32s  # [rows, groups], of the inputs, times that unit
    group: int  # inputs
    span: int  # inputs, at most a group


@njit(inline="always")
def rows_from(rows: RoundedRows, first: int) -> RoundedRows:
    """Returns the rows from number `first` on."""
    return RoundedRows(
        rows.integers[first:],
        rows.zeros[first:],
        rows.steps[first:],
        rows.sums[first:],
        rows.group,
        rows.span,
    )


@njit(nogil=True, error_model="numpy", **NO_REFCOUNT)
def round_row(x: Floats, zero: np.float32, unit: np.float32, rows: RoundedRows, row: int) -> None:
    """Writes a row x [in] as integers. `zero` is added to the codes, and `unit` is that of the
    factors. Groups are multiples of LANES. The step of a span is NaN where an input is not finite.
    """
    integers, sums = rows.integers[row], rows.sums[row]
    largest_integer = np.float32(np.iinfo(integers.dtype).max)
    of_zeros, steps = rows.zeros[row], rows.steps[row]
    number = 0
    for group in range(len(sums)):
        start, sums[group] = group * rows.group, np.float32(0)
        for first in range(start, start + rows.group, rows.span):
            size = min(rows.span, start + rows.group - first)
            bits = np.int32(largest_bits(x, first, size))
            largest, factor = bits.view(np.float32), np.float32(0)
            if bits < INFINITY_BITS and largest >= LEAST:
                factor = largest_integer / largest
            step = largest / largest_integer if bits < INFINITY_BITS else np.float32(np.nan)
            factors, sum_of_lanes = splat(factor), zeros()
            for i in range(first, first + size, LANES):
                # Of infinities and NaN it has any bits: then the step is NaN.
                shifted = fma(splat(ROUNDER), load(x, i), factors)
                store_lowest_bits(shifted, integers, i)
                whole = fma(shifted, splat(ROUNDER), splat(np.float32(-1)))
                sum_of_lanes = fma(sum_of_lanes, whole, splat(np.float32(1)))
            sum_of_span = reduce_sum(sum_of_lanes)
            step *= unit
            of_zeros[number], steps[number] = np.int32(-zero * sum_of_span), step
            sums[group] += step * sum_of_span
            number += 1


def largest_bits(x: Floats, start: int, size: int) -> int:
    """Returns the bits, as float32, of the largest magnitude of x[start : start + size], whose size
    is a multiple of LANES. Those of NaN count as larger than all others."""
    wide = np.empty(size, np.float32)
    widen(x[start : start + size], wide)
    return int((wide.view(np.int32) & 0x7FFFFFFF).max())


def store_lowest_bits(lanes: Lanes, integers: Integers, start: int) -> None:
    """Stores the lowest bits of each lane, as many as an integer has."""
    integers[start : start + LANES] = lanes.view(np.int32).astype(integers.dtype)


@intrinsic
def _largest_bits(typing: Any, x: Any, start: Any, size: Any) -> Intrinsic:
    bits = 16 if x.dtype == types.uint16 else 32
    vector = ir.VectorType(ir.IntType(bits), LANES)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = address_of(context, builder, x, args[0], args[1], vector)
        largest = cgutils.alloca_once_value(builder, ir.Constant(vector, None))
        mask = ir.Constant(vector, [(1 << bits - 1) - 1] * LANES)
        with cgutils.for_range(builder, builder.udiv(args[2], INDEX(LANES)), intp=INDEX) as loop:
            part = builder.load(builder.gep(first, [loop.index]), align=bits // 8)
            magnitude, before = builder.and_(part, mask), builder.load(largest)
            is_larger = builder.icmp_signed(">", magnitude, before)
            builder.store(builder.select(is_larger, magnitude, before), largest)
        name = f"llvm.vector.reduce.umax.v{LANES}i{bits}"
        whole = emit_call(builder, name, builder.load(largest), result=vector.element)
        if bits == 32:
            return whole
        return builder.shl(builder.zext(whole, ir.IntType(32)), ir.IntType(32)(16))

    return types.int32(x, types.intp, types.intp), emit


@intrinsic
def _store_lowest_bits(typing: Any, lanes: Any, integers: Any, start: Any) -> Intrinsic:
    vector = ir.VectorType(ir.IntType(integers.dtype.bitwidth), LANES)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = address_of(context, builder, integers, args[1], args[2], vector)
        lowest = builder.trunc(builder.bitcast(args[0], INT32X16), vector)
        builder.store(lowest, place, align=1)
        return context.get_dummy_value()

    return types.void(LANES_TYPE, integers, types.intp), emit


@overload(largest_bits, strict=False)
def _overload_largest_bits(x: Any, start: Any, size: Any) -> Callable[[Floats, int, int], int]:
    return lambda x, start, size: _largest_bits(x, start, size)


@overload(store_lowest_bits, inline="always", strict=False)
def _overload_store_lowest_bits(
    lanes: Any, integers: Any, start: Any
) -> Callable[[Lanes, Integers, int], None]:
    return lambda lanes, integers, start: _store_lowest_bits(lanes, integers, start)
