"""Products of integers by the matrix instructions of AMX: 32 rows times a block of outputs.

They are what the tiles of quant_tiles.py compute, to the bit: sums of integers are exact, and spans
and groups are added in the same order. A packed block of codes of 8 bits is what TDPBSUD takes as
its second operand: 4 inputs of each of 16 outputs, in bytes without a sign. Codes of 4 bits become
such bytes first, once for all rows that pass over them.

The plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.bf16 import Float32s, Floats
from aserve_kernels.cpu.matrix_tiles import (
    INPUTS,
    MATRIX_ROWS,
    PAIR_ROWS,
    ROW_BYTES,
    WEIGHTS,
    configure_tiles,
    emit_tile_call,
    release_tiles,
    sums_register,
)
from aserve_kernels.cpu.precompile import NO_REFCOUNT
from aserve_kernels.cpu.processor import HAS_AMX_INT8
from aserve_kernels.cpu.quant_codes import INT8, Codes, Factors, kind_of_array
from aserve_kernels.cpu.quant_rows import RoundedRows, rows_from
from aserve_kernels.cpu.quant_tiles import DotEmitter, ProductSizes, TileRow
from aserve_kernels.cpu.simd import (
    BYTE,
    FLOAT16X16,
    FLOAT32X16,
    INDEX,
    INT8X16,
    INT8X64,
    INT32X16,
    LANES,
    Intrinsic,
    emit_splat,
)
from aserve_kernels.cpu.tiles import HALF_WORD, OUTPUTS, VECTORS, WORD, minimum

Bytes: TypeAlias = npt.NDArray[np.uint8]

LEAST_STEP = 32  # inputs: a step has as many, or twice as many where these fill a span
INPUT_BYTES = OUTPUTS  # of the codes of one input
# PERF: of which a row's sums of a group stay in registers.
SPANS_AT_ONCE = 4


def multiply_pairs(
    rows: RoundedRows,
    weights: tuple[Codes, Factors, Float32s],
    scratch_: Bytes,
    out: Floats,
    stride: int,
) -> int:
    """Does what `quant_dots.multiply_integers` does for as many of the rows as there are in whole
    32s, and returns how many these are: none on other machines, and where spans fill no steps.
    `scratch_` has `scratch_size` bytes."""
    return 0


def scratch_size(codes: Codes, num_rows: int, num_in: int) -> int:
    """Returns how many bytes `multiply_pairs` needs for so many rows, those of one block."""
    return 0


@njit(inline="always")
def _num_in_pairs(rows: RoundedRows) -> int:
    """Returns how many of the rows `multiply_pairs` multiplies."""
    fills_steps = rows.group % rows.span == 0 and rows.span % LEAST_STEP == 0
    return len(rows.integers) // PAIR_ROWS * PAIR_ROWS if fills_steps else 0


@njit(nogil=True, **NO_REFCOUNT)
def _multiply_bytes(
    rows: RoundedRows,
    weights: tuple[Codes | Bytes, Factors, Float32s],
    out: Floats,
    stride: int,
) -> int:
    num_rows = _num_in_pairs(rows)
    if num_rows == 0:
        return 0
    configure_tiles(PAIR_ROWS, LEAST_STEP if rows.span % ROW_BYTES else ROW_BYTES)
    for row in range(0, num_rows, PAIR_ROWS):
        own = rows_from(rows, row)
        _multiply_pair(own, weights, out[row * stride :], stride)
    release_tiles()
    return num_rows


@njit(nogil=True, **NO_REFCOUNT)
def _multiply_words(
    rows: RoundedRows,
    weights: tuple[Codes, Factors, Float32s],
    scratch_: Bytes,
    out: Floats,
    stride: int,
) -> int:
    if _num_in_pairs(rows) == 0:
        return 0
    _expand(weights[0], scratch_)
    num_done: int = _multiply_bytes(rows, (scratch_, weights[1], weights[2]), out, stride)
    return num_done


@intrinsic
def _expand(typing: Any, codes: Any, target: Any) -> Intrinsic:
    """Writes codes of 4 bits as bytes, with their zero added."""
    kind = kind_of_array(codes)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays = [
            context.make_array(array)(context, builder, value)
            for array, value in zip((codes, target), args, strict=True)
        ]
        source = builder.bitcast(arrays[0].data, INT32X16.as_pointer())
        bytes_ = builder.bitcast(arrays[1].data, INT8X64.as_pointer())
        dots = DotEmitter(builder, kind, 1, has_exponents=False)
        num_steps = builder.udiv(arrays[0].nitems, INDEX(OUTPUTS))
        with cgutils.for_range(builder, num_steps, intp=INDEX) as loop:
            start = builder.gep(source, [builder.mul(loop.index, INDEX(VECTORS))])
            operands = [vector for word in dots.operands(start) for vector in word]
            first = builder.mul(loop.index, INDEX(len(operands)))
            for number, vector in enumerate(operands):
                place = builder.gep(bytes_, [builder.add(first, INDEX(number))])
                builder.store(builder.bitcast(vector, INT8X64), place, align=1)
        return context.get_dummy_value()

    return types.void(codes, target), emit


@intrinsic
def _multiply_pair(typing: Any, rows: Any, weights: Any, out: Any, stride: Any) -> Intrinsic:
    kinds = (*rows.types[:4], *weights.types, out)
    has_exponents = weights.types[1].dtype == types.uint8

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *of_rows, group, span = cgutils.unpack_tuple(builder, args[0])
        values = [*of_rows, *cgutils.unpack_tuple(builder, args[1]), args[2]]
        arrays = [
            context.make_array(array)(context, builder, value)
            for array, value in zip(kinds, values, strict=True)
        ]
        element = HALF_WORD if out.dtype == types.uint16 else ir.FloatType()
        scalar, of_factors = ir.FloatType(), INT8X16 if has_exponents else FLOAT16X16
        vectors = (BYTE, WORD, scalar, scalar, BYTE, of_factors, FLOAT32X16, element)
        pointers = [
            builder.bitcast(array.data, vector.as_pointer())
            for array, vector in zip(arrays, vectors, strict=True)
        ]
        (_, num_in), _, (_, num_spans), (_, num_groups) = (
            cgutils.unpack_tuple(builder, array.shape) for array in arrays[:4]
        )
        num_factors = builder.udiv(arrays[5].nitems, INDEX(LANES))
        per_group = (builder.udiv(count, num_groups) for count in (num_spans, num_factors))
        sizes = ProductSizes(num_groups, group, span, *per_group)
        pair = _Pair(builder, sizes, (num_in, num_spans), has_exponents=has_exponents)
        pair.multiply(pointers, args[3])
        return context.get_dummy_value()

    return types.void(rows, weights, out, types.intp), emit


class _Pair:
    """Emits the product. The sums of a row are in memory, two vectors each: of some spans,
    integers; of a group; and the totals."""

    __slots__ = ("_builder", "_dots", "_of_group", "_of_spans", "_sizes", "_totals", "_widths")

    def __init__(
        self, builder: Any, sizes: ProductSizes, widths: tuple[Any, Any], *, has_exponents: bool
    ) -> None:
        """`widths` are the inputs and the spans of a row."""
        self._builder, self._sizes, self._widths = builder, sizes, widths
        self._dots = DotEmitter(builder, INT8, 1, has_exponents=has_exponents)
        with builder.goto_entry_block():
            self._of_spans, self._of_group, self._totals = (
                builder.alloca(vector, size=num * PAIR_ROWS * VECTORS)
                for vector, num in ((INT32X16, SPANS_AT_ONCE), (FLOAT32X16, 1), (FLOAT32X16, 1))
            )

    def multiply(self, pointers: list[Any], stride: Any) -> None:
        builder, sizes = self._builder, self._sizes
        integers, zeros, steps, sums, codes, factors, bias, out = pointers
        with self._each_row() as row:
            for number, place in enumerate(self._vectors(self._totals, row)):
                builder.store(builder.load(builder.gep(bias, [INDEX(number)]), align=4), place)
        with cgutils.for_range(builder, sizes.num_groups, intp=INDEX) as group:
            with self._each_row() as row:
                for place in self._vectors(self._of_group, row):
                    builder.store(ir.Constant(FLOAT32X16, None), place)
            spans_before = builder.mul(group.index, sizes.per_group)
            num_parts = builder.udiv(
                builder.add(sizes.per_group, INDEX(SPANS_AT_ONCE - 1)), INDEX(SPANS_AT_ONCE)
            )
            with cgutils.for_range(builder, num_parts, intp=INDEX) as part:
                begin = builder.mul(part.index, INDEX(SPANS_AT_ONCE))
                left = builder.sub(sizes.per_group, begin)
                count = minimum(builder, INDEX(SPANS_AT_ONCE), left)
                first = builder.add(spans_before, begin)
                with cgutils.for_range(builder, count, intp=INDEX) as loop:
                    start = builder.mul(builder.add(first, loop.index), sizes.span)
                    self._add_span(integers, codes, start, loop.index)
                with self._each_row() as row:
                    self._scale_spans(row, zeros, steps, first, count)
            own = builder.gep(factors, [builder.mul(group.index, sizes.num_factors)])
            with self._each_row() as row:
                at = builder.add(builder.mul(row, sizes.num_groups), group.index)
                self._dots.end_group(self._row(row), own, builder.gep(sums, [at]), sizes)
        with self._each_row() as row:
            target = builder.gep(out, [builder.mul(row, stride)])
            self._dots.store(self._vectors(self._totals, row), target)

    def _add_span(self, integers: Any, codes: Any, start: Any, number: Any) -> None:
        """Computes the sums of a span, whose first input is number `start`. They are the memory's
        of this number."""
        builder, num_in = self._builder, self._widths[0]
        pairs = [(row, column) for row in (0, 1) for column in (0, 1)]
        for row, column in pairs:
            emit_tile_call(builder, "tilezero", sums_register(row, column))
        is_short = builder.icmp_unsigned(
            "!=", builder.urem(self._sizes.span, INDEX(ROW_BYTES)), INDEX(0)
        )
        width = builder.select(is_short, INDEX(LEAST_STEP), INDEX(ROW_BYTES))
        num_steps = builder.udiv(self._sizes.span, width)
        with cgutils.for_range(builder, num_steps, intp=INDEX) as loop:
            first = builder.add(start, builder.mul(loop.index, width))
            own = builder.gep(codes, [builder.mul(first, INDEX(INPUT_BYTES))])
            for column in (0, 1):
                place = builder.gep(own, [INDEX(ROW_BYTES * column)])
                stride = INDEX(VECTORS * ROW_BYTES)
                emit_tile_call(builder, "tileloadd64", WEIGHTS + column, place, stride)
            for row in (0, 1):
                offset = builder.add(first, builder.mul(num_in, INDEX(MATRIX_ROWS * row)))
                place = builder.gep(integers, [offset])
                emit_tile_call(builder, "tileloadd64", INPUTS + row, place, num_in)
            for row, column in pairs:
                operands = (sums_register(row, column), INPUTS + row, WEIGHTS + column)
                emit_tile_call(builder, "tdpbsud", *operands)
        own = builder.gep(self._of_spans, [builder.mul(number, INDEX(PAIR_ROWS * VECTORS))])
        sums = builder.bitcast(own, BYTE.as_pointer())
        stride = VECTORS * ROW_BYTES
        for row, column in pairs:
            place = builder.gep(sums, [INDEX(MATRIX_ROWS * row * stride + ROW_BYTES * column)])
            operands = (sums_register(row, column), place, INDEX(stride))
            emit_tile_call(builder, "tilestored64", *operands)

    def _scale_spans(self, row: Any, zeros: Any, steps: Any, first: Any, count: Any) -> None:
        """Adds the sums of spans, in floating point, to those of the group."""
        builder, dots = self._builder, self._dots
        places = self._vectors(self._of_group, row)
        totals = [cgutils.alloca_once_value(builder, builder.load(place)) for place in places]
        before = builder.add(builder.mul(row, self._widths[1]), first)
        with cgutils.for_range(builder, count, intp=INDEX) as loop:
            at = builder.add(before, loop.index)
            zero, step = (builder.load(builder.gep(array, [at])) for array in (zeros, steps))
            own = builder.add(row, builder.mul(loop.index, INDEX(PAIR_ROWS)))
            for place, total in zip(self._vectors(self._of_spans, own), totals, strict=True):
                sums = builder.add(emit_splat(builder, zero), builder.load(place))
                dots.add_scaled(sums, step, total)
        for place, total in zip(places, totals, strict=True):
            builder.store(builder.load(total), place)

    @contextmanager
    def _each_row(self) -> Iterator[Any]:
        with cgutils.for_range(self._builder, INDEX(PAIR_ROWS), intp=INDEX) as loop:
            yield loop.index

    def _vectors(self, memory: Any, row: Any) -> list[Any]:
        first = self._builder.mul(row, INDEX(VECTORS))
        places = (self._builder.add(first, INDEX(number)) for number in range(VECTORS))
        return [self._builder.gep(memory, [place]) for place in places]

    def _row(self, row: Any) -> TileRow:
        of_group, totals = (self._vectors(memory, row) for memory in (self._of_group, self._totals))
        return TileRow(None, None, None, None, None, [], [], of_group, totals)


def _has_pairs(codes: Any) -> bool:
    return HAS_AMX_INT8 and kind_of_array(codes).has_byte_dots


@overload(multiply_pairs, strict=False)
def _overload_multiply_pairs(
    rows: Any, weights: Any, scratch_: Any, out: Any, stride: Any
) -> Callable[..., int]:
    codes = weights.types[0]
    if not _has_pairs(codes):
        return lambda rows, weights, scratch_, out, stride: 0
    if kind_of_array(codes).bits == INT8.bits:
        return lambda rows, weights, scratch_, out, stride: _multiply_bytes(
            rows, weights, out, stride
        )
    return lambda rows, weights, scratch_, out, stride: _multiply_words(
        rows, weights, scratch_, out, stride
    )


@overload(scratch_size, strict=False)
def _overload_scratch_size(codes: Any, num_rows: Any, num_in: Any) -> Callable[..., int]:
    if not _has_pairs(codes) or kind_of_array(codes).bits == INT8.bits:
        return lambda codes, num_rows, num_in: 0
    return lambda codes, num_rows, num_in: INPUT_BYTES * num_in if num_rows >= PAIR_ROWS else 0
