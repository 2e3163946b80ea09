"""Products with weights of 8 and 4 bits in floating point, for processors without dot products of
integers.

    y[t, o] = b[o] + sum_g (scales[o, g] * sum_i x[t, i] code[o, i] + offsets[o, g] * sum_i x[t, i])

For a few rows codes are multiplied as they are, and the sums are scaled. For more, a block of
weights is decoded once, rounded to the dtype of x, and multiplied as in gemm.

The plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.bf16 import Float32s, Floats, narrow, widen, widened
from aserve_kernels.cpu.gemm import (
    OUTPUTS,
    VECTORS,
    TileEmitter,
    minimum,
    multiply_blocks,
    outputs_of,
)
from aserve_kernels.cpu.precompile import NO_REFCOUNT
from aserve_kernels.cpu.quant_codes import CODES_PER_WORD, ZEROS, Codes, QuantWeight, unpack_codes
from aserve_kernels.cpu.simd import FLOAT32X16, INDEX, INT8X16, INT32X16, LANES, Intrinsic

MAX_TILE_ROWS = 8
# Rows that pass over the codes together. PERF: 8 rows took 0.66 ms with 8 bits, and 0.74 in halves,
# but 0.65 and 0.50 with 4 bits (6,144 outputs, 1,024 inputs, one thread).
MOST_AT_ONCE, MOST_OF_4_BITS = 8, 4
NO_BIAS = np.zeros(OUTPUTS, np.float32)
WIDE_ROWS = 256  # that are multiplied with a decoded block at a time
# Sums of a vector of outputs that take turns. PERF: one alone would wait for itself with 4 bits.
NUM_SUMS = {8: 1, 4: 2}


@njit(nogil=True)
def multiply_by_floats(
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


def multiply_codes(
    x: Floats, codes: Codes, factors: Float32s, sums: Float32s, out: Float32s, size: int
) -> None:
    """Adds the products of 1 to `size` contiguous rows with a block of outputs to a tile.

    codes are those of the block, and factors [groups, 1 or 2, 32] its scales and offsets. Without
    offsets `sums` is empty, else sums [rows, groups] has the sum of each group of x. out
    [rows, 32], at most `size` rows, which is a literal. All arrays are flat.
    """
    num_rows = len(out) // OUTPUTS
    by_group = factors.reshape(-1, 2 if len(sums) else 1, OUTPUTS)
    num_groups = len(by_group)
    num_in = len(codes) * (1 if codes.dtype == np.int8 else CODES_PER_WORD) // OUTPUTS
    weights = unpack_codes(codes, num_in).astype(np.float32).reshape(OUTPUTS, num_groups, -1)
    row = np.empty(num_in, np.float32)
    for number in range(num_rows):
        widen(x[number * num_in : (number + 1) * num_in], row)
        products = (weights * row.reshape(num_groups, -1)).sum(axis=2)
        tile = out[number * OUTPUTS : (number + 1) * OUTPUTS]
        tile += (products * by_group[:, 0].T).sum(axis=1)
        if len(sums):
            tile += by_group[:, 1].T @ sums[number * num_groups : (number + 1) * num_groups]


def decode_group(codes: Codes, factors: Float32s, target: Floats) -> None:
    """Writes the weights of a group and block as gemm packs them, rounded to the dtype of `target`.
    factors [64] has the scales and the offsets."""
    num_in = len(target) // OUTPUTS
    scales, offsets = factors[:OUTPUTS, None], factors[OUTPUTS:, None]
    weights = unpack_codes(codes, num_in) * scales + offsets  # [32, in]
    pair = 2 if target.dtype == np.uint16 else 1
    by_pair = weights.reshape(OUTPUTS, num_in // pair, pair).transpose(1, 0, 2)
    narrow(np.ascontiguousarray(by_pair, np.float32).reshape(-1), target)


@dataclass(frozen=True, slots=True)
class _Tile:
    """The rows of a tile: their numbers, where their inputs and results are, and the variables of
    each vector of outputs: its total, and the sums of the products of a group."""

    rows: list[Any]
    sources: list[Any]
    targets: list[Any]
    totals: list[list[Any]]
    chains: list[list[list[Any]]]


class _Decoder(TileEmitter):
    """Emits the instructions that turn packed codes into operands of products: for each pair of
    inputs and vector of outputs two vectors of float32."""

    __slots__ = ("_bits", "num_pairs")

    def __init__(self, builder: Any, is_paired: bool, bits: int) -> None:
        super().__init__(builder, is_paired)
        self._bits = bits
        self.num_pairs = 1 if bits == 8 else CODES_PER_WORD // 2  # of inputs, in a step

    def _chains(self) -> list[Any]:
        zero = ir.Constant(FLOAT32X16, [0.0] * LANES)
        count = NUM_SUMS[self._bits]
        return [cgutils.alloca_once_value(self._builder, zero) for _ in range(count)]

    def floats(self, codes: Any, step: Any) -> Iterator[list[Any]]:
        """Yields the codes of each pair of inputs: two vectors of float32 for each vector of
        outputs."""
        loaded = self._loaded(codes, step)
        if self._bits == 8:
            wide = [self._builder.sitofp(each, FLOAT32X16) for each in loaded]
            yield [(wide[2 * vector], wide[2 * vector + 1]) for vector in range(VECTORS)]
            return
        for pair in range(self.num_pairs):
            yield [
                (self._digit(words, 4 * pair), self._digit(words, 16 + 4 * pair))
                for words in loaded
            ]

    def add_pair(self, chains: list[Any], source: Any, at: Any, operands: list[Any]) -> None:
        """Adds the products of pair number `at` of a row to the sums of its vectors."""
        builder = self._builder
        values = self._values(source, at)
        for chain, operand in zip(chains, operands, strict=True):
            total = builder.load(chain)
            for value, half in zip(values, operand, strict=True):
                total = self._fma(value, half, total)
            builder.store(total, chain)

    def write_pair(self, operands: Any, factors: Any, target: Any, at: Any) -> None:
        """Writes scale * code + offset of pair number `at` as gemm packs weights."""
        builder = self._builder
        first = builder.mul(at, INDEX(VECTORS if self._is_paired else 2 * VECTORS))
        for number, halves in enumerate(operands):
            scale, offset = (self._load(factors, i) for i in (number, VECTORS + number))
            wide = [self._fma(half, scale, offset) for half in halves]
            places = [number] if self._is_paired else [number, VECTORS + number]
            for place, value in zip(places, self._narrowed(wide), strict=True):
                address = builder.gep(target, [builder.add(first, INDEX(place))])
                builder.store(value, address, align=2)

    def _narrowed(self, halves: list[Any]) -> list[Any]:
        """Rounds to bfloat16, in pairs, if that is the dtype; a tie rounds up."""
        if not self._is_paired:
            return halves
        builder = self._builder
        rounding = ir.Constant(INT32X16, [1 << 15] * LANES)
        low, high = (builder.add(builder.bitcast(half, INT32X16), rounding) for half in halves)
        upper = ir.Constant(INT32X16, [0xFFFF0000] * LANES)
        return [builder.or_(self._halved(low), builder.and_(high, upper))]

    def _values(self, source: Any, at: Any) -> list[Any]:
        """Returns a pair of inputs for all lanes."""
        builder = self._builder
        if self._is_paired:
            word = self._splat(builder.load(builder.gep(source, [at]), align=2))
            return [self._low(word), self._high(word)]
        places = [builder.add(builder.mul(at, INDEX(2)), INDEX(half)) for half in range(2)]
        return [self._splat(builder.load(builder.gep(source, [at]), align=4)) for at in places]

    def _loaded(self, codes: Any, step: Any) -> list[Any]:
        vector, count = (INT8X16, 2 * VECTORS) if self._bits == 8 else (INT32X16, VECTORS)
        first = self._builder.bitcast(codes, vector.as_pointer())
        start = self._builder.gep(first, [self._builder.mul(step, INDEX(count))])
        return [
            self._builder.load(self._builder.gep(start, [INDEX(i)]), align=1) for i in range(count)
        ]

    def _halved(self, words: Any) -> Any:
        return self._builder.lshr(words, ir.Constant(INT32X16, [16] * LANES))

    def _fma(self, left: Any, right: Any, total: Any) -> Any:
        return self._call(f"llvm.fmuladd.v{LANES}f32", left, right, total)

    def _digit(self, words: Any, shift: int) -> Any:
        builder = self._builder
        shifted = builder.lshr(words, ir.Constant(INT32X16, [shift] * LANES))
        masked = builder.and_(shifted, ir.Constant(INT32X16, [15] * LANES))
        code = builder.add(masked, ir.Constant(INT32X16, [-ZEROS[4]] * LANES))
        return builder.sitofp(code, FLOAT32X16)

    def tile(self, rows: list[Any], inputs: Any, stride: Any, out: Any) -> _Tile:
        """Returns the variables of a tile: `rows` of x, `stride` scalars each, and of `out`."""
        builder = self._builder
        targets = [builder.gep(out, [builder.mul(row, INDEX(VECTORS))]) for row in rows]
        return _Tile(
            rows,
            sources=[builder.gep(inputs, [builder.mul(row, stride)]) for row in rows],
            targets=targets,
            totals=[
                [cgutils.alloca_once_value(builder, self._load(target, i)) for i in range(VECTORS)]
                for target in targets
            ],
            chains=[[self._chains() for _ in range(VECTORS)] for _ in rows],
        )

    def add_step(self, tile: _Tile, codes: Any, step: Any) -> None:
        """Adds the products of a step to the chains."""
        builder = self._builder
        for pair, operands in enumerate(self.floats(codes, step)):
            at = builder.add(builder.mul(step, INDEX(self.num_pairs)), INDEX(pair))
            for row_chains, source in zip(tile.chains, tile.sources, strict=True):
                own = [chains[pair % len(chains)] for chains in row_chains]
                self.add_pair(own, source, at, operands)

    def finish_group(self, tile: _Tile, scales: Any) -> None:
        """Adds the scaled sums of a group to the totals, and makes the chains zero again."""
        builder, zero = self._builder, ir.Constant(FLOAT32X16, [0.0] * LANES)
        for number in range(VECTORS):
            scale = self._load(scales, number)
            for totals, row_chains in zip(tile.totals, tile.chains, strict=True):
                first, *others = row_chains[number]
                whole = builder.load(first)
                for chain in others:
                    whole = builder.fadd(whole, builder.load(chain))
                total = totals[number]
                builder.store(self._fma(whole, scale, builder.load(total)), total)
                for chain in row_chains[number]:
                    builder.store(zero, chain)

    def add_offsets(self, tile: _Tile, offsets: Any, sums: Any, group: Any, count: Any) -> None:
        """Adds the offsets of a group, one of `count`, times the sums of its inputs."""
        builder = self._builder
        for row, totals in zip(tile.rows, tile.totals, strict=True):
            at = builder.add(builder.mul(row, count), group)
            value = builder.load(builder.gep(sums, [at]), align=4)
            wide = builder.bitcast(self._splat(value), FLOAT32X16)
            for number, total in enumerate(totals):
                product = self._fma(wide, self._load(offsets, number), builder.load(total))
                builder.store(product, total)


def _pointer(context: Any, builder: Any, kind: Any, value: Any, element: ir.Type) -> Any:
    return builder.bitcast(
        context.make_array(kind)(context, builder, value).data, element.as_pointer()
    )


def _length(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value).nitems


def _num_steps(context: Any, builder: Any, codes: Any, value: Any) -> Any:
    """Returns how many steps the codes take: of 64 bytes (8 bits) or of 128 (4 bits)."""
    num_codes = _length(context, builder, codes, value)
    return builder.udiv(num_codes, INDEX(2 * OUTPUTS if codes.dtype == types.int8 else OUTPUTS))


@intrinsic(prefer_literal=True)
def _multiply_codes(
    typing: Any, x: Any, codes: Any, factors: Any, sums: Any, out: Any, size: Any
) -> Intrinsic | None:
    if not isinstance(size, types.IntegerLiteral):
        return None
    bits = 8 if codes.dtype == types.int8 else 4
    is_paired = x.dtype == types.uint16
    arrays = (x, codes, factors, sums, out)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        decoder = _Decoder(builder, is_paired, bits)
        kinds = (decoder.scalar, ir.IntType(8), FLOAT32X16, decoder.scalar, FLOAT32X16)
        inputs, packed, first_factor, group_sums, target = (
            _pointer(context, builder, array, arg, kind)
            for array, arg, kind in zip(arrays, args, kinds, strict=False)
        )
        num_steps = _num_steps(context, builder, codes, args[1])
        has_offsets = builder.icmp_unsigned(">", _length(context, builder, sums, args[3]), INDEX(0))
        per_group = builder.select(has_offsets, INDEX(2 * VECTORS), INDEX(VECTORS))
        num_vectors = builder.udiv(_length(context, builder, factors, args[2]), INDEX(LANES))
        num_groups = builder.udiv(num_vectors, per_group)
        steps = builder.udiv(num_steps, num_groups)  # of a group
        stride = builder.mul(num_steps, INDEX(decoder.num_pairs * (1 if is_paired else 2)))
        num_rows = builder.udiv(_length(context, builder, out, args[4]), INDEX(OUTPUTS))
        last = builder.sub(num_rows, INDEX(1))
        # Missing rows repeat the last one: it is computed and stored again.
        rows = [minimum(builder, INDEX(row), last) for row in range(size.literal_value)]
        tile = decoder.tile(rows, inputs, stride, target)
        with cgutils.for_range(builder, num_groups, intp=INDEX) as groups:
            first = builder.mul(groups.index, steps)
            with cgutils.for_range(builder, steps, intp=INDEX) as loop:
                decoder.add_step(tile, packed, builder.add(first, loop.index))
            scales = builder.gep(first_factor, [builder.mul(groups.index, per_group)])
            decoder.finish_group(tile, scales)
            with builder.if_then(has_offsets):
                offsets = builder.gep(scales, [INDEX(VECTORS)])
                decoder.add_offsets(tile, offsets, group_sums, groups.index, num_groups)
        for row_target, totals in zip(tile.targets, tile.totals, strict=True):
            decoder.store(totals, row_target)
        return context.get_dummy_value()

    return types.void(*arrays, size), emit


@intrinsic
def _decode_group(typing: Any, codes: Any, factors: Any, target: Any) -> Intrinsic:
    bits = 8 if codes.dtype == types.int8 else 4
    is_paired = target.dtype == types.uint16

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        decoder = _Decoder(builder, is_paired, bits)
        packed = _pointer(context, builder, codes, args[0], ir.IntType(8))
        scales = _pointer(context, builder, factors, args[1], FLOAT32X16)
        written = _pointer(context, builder, target, args[2], decoder.vector)
        num_steps = _num_steps(context, builder, codes, args[0])
        with cgutils.for_range(builder, num_steps, intp=INDEX) as loop:
            for pair, operands in enumerate(decoder.floats(packed, loop.index)):
                at = builder.add(builder.mul(loop.index, INDEX(decoder.num_pairs)), INDEX(pair))
                decoder.write_pair(operands, scales, written, at)
        return context.get_dummy_value()

    return types.void(codes, factors, target), emit


@overload(multiply_codes, strict=False, prefer_literal=True)
def _overload_multiply_codes(
    x: Any, codes: Any, factors: Any, sums: Any, out: Any, size: Any
) -> Callable[..., None]:
    return lambda x, codes, factors, sums, out, size: _multiply_codes(
        x, codes, factors, sums, out, size
    )


@overload(decode_group, strict=False)
def _overload_decode_group(codes: Any, factors: Any, target: Any) -> Callable[..., None]:
    return lambda codes, factors, target: _decode_group(codes, factors, target)
