"""Products with weights of 8 and 4 bits by dot products of integers.

    y[t, o] = b[o] + sum_s step[t, s] (scales[o, g] sum_i n[t, i] code[o, i]
                                       + offsets[o, g] sum_i n[t, i])

The integers n of the inputs of a span s of a group g, and their digits, are those of quant_rows.py.
Digits are bytes where the processor multiplies these (vpdpbusd of AVX-512 VNNI), else int16
(vpmaddwd). Sums of integers are exact, so a row's result is the same in every batch.

vpdpbusd multiplies bytes without a sign by bytes with one, and half a byte of a code has no sign.
So codes have ZEROS added, and a sum begins with what that adds, subtracted.

The plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.bf16 import Float32s, Floats, narrow
from aserve_kernels.cpu.gemm import BLOCK_BYTES
from aserve_kernels.cpu.precompile import NO_REFCOUNT
from aserve_kernels.cpu.quant_codes import (
    BYTES_PER_WORD,
    CODES_PER_WORD,
    ZEROS,
    Codes,
    QuantWeight,
    unpack_codes,
)
from aserve_kernels.cpu.quant_rows import (
    BF16_DIGITS,
    DIGIT,
    DIGIT_BITS,
    FLOAT32_DIGITS,
    SPAN,
    Digits,
    round_row,
    spans_of,
)
from aserve_kernels.cpu.simd import (
    FLOAT32X16,
    HAS_AVX2,
    HAS_AVX512BW,
    HAS_BYTE_DOTS,
    IN_L2,
    INDEX,
    INT8X32,
    INT16X32,
    INT32X16,
    LANES,
    Intrinsic,
    emit_prefetch,
)
from aserve_kernels.cpu.tiles import (
    OUTPUTS,
    VECTORS,
    WORD,
    TileEmitter,
    minimum,
    outputs_of,
)

TILE_ROWS = 4  # that pass over the codes together
# Vectors of codes by which prefetches into the L2 cache are ahead: the hardware's stop where a page
# ends. PERF: Qwen3-0.6B's layers and head, 8 rows, 2 threads of an EPYC, ms: 28 to 31 in 4 bits
# and 31 in 8, and 36 to 42 and 36 to 65 without. 1 row, time over that without: 0.80 in 4 bits and
# 0.91 in 8 (a Xeon with VNNI). 64 to 1,024 vectors take the same time there.
AHEAD = 512
ZERO_OF_8_BITS, ZERO_OF_4_BITS = ZEROS[8], ZEROS[4]  # for compiled code
DIGITS_PER_WORD = 32 // DIGIT_BITS
DPBUSD = "llvm.x86.avx512.vpdpbusd.512"
PMADDWD, PMADDWD_512 = "llvm.x86.avx2.pmadd.wd", "llvm.x86.avx512.pmaddw.d.512"


@njit(nogil=True)
def multiply_by_dots(
    x: Floats, weight: QuantWeight, out: Floats, worker: int, num_workers: int
) -> None:
    """x [tokens, in, padded to whole groups], contiguous -> out [tokens, out], of any floating
    dtype: a worker's share of the outputs, for all rows."""
    first, last = outputs_of(out.shape[1], worker, num_workers)
    num_rows, num_in = x.shape
    num_digits = BF16_DIGITS if x.itemsize == 2 else FLOAT32_DIGITS
    num_spans = num_in // weight.group * spans_of(weight.group)
    # PERF: the rows that pass over the weights together stay in the L2 cache.
    most = max(
        TILE_ROWS, BLOCK_BYTES // (num_digits * num_in * DIGIT_BITS // 8) // TILE_ROWS * TILE_ROWS
    )
    most = min(most, max(1, num_rows))
    rows = Digits(
        np.empty((most, num_digits, num_in), DIGIT),
        np.empty((most, num_spans, num_digits), np.int32),
        np.empty((most, num_spans), np.float32),
        np.empty((most, num_spans), np.float32),
        weight.group,
    )
    zero = np.int32(ZERO_OF_8_BITS if weight.codes.itemsize == 1 else ZERO_OF_4_BITS)
    added = np.empty(num_digits, np.int32)
    tile = np.empty(TILE_ROWS * OUTPUTS, np.float32)
    for start in range(0, num_rows, most):
        end = min(num_rows, start + most)
        for row in range(start, end):
            round_row(x[row], zero, rows, row - start, added)
        for output in range(first, last, OUTPUTS):
            for row in range(start, end, TILE_ROWS):
                target = out[row : min(end, row + TILE_ROWS)]
                _multiply_block(x, rows, row - start, weight, target, output, tile)


@njit(nogil=True, **NO_REFCOUNT)
def _multiply_block(
    x: Floats, rows: Digits, first_row: int, weight: QuantWeight, out: Floats, output: int,
    tile: Float32s,
) -> None:  # fmt: skip
    """Computes one block of outputs for at most TILE_ROWS rows, out [rows, all outputs], whose
    digits begin at `first_row`. tile [TILE_ROWS * OUTPUTS] is scratch; x is like the inputs."""
    num_rows = out.shape[0]
    size = min(OUTPUTS, out.shape[1] - output)
    for row in range(num_rows):
        for i in range(OUTPUTS):
            tile[row * OUTPUTS + i] = weight.bias[output + i] if i < size else np.float32(0)
    num_in = x.shape[1]
    num_factors = num_in // weight.group * weight.per_group * OUTPUTS
    block = output // OUTPUTS
    factors = weight.factors[block * num_factors : (block + 1) * num_factors]
    size_of_block = len(weight.codes) // (len(weight.factors) // num_factors)
    codes = weight.codes[block * size_of_block : (block + 1) * size_of_block]
    own = Digits(
        rows.digits[first_row:],
        rows.zeros[first_row:],
        rows.steps[first_row:],
        rows.sums[first_row:],
        rows.group,
    )
    target = tile[: num_rows * OUTPUTS]
    if num_rows > 2:
        multiply_digits(x, own, codes, factors, target, TILE_ROWS)
    elif num_rows == 2:
        multiply_digits(x, own, codes, factors, target, 2)
    else:
        multiply_digits(x, own, codes, factors, target, 1)
    for row in range(num_rows):
        narrow(tile[row * OUTPUTS : row * OUTPUTS + size], out[row, output : output + size])


def multiply_digits(
    like: Floats, rows: Digits, codes: Codes, factors: Float32s, out: Float32s, size: int
) -> None:
    """Adds the products of 1 to `size` rows with a block of outputs to a tile.

    `rows` begin with the first row, and are of inputs with the dtype of `like`. codes [n] are those
    of the block, and factors [groups * 1 or 2 * OUTPUTS] its scales and offsets. out
    [rows * OUTPUTS], at most `size` rows, which is a literal.
    """
    digits, _, steps, _, group = rows
    inputs = np.arange(digits.shape[2])
    of_group, span = inputs // group, inputs // group * spans_of(group) + inputs % group // SPAN
    by_group = factors.reshape(len(inputs) // group, -1, OUTPUTS)[of_group]
    weights = by_group[:, 0] * unpack_codes(codes, len(inputs)).T + by_group[:, 1:].sum(axis=1)
    places = (2.0**DIGIT_BITS) ** np.arange(digits.shape[1] - 1, -1, -1)
    for row in range(len(out) // OUTPUTS):
        values = places @ digits[row] * steps[row, span]
        out[row * OUTPUTS : (row + 1) * OUTPUTS] += (values @ weights).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a tile: the addresses of its `Digits` and results, and the variables of its sums and
    of the totals for each vector of outputs. Each digit has partial sums for each vector."""

    digits: list[Any]
    zeros: Any
    steps: Any
    sums: Any
    target: Any
    chains: list[list[list[Any]]]  # of digits, of partial sums, of vectors
    totals: list[Any]


@dataclass(frozen=True, slots=True)
class _Spans:
    """The sizes of a product."""

    num_groups: Any
    group: Any  # inputs
    per_group: Any  # spans
    num_factors: Any  # vectors of a group


class _Dots(TileEmitter):
    """Emits the products of a tile."""

    __slots__ = ("_bits", "_num_partial", "_per_step")

    def __init__(self, builder: Any, bits: int, num_rows: int) -> None:
        super().__init__(builder, is_paired=True)  # its scalars are words
        self._bits = bits
        self._per_step = BYTES_PER_WORD if bits == 8 else CODES_PER_WORD  # inputs
        # PERF: few rows have few sums, each of which waits for its last product. The two words of a
        # step with 4 bits have sums of their own: 1 row takes 0.95 of the time where codes are in
        # the L2 cache.
        self._num_partial = 2 if bits == 4 and num_rows <= 2 else 1

    def row(self, number: Any, arrays: list[Any], sizes: list[Any]) -> _Row:
        """arrays: where `Digits` and results begin; sizes: how many digits, inputs and spans a row
        has."""
        builder = self._builder
        num_digits, num_in, num_spans = sizes
        words = builder.udiv(num_in, INDEX(DIGITS_PER_WORD))
        words_of_row, of_spans = (
            builder.mul(count, INDEX(num_digits)) for count in (words, num_spans)
        )
        per_row = [words_of_row, of_spans, num_spans, num_spans, INDEX(VECTORS)]
        digits, zeros, steps, sums, target = (
            builder.gep(array, [builder.mul(number, size)])
            for array, size in zip(arrays, per_row, strict=True)
        )
        return _Row(
            [builder.gep(digits, [builder.mul(words, INDEX(i))]) for i in range(num_digits)],
            zeros,
            steps,
            sums,
            target,
            [
                [
                    [cgutils.alloca_once(builder, INT32X16) for _ in range(VECTORS)]
                    for _ in range(self._num_partial)
                ]
                for _ in range(num_digits)
            ],
            [cgutils.alloca_once_value(builder, self._load(target, i)) for i in range(VECTORS)],
        )

    def add_group(
        self, rows: list[_Row], codes: Any, factors: Any, spans: _Spans, group: Any
    ) -> None:
        """Adds the products of group number `group` to the totals."""
        builder = self._builder
        own_factors = builder.gep(factors, [builder.mul(group, spans.num_factors)])
        has_offsets = builder.icmp_unsigned(">", spans.num_factors, INDEX(VECTORS))
        with cgutils.for_range(builder, spans.per_group, intp=INDEX) as loop:
            span = builder.add(builder.mul(group, spans.per_group), loop.index)
            for row in rows:
                self._begin_span(row, span)
            first = builder.mul(loop.index, INDEX(SPAN))
            size = minimum(builder, INDEX(SPAN), builder.sub(spans.group, first))
            start = builder.add(builder.mul(group, spans.group), first)
            first_step, num_steps = (
                builder.udiv(count, INDEX(self._per_step)) for count in (start, size)
            )
            own_codes = builder.gep(codes, [builder.mul(first_step, INDEX(VECTORS))])
            first_word = builder.udiv(start, INDEX(DIGITS_PER_WORD))
            digits = [[builder.gep(place, [first_word]) for place in row.digits] for row in rows]
            with cgutils.for_range(builder, num_steps, intp=INDEX) as steps:
                self._add_step(rows, digits, own_codes, steps.index)
            for row in rows:
                self._end_span(row, span, own_factors, has_offsets)

    def _begin_span(self, row: _Row, span: Any) -> None:
        builder = self._builder
        zeros = builder.gep(row.zeros, [builder.mul(span, INDEX(len(row.chains)))])
        for digit, (chains, *others) in enumerate(row.chains):
            start = self._splat(builder.load(builder.gep(zeros, [INDEX(digit)])))
            for chain in chains:
                builder.store(start, chain)
            for chain in itertools.chain(*others):
                builder.store(ir.Constant(INT32X16, None), chain)

    def _add_step(self, rows: list[_Row], digits: list[list[Any]], codes: Any, step: Any) -> None:
        """Adds the products of the inputs of a step. `digits` of the rows and `codes` are the
        addresses of those of its span."""
        builder = self._builder
        start = builder.gep(codes, [builder.mul(step, INDEX(VECTORS))])
        for number in range(VECTORS):
            emit_prefetch(builder, builder.gep(start, [INDEX(AHEAD + number)]), IN_L2)
        operands = list(self._operands(start))
        first = builder.mul(step, INDEX(len(operands)))
        for number, vectors in enumerate(operands):
            at = builder.add(first, INDEX(number))
            for row, places in zip(rows, digits, strict=True):
                self._add_word(row, places, vectors, at, number % self._num_partial)

    def _operands(self, start: Any) -> Iterator[list[Any]]:
        """Yields, for each word of inputs of a step, the codes of all outputs: bytes or int16."""
        builder = self._builder
        if self._bits == 8 and not HAS_BYTE_DOTS:
            pairs = builder.bitcast(start, INT8X32.as_pointer())
            for first in (0, VECTORS):
                loaded = [self._load(pairs, first + number) for number in range(VECTORS)]
                yield [builder.sext(codes, INT16X32) for codes in loaded]
            return
        loaded = [self._load(start, number) for number in range(VECTORS)]
        if self._bits == 8:
            yield loaded
            return
        mask = 0x0F0F0F0F if HAS_BYTE_DOTS else 0x000F000F
        for shift in (0, 4) if HAS_BYTE_DOTS else (0, 4, 8, 12):
            yield [self._digits(words, shift, mask) for words in loaded]

    def _end_span(self, row: _Row, span: Any, factors: Any, has_offsets: Any) -> None:
        """Adds step * scale * dot product + offset * sum of inputs to the totals."""
        builder = self._builder
        step, total_of_inputs = (
            builder.load(builder.gep(array, [span])) for array in (row.steps, row.sums)
        )
        # Without offsets the sum counts as zero, and the scales stand for them.
        added = self._wide(builder.select(has_offsets, total_of_inputs, ir.FloatType()(0.0)))
        offsets = builder.gep(factors, [builder.select(has_offsets, INDEX(VECTORS), INDEX(0))])
        for number, total in enumerate(row.totals):
            product = self._joined([self._summed(chains, number) for chains in row.chains])
            scale = builder.fmul(self._load(factors, number), self._wide(step))
            whole = self._fma(product, scale, builder.load(total))
            builder.store(self._fma(self._load(offsets, number), added, whole), total)

    def _add_word(
        self, row: _Row, digits: list[Any], codes: list[Any], at: Any, partial: int
    ) -> None:
        """Adds the products of word number `at` of each digit of a row to these partial sums."""
        builder = self._builder
        for place, chains in zip(digits, row.chains, strict=True):
            word = self._splat(builder.load(builder.gep(place, [at]), align=1))
            for chain, vector in zip(chains[partial], codes, strict=True):
                builder.store(self._dot(builder.load(chain), vector, word), chain)

    def _summed(self, chains: list[list[Any]], number: int) -> Any:
        """Returns the sum of the partial sums for vector number `number`."""
        first, *others = (self._builder.load(partial[number]) for partial in chains)
        for other in others:
            first = self._builder.add(first, other)
        return first

    def _joined(self, sums: list[Any]) -> Any:
        """Returns the sums of all digits as one float32."""
        builder = self._builder
        base = ir.Constant(FLOAT32X16, [2.0**DIGIT_BITS] * LANES)
        whole = builder.sitofp(sums[0], FLOAT32X16)
        for lower in sums[1:]:
            whole = self._fma(whole, base, builder.sitofp(lower, FLOAT32X16))
        return whole

    def _digits(self, words: Any, shift: int, mask: int) -> Any:
        builder = self._builder
        shifted = builder.lshr(words, ir.Constant(INT32X16, [shift] * LANES)) if shift else words
        return builder.and_(shifted, ir.Constant(INT32X16, [mask] * LANES))

    def _wide(self, value: Any) -> Any:
        return self._builder.bitcast(self._splat(self._builder.bitcast(value, WORD)), FLOAT32X16)

    def _fma(self, left: Any, right: Any, total: Any) -> Any:
        return self._call(f"llvm.fmuladd.v{LANES}f32", left, right, total)

    def _dot(self, total: Any, left: Any, right: Any) -> Any:
        """Adds the dot products of the bytes or int16 of each word."""
        if HAS_BYTE_DOTS:
            return self._call(DPBUSD, total, left, right, result=INT32X16)
        builder = self._builder
        left, right = (builder.bitcast(operand, INT16X32) for operand in (left, right))
        if HAS_AVX512BW:
            return builder.add(total, self._call(PMADDWD_512, left, right, result=INT32X16))
        if HAS_AVX2:
            parts = [self._dot_in_part(total, left, right, part) for part in (0, 1)]
            return builder.shuffle_vector(*parts, ir.Constant(INT32X16, list(range(LANES))))
        for first in (0, 1):
            even_or_odd = range(first, 2 * LANES, 2)
            factors = [self._taken(operand, even_or_odd) for operand in (left, right)]
            wide = [builder.sext(factor, INT32X16) for factor in factors]
            total = builder.add(total, builder.mul(*wide))
        return total

    def _dot_in_part(self, total: Any, left: Any, right: Any, part: int) -> Any:
        """Does so in the lower or upper half of the vectors: a register of AVX2.

        PERF: LLVM would reorder additions, and keep more partial sums than there are registers.
        """
        half = LANES // 2
        lanes, pairs = (range(part * size, (part + 1) * size) for size in (half, 2 * half))
        operands = [self._taken(operand, pairs) for operand in (left, right)]
        product = self._call(PMADDWD, *operands, result=ir.VectorType(WORD, half))
        return self._opaque(self._builder.add(self._taken(total, lanes), product))

    def _taken(self, vector: Any, lanes: range) -> Any:
        mask = ir.Constant(ir.VectorType(WORD, len(lanes)), list(lanes))
        return self._builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


@intrinsic(prefer_literal=True)
def _multiply_digits(
    typing: Any, like: Any, rows: Any, codes: Any, factors: Any, out: Any, size: Any
) -> Intrinsic | None:
    if not isinstance(size, types.IntegerLiteral):
        return None
    bits = 8 if codes.dtype == types.int8 else 4
    num_digits = BF16_DIGITS if like.dtype == types.uint16 else FLOAT32_DIGITS
    arrays = (*rows.types[:4], codes, factors, out)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dots = _Dots(builder, bits, size.literal_value)
        *of_rows, width = cgutils.unpack_tuple(builder, args[1])
        values = [
            context.make_array(kind)(context, builder, arg)
            for kind, arg in zip(arrays, (*of_rows, *args[2:5]), strict=True)
        ]
        kinds = (WORD, WORD, ir.FloatType(), ir.FloatType(), INT32X16, FLOAT32X16, FLOAT32X16)
        *of_digits, packed, first_factor, target = (
            builder.bitcast(value.data, kind.as_pointer())
            for value, kind in zip(values, kinds, strict=True)
        )
        num_in = cgutils.unpack_tuple(builder, values[0].shape)[2]
        num_spans = cgutils.unpack_tuple(builder, values[2].shape)[1]
        num_groups = builder.udiv(num_in, width)
        num_vectors = builder.udiv(values[-2].nitems, INDEX(LANES))
        per_group = [builder.udiv(count, num_groups) for count in (num_spans, num_vectors)]
        spans = _Spans(num_groups, width, *per_group)
        # Missing rows repeat the last one: it is computed and stored again.
        last = builder.sub(builder.udiv(values[-1].nitems, INDEX(OUTPUTS)), INDEX(1))
        numbers = [minimum(builder, INDEX(row), last) for row in range(size.literal_value)]
        places = [*of_digits, target]
        own = [dots.row(number, places, [num_digits, num_in, num_spans]) for number in numbers]
        with cgutils.for_range(builder, num_groups, intp=INDEX) as loop:
            dots.add_group(own, packed, first_factor, spans, loop.index)
        for row in own:
            dots.store(row.totals, row.target)
        return context.get_dummy_value()

    return types.void(like, rows, codes, factors, out, size), emit


@overload(multiply_digits, strict=False, prefer_literal=True)
def _overload_multiply_digits(
    like: Any, rows: Any, codes: Any, factors: Any, out: Any, size: Any
) -> Callable[..., None]:
    return lambda like, rows, codes, factors, out, size: _multiply_digits(
        like, rows, codes, factors, out, size
    )
