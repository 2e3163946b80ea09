"""Emits the products of a tile: rows of integers with the codes of a block of outputs, by
instructions that multiply bytes or int16 and add neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from aserve_kernels.cpu.processor import HAS_AVX2, HAS_AVX512BW, HAS_VNNI
from aserve_kernels.cpu.quant_codes import BYTES_PER_WORD, CODES_PER_WORD, CodeKind
from aserve_kernels.cpu.quant_rows import INTEGERS_LIKE
from aserve_kernels.cpu.simd import (
    FLOAT32X16,
    IN_L2,
    INDEX,
    INT8X32,
    INT8X64,
    INT16X32,
    INT32X16,
    LANES,
    emit_prefetch,
)
from aserve_kernels.cpu.tiles import VECTORS, WORD, TileEmitter, minimum

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


@dataclass(frozen=True, slots=True)
class TileRow:
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
class ProductSizes:
    """The sizes of a product."""

    num_groups: Any
    group: Any  # inputs
    span: Any  # inputs
    per_group: Any  # spans
    num_factors: Any  # vectors of a group


class DotEmitter(TileEmitter):
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

    def row(self, number: Any, arrays: list[Any], sizes: list[Any], bias: Any) -> TileRow:
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
        return TileRow(integers, zeros, steps, sums, target, of_span, of_pairs, of_group, totals)

    def add_group(
        self, rows: list[TileRow], codes: Any, factors: Any, sizes: ProductSizes, group: Any
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
            own = builder.gep(factors, [builder.mul(group, sizes.num_factors)])
            self.end_group(row, own, builder.gep(row.sums, [group]), sizes)

    def _add_span(self, rows: list[TileRow], codes: Any, span: Any, start: Any, size: Any) -> None:
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
            step = builder.load(builder.gep(row.steps, [span]))
            for number, variable in enumerate(row.of_group):
                self.add_scaled(self._summed(row.of_span, number), step, variable)

    def add_scaled(self, dots: Any, step: Any, total: Any) -> None:
        """Adds the sums of a span times its step, in floating point, to those of the group."""
        builder = self._builder
        wide = builder.sitofp(dots, FLOAT32X16)
        builder.store(self._fma(wide, self._wide(step), builder.load(total)), total)

    def _add_by_int16(
        self, rows: list[TileRow], places: list[Any], codes: Any, num_steps: Any
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

    def _add_step(self, rows: list[TileRow], places: list[Any], codes: Any, step: Any) -> None:
        """Adds the products of the inputs of a step. `places` and `codes` are where the integers of
        each row and the codes of the span begin."""
        builder = self._builder
        start = builder.gep(codes, [builder.mul(step, INDEX(VECTORS))])
        for number in range(VECTORS):
            emit_prefetch(builder, builder.gep(start, [INDEX(AHEAD + number)]), IN_L2)
        operands = list(self.operands(start))
        first = builder.mul(step, INDEX(len(operands)))
        for number, vectors in enumerate(operands):
            at = builder.add(first, INDEX(number))
            for row, place in zip(rows, places, strict=True):
                word = self._splat(builder.load(builder.gep(place, [at]), align=1))
                sums = row.of_pairs if self._has_int16_sums else row.of_span
                own = sums[number % self._num_partial]
                for variable, vector in zip(own, vectors, strict=True):
                    builder.store(self._dot(builder.load(variable), vector, word), variable)

    def operands(self, start: Any) -> Iterator[list[Any]]:
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

    def end_group(self, row: TileRow, own: Any, of_inputs: Any, sizes: ProductSizes) -> None:
        """Adds scale * sum of the group + offset * sum of its inputs to the totals. `own` are the
        factors of the group, and `of_inputs` is where the sum of its inputs is."""
        builder = self._builder
        if self._has_exponents:
            for number, (variable, total) in enumerate(zip(row.of_group, row.totals, strict=True)):
                exponents = builder.zext(self._load(own, number), INT32X16)
                bits = builder.shl(exponents, ir.Constant(INT32X16, [EXPONENT_BIT] * LANES))
                scale = builder.bitcast(bits, FLOAT32X16)
                whole = self._fma(builder.load(variable), scale, builder.load(total))
                builder.store(whole, total)
            return
        has_offsets = builder.icmp_unsigned(">", sizes.num_factors, INDEX(VECTORS))
        # Without offsets the sum of inputs counts as zero, and the scales stand for them.
        added = self._wide(
            builder.select(has_offsets, builder.load(of_inputs), ir.FloatType()(0.0))
        )
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
