"""Rows of inputs as integers, for dot products with codes (quant_dots.py).

    x[i] = step[s] n[i],  n[i] = sum_d base^(D - 1 - d) digit[d, i]

A row of bfloat16 has D = 2 digits of a byte, and one of float32 has 3, where the processor
multiplies bytes; else one of 16 bits. A span s of at most SPAN inputs of a group has a step of its
own: its largest magnitude over the largest integer. So an input is off by at most 2^-16 (of 3
bytes: 2^-24) of the largest one of its span: far less than its weights were rounded off.

PERF: LLVM's own vectors take twice as long: 1.5 us for 1,024 inputs of a row, and 0.7 so, of which
products with 512 outputs took a tenth.

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
from aserve_kernels.cpu.simd import HAS_BYTE_DOTS, INDEX, Intrinsic

Integers: TypeAlias = npt.NDArray[np.int8 | np.int16]
Int32s: TypeAlias = npt.NDArray[np.int32]

SPAN = 128  # inputs that share a step, or fewer at the end of a group
DIGIT: type[np.int8 | np.int16] = np.int8 if HAS_BYTE_DOTS else np.int16
DIGIT_BITS = 8 * np.dtype(DIGIT).itemsize
# Of bfloat16 and float32: the digits, and the largest integer, whose highest digit is the greatest.
BF16_DIGITS, FLOAT32_DIGITS = (2, 3) if HAS_BYTE_DOTS else (1, 1)
LARGEST_OF_BF16, LARGEST_OF_FLOAT32 = (
    np.float32(np.iinfo(DIGIT).max * 2.0 ** (DIGIT_BITS * (num - 1)))
    for num in (BF16_DIGITS, FLOAT32_DIGITS)
)
LEAST = np.float32(2.0**-100)  # a span whose largest magnitude is below is zero
INFINITY_BITS = np.int32(0x7F800000)
PART = 8  # inputs; a group has whole parts
WORDS, FLOATS = ir.VectorType(ir.IntType(32), PART), ir.VectorType(ir.FloatType(), PART)


class Digits(NamedTuple):
    """Rows of inputs as integers."""

    digits: Integers  # [rows, digits, in], the highest first
    zeros: Int32s  # [rows, spans, digits]: what the zeros of the codes add to a sum, negated
    steps: Float32s  # [rows, spans]
    sums: Float32s  # [rows, spans], of the inputs
    group: int  # inputs


@njit(inline="always")
def spans_of(group: int) -> int:
    """Returns how many spans a group has."""
    return -(-group // SPAN)


@njit(nogil=True, error_model="numpy", **NO_REFCOUNT)
def round_row(x: Floats, zero: np.int32, rows: Digits, row: int, added: Int32s) -> None:
    """Writes a row x [in] as integers. `zero` is added to the codes; added [digits] is scratch. The
    step of a span is NaN where an input is not finite."""
    num_digits, num_in = rows.digits.shape[1:]
    most = LARGEST_OF_BF16 if x.itemsize == 2 else LARGEST_OF_FLOAT32
    digits, number = rows.digits.reshape(-1)[row * num_digits * num_in :], 0
    for start in range(0, num_in, rows.group):
        for first in range(start, start + rows.group, SPAN):
            span = x[first : first + min(SPAN, start + rows.group - first)]
            bits = np.int32(largest_bits(span))
            largest, factor = bits.view(np.float32), np.float32(0)
            if bits < INFINITY_BITS and largest >= LEAST:
                factor = most / largest
            step = largest / most if bits < INFINITY_BITS else np.float32(np.nan)
            write_digits(span, factor, digits[first:], num_in, added)
            total = np.float32(0)
            for digit in range(num_digits):
                rows.zeros[row, number, digit] = -zero * added[digit]
                total = total * np.float32(1 << DIGIT_BITS) + np.float32(added[digit])
            rows.steps[row, number], rows.sums[row, number] = step, step * total
            number += 1


def largest_bits(x: Floats) -> int:
    """Returns the bits, as float32, of the largest magnitude of x [n]: whole parts."""
    wide = np.empty(len(x), np.float32)
    widen(x, wide)
    return int((wide.view(np.int32) & 0x7FFFFFFF).max())


def write_digits(
    x: Floats, factor: np.float32, digits: Integers, stride: int, added: Int32s
) -> None:
    """Rounds x [n] times a factor to integers, n being whole parts, or writes zeros if that is
    zero. Digit d of input i is digits[d * stride + i], and added[d] becomes the sum of these."""
    wide = np.empty(len(x), np.float32)
    widen(x, wide)
    scaled = wide * factor if factor else np.zeros_like(wide)
    rest = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int32)
    for digit in range(len(added) - 1, -1, -1):
        lowest = rest.astype(DIGIT)
        digits[digit * stride : digit * stride + len(x)] = lowest
        added[digit] = lowest.sum()
        rest = (rest - lowest.astype(np.int32)) >> DIGIT_BITS


class _Parts:
    """Emits the loads of x [n], part by part."""

    def __init__(self, context: Any, builder: Any, kind: Any, x: Any) -> None:
        array = context.make_array(kind)(context, builder, x)
        self._builder = builder
        self._is_narrow = kind.dtype == types.uint16
        self._element = ir.IntType(16 if self._is_narrow else 32)
        self._data = builder.bitcast(array.data, self._element.as_pointer())
        self.num_parts = builder.udiv(array.nitems, INDEX(PART))

    def bits(self, part: Any) -> Any:
        """Returns a part as the bits of float32."""
        builder = self._builder
        kind = ir.VectorType(self._element, PART)
        start = builder.gep(self._data, [builder.mul(part, INDEX(PART))])
        loaded = builder.load(builder.bitcast(start, kind.as_pointer()), align=2)
        if self._is_narrow:
            return builder.shl(builder.zext(loaded, WORDS), _words(16))
        return loaded

    def call(self, name: str, *args: Any, result: ir.Type) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self._builder.call(
            cgutils.get_or_insert_function(self._builder.module, kind, name), args
        )

    def splat(self, value: Any) -> Any:
        undefined = ir.Constant(ir.VectorType(value.type, PART), ir.Undefined)
        first = self._builder.insert_element(undefined, value, ir.IntType(32)(0))
        return self._builder.shuffle_vector(first, undefined, _words(0))


def _words(value: int) -> Any:
    return ir.Constant(WORDS, [value] * PART)


@intrinsic
def _largest_bits(typing: Any, x: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = _Parts(context, builder, x, args[0])
        largest = cgutils.alloca_once_value(builder, _words(0))
        with cgutils.for_range(builder, parts.num_parts, intp=INDEX) as loop:
            magnitude = builder.and_(parts.bits(loop.index), _words(0x7FFFFFFF))
            before = builder.load(largest)
            is_larger = builder.icmp_signed(">", magnitude, before)
            builder.store(builder.select(is_larger, magnitude, before), largest)
        name = f"llvm.vector.reduce.smax.v{PART}i32"
        return parts.call(name, builder.load(largest), result=ir.IntType(32))

    return types.int32(x), emit


@intrinsic
def _write_digits(
    typing: Any, x: Any, factor: Any, digits: Any, stride: Any, added: Any
) -> Intrinsic:
    num_digits = BF16_DIGITS if x.dtype == types.uint16 else FLOAT32_DIGITS

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = _Parts(context, builder, x, args[0])
        target = context.make_array(digits)(context, builder, args[2]).data
        sums = context.make_array(added)(context, builder, args[4]).data
        part_of_digits = ir.VectorType(ir.IntType(DIGIT_BITS), PART)
        totals = [cgutils.alloca_once_value(builder, _words(0)) for _ in range(num_digits)]
        factors = parts.splat(args[1])
        is_zero = builder.fcmp_ordered("==", args[1], ir.FloatType()(0.0))
        kept = parts.splat(builder.select(is_zero, ir.IntType(32)(0), ir.IntType(32)(-1)))
        with cgutils.for_range(builder, parts.num_parts, intp=INDEX) as loop:
            # Infinities and NaN, whose factor is zero, are replaced first.
            bits = builder.and_(parts.bits(loop.index), kept)
            scaled = builder.fmul(builder.bitcast(bits, FLOATS), factors)
            half = ir.Constant(FLOATS, [0.5] * PART)
            away = parts.call(f"llvm.copysign.v{PART}f32", half, scaled, result=FLOATS)
            rest = builder.fptosi(builder.fadd(scaled, away), WORDS)
            start = builder.gep(target, [builder.mul(loop.index, INDEX(PART))])
            for digit in range(num_digits - 1, -1, -1):
                lowest = builder.trunc(rest, part_of_digits)
                place = builder.gep(start, [builder.mul(args[3], INDEX(digit))])
                builder.store(lowest, builder.bitcast(place, part_of_digits.as_pointer()), align=1)
                wide = builder.sext(lowest, WORDS)
                builder.store(builder.add(builder.load(totals[digit]), wide), totals[digit])
                rest = builder.ashr(builder.sub(rest, wide), _words(DIGIT_BITS))
        for digit, total in enumerate(totals):
            name = f"llvm.vector.reduce.add.v{PART}i32"
            whole = parts.call(name, builder.load(total), result=ir.IntType(32))
            builder.store(whole, builder.gep(sums, [INDEX(digit)]))
        return context.get_dummy_value()

    return types.void(x, types.float32, digits, types.intp, added), emit


@overload(largest_bits, strict=False)
def _overload_largest_bits(x: Any) -> Callable[[Floats], int]:
    return lambda x: _largest_bits(x)


@overload(write_digits, strict=False)
def _overload_write_digits(
    x: Any, factor: Any, digits: Any, stride: Any, added: Any
) -> Callable[..., None]:
    return lambda x, factor, digits, stride, added: _write_digits(x, factor, digits, stride, added)
