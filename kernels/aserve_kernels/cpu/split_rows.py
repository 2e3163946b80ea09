"""Rows of float32 beside rows of bfloat16 as they are stored, for attention over few queries.

A row of float32 is split: of each 32 elements, the 16 even ones come before the odd ones. A vector
of bfloat16 pairs becomes the two vectors beside them by a shift and a mask. It is widened once for
two split rows, whose sums have the order of those of one.

The plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

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
    FLOATS,
    IN_L1,
    INDEX,
    INT32X16,
    LANES,
    WORDS,
    Intrinsic,
    element,
    emit_prefetch,
    fma,
    horizontal_sums,
    load,
    prefetch,
    splat,
    store,
    zeros,
)
from aserve_kernels.cpu.tiles import WORD, TileEmitter

# Rows of bfloat16 that are scored at once. PERF: in vectors of one register, the registers of AVX2
# hold the sums of four rows with two others.
AT_ONCE = 4


class StoredRows(NamedTuple):
    """Rows of KV in bfloat16. Row i is `data` from places[first + i] + offset on."""

    data: Floats
    places: Int64s
    first: int
    offset: int


class SplitRows(NamedTuple):
    """Split rows of `width` elements, a multiple of 32, that follow each other from data[start]."""

    data: Float32s
    start: int
    width: int


class Scores(NamedTuple):
    """The scores or weights of stored rows. Row i has `data[at + i]` for a split row, and
    data[at + stride + i] for the next one."""

    data: Float32s
    at: int
    stride: int


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
    x: SplitRows, rows: StoredRows, later: StoredRows, scores: Scores, size: int
) -> None:
    """Writes the dot products of `size` split rows, 1 or 2 (a literal), with four stored ones, and
    prefetches the four of `later`."""
    own, other = np.empty(x.width, np.float32), np.empty(x.width, np.float32)
    for r in range(size):
        join_row(x.data.copy(), x.start + r * x.width, np.float32(1), own)
        for i in range(AT_ONCE):
            place = rows.places[rows.first + i] + rows.offset
            widen(rows.data[place : place + x.width], other)
            scores.data[scores.at + r * scores.stride + i] = own @ other


@njit(inline="always", fastmath=FASTMATH)
def add_rows(
    weights: Scores, rows: StoredRows, later: StoredRows, low: int, high: int, sums: SplitRows
) -> None:
    """Adds the stored rows low..high to a split row, one after the other, each times its weight,
    and prefetches those of `later`."""
    for d in range(0, sums.width, PAIRS):
        at = sums.start + d
        even, odd = load(sums.data, at), load(sums.data, at + LANES)
        for i in range(low, high):
            place = element(rows.places, rows.first + i) + rows.offset + d
            prefetch(later.data, element(later.places, later.first + i) + later.offset + d)
            weight = splat(element(weights.data, weights.at + i))
            even = fma(even, weight, load_even(rows.data, place))
            odd = fma(odd, weight, load_odd(rows.data, place))
        store(even, sums.data, at)
        store(odd, sums.data, at + LANES)


@njit(inline="always", fastmath=FASTMATH)
def add_rows_to_two(
    weights: Scores, rows: StoredRows, later: StoredRows, low: int, high: int, sums: SplitRows
) -> None:
    """Does what `add_rows` does, for two split rows.

    PERF: a row is widened once, and four sums keep both units of a processor busy.
    """
    for d in range(0, sums.width, PAIRS):
        one, two = sums.start + d, sums.start + sums.width + d
        even, odd = load(sums.data, one), load(sums.data, one + LANES)
        even_two, odd_two = load(sums.data, two), load(sums.data, two + LANES)
        for i in range(low, high):
            place = element(rows.places, rows.first + i) + rows.offset + d
            prefetch(later.data, element(later.places, later.first + i) + later.offset + d)
            left, right = load_even(rows.data, place), load_odd(rows.data, place)
            weight = splat(element(weights.data, weights.at + i))
            even, odd = fma(even, weight, left), fma(odd, weight, right)
            weight = splat(element(weights.data, weights.at + weights.stride + i))
            even_two, odd_two = fma(even_two, weight, left), fma(odd_two, weight, right)
        store(even, sums.data, one)
        store(odd, sums.data, one + LANES)
        store(even_two, sums.data, two)
        store(odd_two, sums.data, two + LANES)


class _Split(TileEmitter):
    """Emits the dot products of split rows."""

    __slots__ = ()

    def vectors(self, data: Any, start: Any, vector: ir.Type) -> Any:
        """Returns the address of data[start] as that of a vector of this type."""
        address = self._builder.gep(data, [start])
        return self._builder.bitcast(address, vector.as_pointer())

    def add(self, sums: list[list[Any]], x: list[Any], stored: list[Any], step: Any) -> None:
        """Adds the products of 32 elements: sums[row][i] += x[row] * stored[i].

        PERF: stored pairs are loaded once for each half, because no register is left to keep them
        in. LLVM must not know.
        """
        builder, vectors = self._builder, LANES // FLOATS.count  # of the even ones
        first = builder.mul(step, INDEX(2 * vectors))
        for part, half in product(range(vectors), range(2)):
            pair = builder.add(builder.mul(step, INDEX(vectors)), INDEX(part))
            at = builder.add(first, INDEX(half * vectors + part))
            factors = [builder.load(builder.gep(row, [at]), align=4) for row in x]
            for number, row in enumerate(stored):
                address = self._opaque(builder.gep(row, [pair]))
                pairs = builder.load(address, align=2)
                widened = self._high(pairs) if half else self._low(pairs)
                self._add_products([row_sums[number] for row_sums in sums], factors, widened)


@intrinsic(prefer_literal=True)
def _score_rows(
    typing: Any, x: Any, rows: Any, later: Any, scores: Any, size: Any
) -> Intrinsic | None:
    if not isinstance(size, types.IntegerLiteral):
        return None

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def fields(kind: Any, number: int) -> list[Any]:
            """Returns the fields of a record. An array becomes its address."""
            values = [builder.extract_value(args[number], i) for i in range(len(kind))]
            return [
                context.make_array(each)(context, builder, value).data
                if isinstance(each, types.Array)
                else value
                for each, value in zip(kind, values, strict=True)
            ]

        def stored(kind: Any, number: int, vector: ir.Type) -> list[Any]:
            data, places, first, offset = fields(kind, number)
            own = [builder.gep(places, [builder.add(first, INDEX(i))]) for i in range(AT_ONCE)]
            starts = [builder.add(builder.load(place), offset) for place in own]
            return [split.vectors(data, start, vector) for start in starts]

        split, numbers = _Split(builder, is_paired=True), range(size.literal_value)
        data, start, width = fields(x, 0)
        left = [
            split.vectors(data, builder.add(start, builder.mul(width, INDEX(row))), FLOATS)
            for row in numbers
        ]
        right, lines = stored(rows, 1, WORDS), stored(later, 2, INT32X16)
        zero = ir.Constant(FLOATS, None)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in right] for _ in left]
        with cgutils.for_range(builder, builder.udiv(width, INDEX(PAIRS)), intp=INDEX) as loop:
            for line in lines:
                emit_prefetch(builder, builder.gep(line, [loop.index]), IN_L1)
            split.add(sums, left, right, loop.index)
        totals = horizontal_sums(builder, [builder.load(each) for row in sums for each in row])
        data, at, stride = fields(scores, 3)
        for row in numbers:
            lanes = [*range(AT_ONCE * row, AT_ONCE * (row + 1))]
            four = ir.Constant(ir.VectorType(WORD, AT_ONCE), lanes)
            products = builder.shuffle_vector(totals, totals, four)
            first = builder.add(at, builder.mul(stride, INDEX(row)))
            builder.store(products, split.vectors(data, first, products.type), align=4)
        return context.get_dummy_value()

    return types.void(x, rows, later, scores, size), emit


@overload(score_rows, inline="always", strict=False, prefer_literal=True)
def _overload_score_rows(
    x: Any, rows: Any, later: Any, scores: Any, size: Any
) -> Callable[..., None]:
    return lambda x, rows, later, scores, size: _score_rows(x, rows, later, scores, size)
