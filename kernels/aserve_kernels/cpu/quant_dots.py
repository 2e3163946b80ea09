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

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.numpy_support import as_dtype

from aserve_kernels.cpu.bf16 import Float32s, Floats, narrow
from aserve_kernels.cpu.gemm import BLOCK_BYTES
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT32_LIKE, scratch
from aserve_kernels.cpu.precompile import NO_REFCOUNT
from aserve_kernels.cpu.quant_codes import (
    BYTES_PER_WORD,
    CODES_PER_WORD,
    CodeKind,
    Codes,
    Factors,
    QuantWeight,
    factor_values,
    kind_of,
    unpack_codes,
)
from aserve_kernels.cpu.quant_rows import INTEGERS_LIKE, Integers, RoundedRows, round_row
from aserve_kernels.cpu.simd import (
    FLOAT16X16,
    FLOAT32X16,
    HAS_AVX2,
    HAS_AVX512BW,
    HAS_VNNI,
    IN_L2,
    INDEX,
    INT8X16,
    INT8X32,
    INT8X64,
    INT16X32,
    INT32X16,
    LANES,
    Intrinsic,
    emit_prefetch,
)
from aserve_kernels.cpu.tiles import (
    HALF_WORD,
    OUTPUTS,
    VECTORS,
    WORD,
    TileEmitter,
    minimum,
    outputs_of,
)

TILE_ROWS = 8 if HAS_VNNI else 4  # that pass over the codes together
# Vectors of codes by which prefetches into the L2 cache are ahead: the hardware's stop where a page
# ends. PERF: Qwen3-0.6B's layers and head, 8 rows, 2 threads of an EPYC, ms: 28 to 31 in 4 bits
# and 31 in 8, and 36 to 42 and 36 to 65 without. 1 row, time over that without: 0.80 in 4 bits and
# 0.91 in 8 (a Xeon with VNNI). 64 to 1,024 vectors take the same time there.
AHEAD = 512
INTEGERS_PER_WORD = {kind: 4 // like.itemsize for kind, like in INTEGERS_LIKE.items()}
INT16_MAX, INT8_MAX = np.iinfo(np.int16).max, np.iinfo(np.int8).max
EXPONENT_BIT = 23  # of a float32, where its exponent begins
DPBUSD = "llvm.x86.avx512.vpdpbusd.512"
# For registers of AVX2, and of AVX-512.
PMADDUBSW = ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx512.pmaddubs.w.512")
PMADDWD = ("llvm.x86.avx2.pmadd.wd", "llvm.x86.avx512.pmaddw.d.512")
# For registers of AVX2, and of AVX-512: bytes of a table by their numbers.
PSHUFB = ("llvm.x86.avx2.pshuf.b", "llvm.x86.avx512.pshuf.b.512")


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
    most = max(TILE_ROWS, BLOCK_BYTES // (num_in * like.itemsize) // TILE_ROWS * TILE_ROWS)
    most = min(most, max(1, num_rows))
    integers = scratch((most, num_in), like)
    zeros = scratch((most, num_spans), INT32_LIKE)
    steps = scratch((most, num_spans), FLOAT32_LIKE)
    sums = scratch((most, num_groups), FLOAT32_LIKE)
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
            _multiply_block(rows, weight, bias, output, out[start:], output)
        if num_whole < last:
            _multiply_block(rows, weight, tail_bias, num_whole, tail, 0)
            out[start : start + num, num_whole:last] = tail[:num, : last - num_whole]


@njit(nogil=True, **NO_REFCOUNT)
def _multiply_block(
    rows: RoundedRows, weight: QuantWeight, bias: Float32s, output: int, out: Floats, column: int
) -> None:
    """Computes one block of outputs, from number `output` on, which is written to `out`
    [rows, any], from `column` on. bias [OUTPUTS]."""
    num_rows, num_groups = rows.sums.shape
    num_factors = num_groups * weight.per_group * OUTPUTS
    block = output // OUTPUTS
    factors = weight.factors[block * num_factors : (block + 1) * num_factors]
    size_of_block = len(weight.codes) // (len(weight.factors) // num_factors)
    codes = weight.codes[block * size_of_block : (block + 1) * size_of_block]
    weights, stride, outputs = (codes, factors, bias), out.shape[1], out.reshape(-1)
    for row in range(0, num_rows, TILE_ROWS):
        own = RoundedRows(
            rows.integers[row:],
            rows.zeros[row:],
            rows.steps[row:],
            rows.sums[row:],
            rows.group,
            rows.span,
        )
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


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a tile: the addresses of its `RoundedRows` and results, and its variables, one for
    each vector of outputs: partial sums of a span, the sum of a group, and totals."""

    integers: Any
    zeros: Any
    steps: Any
    sums: Any
    target: Any
    of_span: list[list[Any]]  # of partial sums, of vectors
    of_pairs: list[list[Any]]  # the same of a few steps, in 16 bits
    of_group: list[Any]
    totals: list[Any]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of a product."""

    num_groups: Any
    group: Any  # inputs
    span: Any  # inputs
    per_group: Any  # spans
    num_factors: Any  # vectors of a group


class _Dots(TileEmitter):
    """Emits the products of a tile."""

    __slots__ = (
        "_has_bytes",
        "_has_exponents",
        "_has_int16_sums",
        "_int16_steps",
        "_kind",
        "_num_partial",
        "_per_step",
    )

    def __init__(self, builder: Any, kind: CodeKind, num_rows: int, *, has_exponents: bool) -> None:
        """`has_exponents`: factors are exponents of scales, and there are no offsets."""
        super().__init__(builder, is_paired=True)  # its scalars are words
        self._kind, self._has_bytes = kind, kind.has_byte_dots
        self._has_exponents = has_exponents
        self._has_int16_sums = self._has_bytes and not HAS_VNNI
        self._per_step = BYTES_PER_WORD if kind.bits == 8 else CODES_PER_WORD  # inputs
        # PERF: few rows have few sums, each of which waits for its last product. The two words of a
        # step with 4 bits have sums of their own: 1 row takes 0.95 of the time where codes are in
        # the L2 cache.
        self._num_partial = 2 if kind.bits == 4 and num_rows <= 2 else 1
        # Steps whose sums of two products, by vpmaddubsw, fit in 16 bits. Each has two words.
        fitting = INT16_MAX // (2 * kind.largest * INT8_MAX)
        self._int16_steps = fitting * self._num_partial // 2

    def row(self, number: Any, arrays: list[Any], sizes: list[Any], bias: Any) -> _Row:
        """arrays: where `RoundedRows` and results begin; sizes: what each of them has per row."""
        builder = self._builder
        integers, zeros, steps, sums, target = (
            builder.gep(array, [builder.mul(number, size)])
            for array, size in zip(arrays, sizes, strict=True)
        )
        of_span, of_pairs = (
            [
                [cgutils.alloca_once(builder, vector) for _ in range(VECTORS)]
                for _ in range(self._num_partial)
            ]
            for vector in (INT32X16, INT16X32)
        )
        of_group = [cgutils.alloca_once(builder, FLOAT32X16) for _ in range(VECTORS)]
        [totals] = self.start(bias, 1)
        return _Row(integers, zeros, steps, sums, target, of_span, of_pairs, of_group, totals)

    def add_group(
        self, rows: list[_Row], codes: Any, factors: Any, sizes: _Sizes, group: Any
    ) -> None:
        """Adds the products of group number `group` to the totals."""
        builder = self._builder
        for variable in itertools.chain.from_iterable(row.of_group for row in rows):
            builder.store(ir.Constant(FLOAT32X16, None), variable)
        with cgutils.for_range(builder, sizes.per_group, intp=INDEX) as loop:
            first = builder.mul(loop.index, sizes.span)
            start = builder.add(builder.mul(group, sizes.group), first)
            size = minimum(builder, sizes.span, builder.sub(sizes.group, first))
            span = builder.add(builder.mul(group, sizes.per_group), loop.index)
            self._add_span(rows, codes, span, start, size)
        for row in rows:
            self._end_group(row, factors, sizes, group)

    def _add_span(self, rows: list[_Row], codes: Any, span: Any, start: Any, size: Any) -> None:
        """Adds the products of span number `span`, of `size` inputs from `start` on, to the sums of
        the group."""
        builder = self._builder
        for row in rows:
            first, *others = row.of_span
            zero = self._splat(builder.load(builder.gep(row.zeros, [span])))
            for variable in first:
                builder.store(zero, variable)
            for variable in itertools.chain(*others):
                builder.store(ir.Constant(INT32X16, None), variable)
        first_step, num_steps = (
            builder.udiv(count, INDEX(self._per_step)) for count in (start, size)
        )
        own_codes = builder.gep(codes, [builder.mul(first_step, INDEX(VECTORS))])
        first_word = builder.udiv(start, INDEX(INTEGERS_PER_WORD[self._kind]))
        places = [builder.gep(row.integers, [first_word]) for row in rows]
        if self._has_int16_sums:
            self._add_by_int16(rows, places, own_codes, num_steps)
        else:
            with cgutils.for_range(builder, num_steps, intp=INDEX) as loop:
                self._add_step(rows, places, own_codes, loop.index)
        for row in rows:
            step = self._wide(builder.load(builder.gep(row.steps, [span])))
            for number, variable in enumerate(row.of_group):
                dots = builder.sitofp(self._summed(row.of_span, number), FLOAT32X16)
                builder.store(self._fma(dots, step, builder.load(variable)), variable)

    def _add_by_int16(
        self, rows: list[_Row], places: list[Any], codes: Any, num_steps: Any
    ) -> None:
        """Adds the products of a span's steps by way of sums of 16 bits."""
        builder, most = self._builder, INDEX(self._int16_steps)
        ones = ir.Constant(INT16X32, [1] * (2 * LANES))
        chunks = builder.udiv(builder.add(num_steps, INDEX(self._int16_steps - 1)), most)
        with cgutils.for_range(builder, chunks, intp=INDEX) as chunk:
            first = builder.mul(chunk.index, most)
            for variable in itertools.chain.from_iterable(
                itertools.chain.from_iterable(row.of_pairs for row in rows)
            ):
                builder.store(ir.Constant(INT16X32, None), variable)
            count = minimum(builder, most, builder.sub(num_steps, first))
            with cgutils.for_range(builder, count, intp=INDEX) as loop:
                self._add_step(rows, places, codes, builder.add(first, loop.index))
            for row in rows:
                for wide, narrow_ in zip(
                    itertools.chain(*row.of_span), itertools.chain(*row.of_pairs), strict=True
                ):
                    pairs = builder.load(narrow_)
                    builder.store(self._added(PMADDWD, builder.load(wide), pairs, ones), wide)

    def _add_step(self, rows: list[_Row], places: list[Any], codes: Any, step: Any) -> None:
        """Adds the products of the inputs of a step. `places` and `codes` are where the integers of
        each row and the codes of the span begin."""
        builder = self._builder
        start = builder.gep(codes, [builder.mul(step, INDEX(VECTORS))])
        for number in range(VECTORS):
            emit_prefetch(builder, builder.gep(start, [INDEX(AHEAD + number)]), IN_L2)
        operands = list(self._operands(start))
        first = builder.mul(step, INDEX(len(operands)))
        for number, vectors in enumerate(operands):
            at = builder.add(first, INDEX(number))
            for row, place in zip(rows, places, strict=True):
                word = self._splat(builder.load(builder.gep(place, [at]), align=1))
                sums = row.of_pairs if self._has_int16_sums else row.of_span
                own = sums[number % self._num_partial]
                for variable, vector in zip(own, vectors, strict=True):
                    builder.store(self._dot(builder.load(variable), vector, word), variable)

    def _operands(self, start: Any) -> Iterator[list[Any]]:
        """Yields, for each word of inputs of a step, the codes of all outputs: bytes or int16."""
        builder = self._builder
        if self._kind.bits == 8 and not self._has_bytes:
            pairs = builder.bitcast(start, INT8X32.as_pointer())
            for first in (0, VECTORS):
                loaded = [self._load(pairs, first + number) for number in range(VECTORS)]
                yield [builder.sext(codes, INT16X32) for codes in loaded]
            return
        loaded = [self._load(start, number) for number in range(VECTORS)]
        if self._kind.bits == 8:
            yield loaded
            return
        mask = 0x0F0F0F0F if self._has_bytes else 0x000F000F
        for shift in (0, 4) if self._has_bytes else (0, 4, 8, 12):
            bits = [self._shifted(words, shift, mask) for words in loaded]
            yield [self._looked_up(each) for each in bits] if self._kind.table else bits

    def _end_group(self, row: _Row, factors: Any, sizes: _Sizes, group: Any) -> None:
        """Adds scale * sum of the group + offset * sum of its inputs to the totals."""
        builder = self._builder
        own = builder.gep(factors, [builder.mul(group, sizes.num_factors)])
        if self._has_exponents:
            for number, (variable, total) in enumerate(zip(row.of_group, row.totals, strict=True)):
                exponents = builder.zext(self._load(own, number), INT32X16)
                bits = builder.shl(exponents, ir.Constant(INT32X16, [EXPONENT_BIT] * LANES))
                scale = builder.bitcast(bits, FLOAT32X16)
                whole = self._fma(builder.load(variable), scale, builder.load(total))
                builder.store(whole, total)
            return
        of_inputs = builder.load(builder.gep(row.sums, [group]))
        has_offsets = builder.icmp_unsigned(">", sizes.num_factors, INDEX(VECTORS))
        # Without offsets the sum of inputs counts as zero, and the scales stand for them.
        added = self._wide(builder.select(has_offsets, of_inputs, ir.FloatType()(0.0)))
        offsets = builder.gep(own, [builder.select(has_offsets, INDEX(VECTORS), INDEX(0))])
        for number, (variable, total) in enumerate(zip(row.of_group, row.totals, strict=True)):
            scale, offset = (
                builder.fpext(self._load(factor, number), FLOAT32X16) for factor in (own, offsets)
            )
            whole = self._fma(builder.load(variable), scale, builder.load(total))
            builder.store(self._fma(offset, added, whole), total)

    def _summed(self, partial: list[list[Any]], number: int) -> Any:
        """Returns the sum of the partial sums for vector number `number`."""
        first, *others = (self._builder.load(variables[number]) for variables in partial)
        for other in others:
            first = self._builder.add(first, other)
        return first

    def _shifted(self, words: Any, shift: int, mask: int) -> Any:
        builder = self._builder
        shifted = builder.lshr(words, ir.Constant(INT32X16, [shift] * LANES)) if shift else words
        return builder.and_(shifted, ir.Constant(INT32X16, [mask] * LANES))

    def _looked_up(self, bits: Any) -> Any:
        """Returns the codes of the table, with the zero added, by their bits: bytes or int16."""
        builder = self._builder
        table = [code + self._kind.zero for code in self._kind.table]
        if self._has_bytes and HAS_AVX512BW:
            bytes_ = ir.Constant(INT8X64, table * 4)
            return self._call(PSHUFB[1], bytes_, builder.bitcast(bits, INT8X64), result=INT8X64)
        if self._has_bytes:
            numbers, bytes_ = builder.bitcast(bits, INT8X64), ir.Constant(INT8X32, table * 2)
            halves = [
                self._call(PSHUFB[0], bytes_, self._half(numbers, part), result=INT8X32)
                for part in (0, 1)
            ]
            lanes = ir.Constant(ir.VectorType(WORD, INT8X64.count), list(range(INT8X64.count)))
            return builder.shuffle_vector(*halves, lanes)
        numbers = builder.bitcast(bits, INT16X32)
        codes = [ir.Constant(INT16X32, [code] * INT16X32.count) for code in table]
        for bit in (1, 2, 4, 8):
            own = builder.and_(numbers, ir.Constant(INT16X32, [bit] * INT16X32.count))
            is_set = builder.icmp_unsigned("!=", own, ir.Constant(INT16X32, None))
            pairs = zip(codes[::2], codes[1::2], strict=True)
            codes = [builder.select(is_set, with_bit, without) for without, with_bit in pairs]
        return codes[0]

    def _wide(self, value: Any) -> Any:
        return self._builder.bitcast(self._splat(self._builder.bitcast(value, WORD)), FLOAT32X16)

    def _fma(self, left: Any, right: Any, total: Any) -> Any:
        return self._call(f"llvm.fmuladd.v{LANES}f32", left, right, total)

    def _dot(self, total: Any, codes: Any, inputs: Any) -> Any:
        """Adds the dot products of the bytes of each word, or of two of them, or of the int16."""
        builder = self._builder
        if self._has_bytes and HAS_VNNI:
            return self._call(DPBUSD, total, codes, inputs, result=INT32X16)
        if self._has_bytes:
            operands = (builder.bitcast(operand, INT8X64) for operand in (codes, inputs))
            return self._added(PMADDUBSW, total, *operands)
        left, right = (builder.bitcast(operand, INT16X32) for operand in (codes, inputs))
        if HAS_AVX2:
            return self._added(PMADDWD, total, left, right)
        for first in (0, 1):
            even_or_odd = range(first, 2 * LANES, 2)
            factors = [self._taken(operand, even_or_odd) for operand in (left, right)]
            wide = [builder.sext(factor, INT32X16) for factor in factors]
            total = builder.add(total, builder.mul(*wide))
        return total

    def _added(self, instruction: tuple[str, str], total: Any, left: Any, right: Any) -> Any:
        """Adds what an instruction computes.

        PERF: LLVM would reorder the additions of halves, which are registers of AVX2, and keep more
        partial sums than there are registers.
        """
        builder, (of_half, of_whole) = self._builder, instruction
        if HAS_AVX512BW:
            return builder.add(total, self._call(of_whole, left, right, result=total.type))
        halves = []
        for part in (0, 1):
            lower_or_upper = [self._half(vector, part) for vector in (total, left, right)]
            product = self._call(of_half, *lower_or_upper[1:], result=lower_or_upper[0].type)
            halves.append(self._opaque(builder.add(lower_or_upper[0], product)))
        every_lane = ir.VectorType(WORD, total.type.count)
        lanes = ir.Constant(every_lane, list(range(total.type.count)))
        return builder.shuffle_vector(*halves, lanes)

    def _half(self, vector: Any, part: int) -> Any:
        size = vector.type.count // 2
        return self._taken(vector, range(part * size, (part + 1) * size))

    def _taken(self, vector: Any, lanes: range) -> Any:
        mask = ir.Constant(ir.VectorType(WORD, len(lanes)), list(lanes))
        return self._builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


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
        sizes = _Sizes(num_groups, width, span, *per_group)
        words = builder.udiv(num_in, INDEX(INTEGERS_PER_WORD[kind]))
        dots = _Dots(builder, kind, size.literal_value, has_exponents=has_exponents)
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


def kind_of_array(codes: Any) -> CodeKind:
    """Returns the kind of codes by numba's type of their array."""
    return kind_of(as_dtype(codes.dtype))


@overload(multiply_integers, strict=False, prefer_literal=True)
def _overload_multiply_integers(
    rows: Any, weights: Any, out: Any, stride: Any, size: Any
) -> Callable[..., None]:
    return lambda rows, weights, out, stride, size: _multiply_integers(
        rows, weights, out, stride, size
    )
