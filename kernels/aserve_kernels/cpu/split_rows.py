"""Rows of float32 beside rows of bfloat16 as they are stored, for attention over few queries.

A row of float32 is split: of each 32 elements, the 16 even ones come before the odd ones. A vector
of bfloat16 pairs becomes the two vectors beside them by a shift and a mask.

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

from aserve_kernels.cpu.bf16 import Float32s, Floats, widen
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.pair_rows import PAIRS, load_even, load_odd, store_pairs
from aserve_kernels.cpu.precompile import FASTMATH
from aserve_kernels.cpu.simd import (
    FLOAT32X16,
    INDEX,
    INT32X16,
    LANES,
    Intrinsic,
    address_of,
    fma,
    horizontal_sums,
    load,
    splat,
    store,
    zeros,
)
from aserve_kernels.cpu.tiles import TileEmitter

AT_ONCE = 4  # rows of bfloat16 of which registers of AVX2 hold the sums


@njit(inline="always")
def split_row(row: Float32s, factor: np.float32, target: Float32s, start: int) -> None:
    """target[start : start + n] = factor * row [n], split. n is a multiple of 32."""
    for d in range(0, row.shape[0], PAIRS):
        for lane in range(LANES):
            target[start + d + lane] = factor * row[d + 2 * lane]
            target[start + d + LANES + lane] = factor * row[d + 2 * lane + 1]


@njit(inline="always")
def join_row(source: Float32s, start: int, scale: np.float32, row: Floats) -> None:
    """row [n] = scale * the split row source[start : start + n], rounded if `row` is bfloat16."""
    for d in range(0, row.shape[0], PAIRS):
        even = fma(zeros(), load(source, start + d), splat(scale))
        odd = fma(zeros(), load(source, start + d + LANES), splat(scale))
        if row.itemsize == 2:
            store_pairs(even, odd, row, d)
            continue
        store(even, source, start + d)
        store(odd, source, start + d + LANES)
        for lane in range(LANES):
            row[d + 2 * lane] = source[start + d + lane]
            row[d + 2 * lane + 1] = source[start + d + LANES + lane]


@njit(inline="always")
def scale_row(row: Float32s, start: int, width: int, factor: np.float32) -> None:
    for d in range(start, start + width, LANES):
        store(fma(zeros(), load(row, d), splat(factor)), row, d)


def score_rows(
    x: Float32s, start: int, width: int, rows: Floats, starts: Int64s, scores: Float32s
) -> None:
    """scores[:4] = the dot products of the split row x[start : start + width] with
    rows[s : s + width] for the 4 values s of `starts`. `width` is a multiple of 32. All arrays are
    flat."""
    own = np.empty(width, np.float32)
    join_row(x.copy(), start, np.float32(1), own)
    other = np.empty(width, np.float32)
    for i in range(AT_ONCE):
        widen(rows[starts[i] : starts[i] + width], other)
        scores[i] = own @ other


@njit(inline="always", fastmath=FASTMATH)
def add_rows(
    weights: Float32s, rows: Floats, starts: Int64s, first: int, last: int,
    sums: Float32s, at: int, width: int,
) -> None:  # fmt: skip
    """Adds to the split row sums[at : at + width], one after the other, the products of the rows at
    starts[first:last] with weights[first:last]."""
    for d in range(0, width, PAIRS):
        even, odd = load(sums, at + d), load(sums, at + d + LANES)
        for j in range(first, last):
            weight = splat(weights[j])
            even = fma(even, weight, load_even(rows, starts[j] + d))
            odd = fma(odd, weight, load_odd(rows, starts[j] + d))
        store(even, sums, at + d)
        store(odd, sums, at + d + LANES)


@njit(inline="always", fastmath=FASTMATH)
def add_rows_to_two(
    weights: Float32s, rows: Floats, starts: Int64s, first: int, last: int,
    sums: Float32s, at: int, width: int,
) -> None:  # fmt: skip
    """Does what `add_rows` does for two split rows that follow each other; weights [2, n].

    PERF: a row is widened once, and four sums keep both units of a processor busy.
    """
    for d in range(0, width, PAIRS):
        one, two = at + d, at + width + d
        even, odd = load(sums, one), load(sums, one + LANES)
        even_two, odd_two = load(sums, two), load(sums, two + LANES)
        for j in range(first, last):
            left, right = load_even(rows, starts[j] + d), load_odd(rows, starts[j] + d)
            weight, weight_two = splat(weights[0, j]), splat(weights[1, j])
            even, odd = fma(even, weight, left), fma(odd, weight, right)
            even_two, odd_two = fma(even_two, weight_two, left), fma(odd_two, weight_two, right)
        store(even, sums, one)
        store(odd, sums, one + LANES)
        store(even_two, sums, two)
        store(odd_two, sums, two + LANES)


class _Split(TileEmitter):
    def product(self, total: Any, even: Any, odd: Any, address: Any) -> Any:
        """Adds the products of a vector of pairs at `address` with the elements of a split row.

        PERF: the pairs are loaded twice, because no register is left. LLVM must not know.
        """
        builder = self._builder
        low = self._low(builder.load(address, align=2))
        total = self._add_product(total, even, low)
        high = self._high(builder.load(self._opaque(address), align=2))
        return self._add_product(total, odd, high)


@intrinsic
def _score_rows(
    typing: Any, x: Any, start: Any, width: Any, rows: Any, starts: Any, scores: Any
) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        split, zero = _Split(builder, is_paired=True), ir.Constant(FLOAT32X16, None)
        left = address_of(context, builder, x, args[0], args[1], FLOAT32X16)
        places = context.make_array(starts)(context, builder, args[4]).data
        own_starts = [builder.load(builder.gep(places, [INDEX(i)])) for i in range(AT_ONCE)]
        rights = [
            address_of(context, builder, rows, args[3], each, INT32X16) for each in own_starts
        ]
        sums = [cgutils.alloca_once_value(builder, zero) for _ in rights]
        with cgutils.for_range(builder, builder.udiv(args[2], INDEX(PAIRS)), intp=INDEX) as loop:
            first = builder.mul(loop.index, INDEX(2))
            even, odd = (
                builder.load(builder.gep(left, [index]), align=4)
                for index in (first, builder.add(first, INDEX(1)))
            )
            for variable, right in zip(sums, rights, strict=True):
                address = builder.gep(right, [loop.index])
                builder.store(split.product(builder.load(variable), even, odd, address), variable)
        four = ir.VectorType(ir.FloatType(), AT_ONCE)
        target = address_of(context, builder, scores, args[5], INDEX(0), four)
        totals = horizontal_sums(builder, [builder.load(variable) for variable in sums])
        builder.store(totals, target, align=4)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, rows, starts, scores), emit


@overload(score_rows, inline="always", strict=False)
def _overload_score_rows(
    x: Any, start: Any, width: Any, rows: Any, starts: Any, scores: Any
) -> Callable[..., None]:
    return lambda x, start, width, rows, starts, scores: _score_rows(
        x, start, width, rows, starts, scores
    )
