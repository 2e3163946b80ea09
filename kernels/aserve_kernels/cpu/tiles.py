"""Tiles of a GEMM, as intrinsics: a few rows times a packed block of outputs.

A tile is 8 rows by 32 outputs in the registers of AVX-512, or 6 rows by 16 outputs in those of AVX2
(as GotoBLAS and BLIS do), so the arithmetic is the limit and not the loads. bfloat16 is multiplied
in pairs (vdpbf16ps) where the CPU is fast at that. Inputs of float32 may have weights of bfloat16,
which are widened as they are loaded. Tiles of more rows are in wide_tiles.py. The plain functions
run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_name
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.bf16 import Float32s, Floats, narrow, widen
from aserve_kernels.cpu.processor import HAS_AVX512, HAS_AVX512_BF16
from aserve_kernels.cpu.simd import (
    FLOAT32X16,
    IN_L2,
    INDEX,
    INT16X16,
    INT32X16,
    LANES,
    Intrinsic,
    emit_call,
    emit_prefetch,
    emit_splat,
)

DPBF16PS = "llvm.x86.avx512bf16.dpbf16ps.512"
# These cores of Intel have half as many products per second by vdpbf16ps as by FMAs of float32.
# PERF: a Xeon, 2 threads: 172 and 353 GFLOP/s. Qwen3-0.6B's layers with 32 and 128 rows, time of
# widened pairs over that of vdpbf16ps: 0.83 and 0.84.
GOLDEN_COVES = ("sapphirerapids", "emeraldrapids")
HAS_FAST_PAIRS = HAS_AVX512_BF16 and get_host_cpu_name() not in GOLDEN_COVES
ROWS, VECTORS = (8, 2) if HAS_AVX512 else (6, 1)  # of a tile
OUTPUTS = VECTORS * LANES  # of a packed block of the weight
WORD, HALF_WORD = ir.IntType(32), ir.IntType(16)
# Weights are prefetched into the L2 cache, past the end of a page, where the hardware's prefetches
# stop. A block's only tile prefetches this many vectors ahead. Where a block has more of them, all
# but the first find its weights in the cache, so each prefetches a part of the next block, if both
# blocks fit there. PERF: Qwen3-0.6B's layers and head in bfloat16, 2 threads, 1, 2, 4, 8, 32 rows,
# time over that without, AVX2, all tiles 64 vectors ahead: 0.92, 0.95, 0.86, 0.83, 0.92. Then the
# next block, 8 rows, five pairs of processes: 0.94 to 1.00. AVX-512 (a Xeon), 1, 8, 32, 128 rows:
# 0.84, 0.72, 0.88, 0.96, and 128 vectors ahead 0.81, 0.74, 0.89, 0.95.
AHEAD = 64
NEXT_BYTES = 1 << 17 if HAS_AVX512 else 3 << 16  # of one block, or of two


@njit(inline="always")
def outputs_of(num_out: int, worker: int, num_workers: int) -> tuple[int, int]:
    """Returns a worker's first output, and the one after its last. Shares are whole blocks."""
    num_blocks = -(-num_out // OUTPUTS)
    first = num_blocks * worker // num_workers * OUTPUTS
    return first, min(num_out, num_blocks * (worker + 1) // num_workers * OUTPUTS)


@njit(inline="always")
def prefetched_by(tile: int, num_tiles: int, packed: Floats, start: int, size: int) -> Floats:
    """Returns the weights that tile number `tile` of one or two blocks prefetches, [n], of which
    `packed` may have fewer or none. The blocks are packed[start : start + size]."""
    if num_tiles == 1 or size * packed.itemsize > NEXT_BYTES:
        first = start + AHEAD * LANES * 4 // packed.itemsize
        return packed[first : first + size]
    end = start + size
    return packed[end + size * tile // num_tiles : end + size * (tile + 1) // num_tiles]


def multiply_tile(
    x: Floats, blocks: tuple[Floats, Floats], bias: Float32s, out: Floats, stride: int, size: int
) -> None:
    """One tile: 1 to `size` contiguous rows of x times a packed block of outputs, plus bias.

    Row r of the result is out[r * stride : r * stride + OUTPUTS], which is rounded if `out` is
    bfloat16. `blocks` are that of the outputs, and weights that may be prefetched meanwhile. `size`
    is a literal. All arrays are [n].
    """
    block = blocks[0]
    pair = 2 if block.dtype == np.uint16 else 1
    num_in = len(block) // OUTPUTS
    rows = min(len(x) // num_in, size)
    inputs, weights = np.empty(rows * num_in, np.float32), np.empty(len(block), np.float32)
    widen(x[: rows * num_in], inputs)
    widen(block, weights)
    by_input = weights.reshape(-1, OUTPUTS, pair).transpose(0, 2, 1).reshape(num_in, OUTPUTS)
    products = inputs.reshape(rows, num_in) @ by_input + bias
    for row in range(rows):
        narrow(products[row], out[row * stride : row * stride + OUTPUTS])


@intrinsic(prefer_literal=True)
def _multiply_tile(
    typing: Any, x: Any, blocks: Any, bias: Any, out: Any, stride: Any, size: Any
) -> Intrinsic | None:
    if not isinstance(size, types.IntegerLiteral):
        return None
    block, next_ = blocks.types
    is_paired, is_mixed = block.dtype == types.uint16, x.dtype != block.dtype

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def data(kind: Any, value: Any, vector: ir.Type) -> Any:
            pointer = context.make_array(kind)(context, builder, value).data
            return builder.bitcast(pointer, vector.as_pointer())

        num_inputs = context.make_array(x)(context, builder, args[0]).nitems
        weights, following = (builder.extract_value(args[1], number) for number in range(2))
        num_weights = context.make_array(block)(context, builder, weights).nitems
        per_step = 2 * OUTPUTS if is_paired else OUTPUTS
        num_steps = builder.udiv(num_weights, INDEX(per_step))
        tile = TileEmitter(builder, is_paired, is_mixed=is_mixed)
        first = data(x, args[0], tile.scalar)
        # Missing rows repeat the last one: it is computed and stored again.
        num_rows = builder.udiv(builder.mul(num_inputs, INDEX(OUTPUTS)), num_weights)
        last = builder.sub(num_rows, INDEX(1))
        rows = [minimum(builder, INDEX(row), last) for row in range(size.literal_value)]
        per_row = builder.mul(num_steps, INDEX(2)) if is_mixed else num_steps  # scalars
        sources = [builder.gep(first, [builder.mul(row, per_row)]) for row in rows]
        sums = tile.start(data(bias, args[2], FLOAT32X16), len(rows))
        vectors = data(block, weights, tile.vector)
        paced = tile.paced(context.make_array(next_)(context, builder, following), num_steps)
        with cgutils.for_range(builder, num_steps, intp=INDEX) as loop:
            tile.add(sums, sources, vectors, loop.index)
            tile.prefetch(paced, loop.index)
        targets = data(out, args[3], HALF_WORD if out.dtype == types.uint16 else ir.FloatType())
        for row, row_sums in zip(rows, sums, strict=True):
            tile.store(row_sums, builder.gep(targets, [builder.mul(args[4], row)]))
        return context.get_dummy_value()

    return types.void(x, blocks, bias, out, types.intp, size), emit


def _words(value: int) -> Any:
    return ir.Constant(INT32X16, [value] * LANES)


def minimum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


class TileEmitter:
    """Emits the instructions of a tile. Its sums are variables that LLVM keeps in registers.

    Weights are vectors of float32, or of pairs of bfloat16 (`is_paired`), whose inputs are such
    pairs as well, or two float32 (`is_mixed`).
    """

    __slots__ = ("_builder", "_is_mixed", "_is_paired", "scalar", "vector")

    def __init__(self, builder: Any, is_paired: bool, *, is_mixed: bool = False) -> None:
        self._builder = builder
        self._is_paired = is_paired
        self._is_mixed = is_mixed
        self.scalar = WORD if is_paired and not is_mixed else ir.FloatType()
        self.vector = INT32X16 if is_paired else FLOAT32X16

    def start(self, bias: Any, num_rows: int) -> list[list[Any]]:
        first = [self._load(bias, number) for number in range(VECTORS)]
        return [
            [cgutils.alloca_once_value(self._builder, value) for value in first]
            for _ in range(num_rows)
        ]

    def add(self, sums: list[list[Any]], sources: list[Any], weights: Any, step: Any) -> None:
        """Adds one input, or pair of inputs, of every row times the weights of all outputs."""
        builder = self._builder
        start = builder.gep(weights, [builder.mul(step, INDEX(VECTORS))])
        loaded = [self._load(start, number) for number in range(VECTORS)]
        if not self._is_mixed:
            self._add_input(sums, sources, loaded, step)
            return
        first = builder.mul(step, INDEX(2))
        self._add_input(sums, sources, [self._low(pairs) for pairs in loaded], first)
        # PERF: loaded again, because no register is left to keep them in. LLVM must not know.
        again = self._opaque(start)
        loaded = [self._load(again, number) for number in range(VECTORS)]
        second = builder.add(first, INDEX(1))
        self._add_input(sums, sources, [self._high(pairs) for pairs in loaded], second)

    def _add_input(
        self, sums: list[list[Any]], sources: list[Any], weights: list[Any], at: Any
    ) -> None:
        """Adds scalar number `at` of every row times the weights of all outputs."""
        builder = self._builder
        for row_sums, source in zip(sums, sources, strict=True):
            value = builder.load(builder.gep(source, [at]), align=2 if self._is_paired else 4)
            broadcast = self._splat(value)
            for variable, weight in zip(row_sums, weights, strict=True):
                total = self._add_product(builder.load(variable), broadcast, weight)
                builder.store(total, variable)

    def paced(self, array: Any, num_steps: Any) -> tuple[Any, Any]:
        """Returns where an array begins, and how many of its elements each step prefetches.

        WHY: LLVM leaves this division in the loop of a mixed tile, because of the assembly there,
        and spills registers around it. PERF: 4, 6, 32 and
        2,000 rows of inputs of float32 and weights of bfloat16, layers of Qwen3-0.6B, 2 threads,
        AVX2, time over that with a division in each step: 0.58, 0.67, 0.65, 0.64.
        """
        builder = self._builder
        is_empty = builder.icmp_unsigned("==", num_steps, INDEX(0))
        divisor = builder.select(is_empty, INDEX(1), num_steps)
        return array.data, builder.udiv(array.nitems, divisor)

    def prefetch(self, paced: tuple[Any, Any], step: Any) -> None:
        """Prefetches a step's share of an array."""
        builder, (data, pace) = self._builder, paced
        lines = builder.bitcast(
            builder.gep(data, [builder.mul(step, pace)]), FLOAT32X16.as_pointer()
        )
        for number in range(VECTORS):
            emit_prefetch(builder, builder.gep(lines, [WORD(number)]), IN_L2)

    def store(self, row_sums: list[Any], target: Any) -> None:
        """Stores to `target`, of which the type decides: float32, or the bits of bfloat16."""
        is_narrow = target.type.pointee == HALF_WORD
        vector = INT16X16 if is_narrow else FLOAT32X16
        vectors = self._builder.bitcast(target, vector.as_pointer())
        for number, variable in enumerate(row_sums):
            address = self._builder.gep(vectors, [WORD(number)])
            total = self._builder.load(variable)
            if is_narrow:
                total = self._rounded(total)
            self._builder.store(total, address, align=2 if is_narrow else 4)

    def _rounded(self, total: Any) -> Any:
        """The bits of bfloat16 next to float32 values, ties to even; NaN becomes the quiet one."""
        builder = self._builder
        bits = builder.bitcast(total, INT32X16)
        is_odd = builder.and_(builder.lshr(bits, _words(16)), _words(1))
        nearest = builder.lshr(builder.add(builder.add(bits, _words(0x7FFF)), is_odd), _words(16))
        is_nan = builder.fcmp_unordered("uno", total, total)
        return builder.trunc(builder.select(is_nan, _words(0x7FC0), nearest), INT16X16)

    def _load(self, vectors: Any, number: int) -> Any:
        return self._builder.load(self._builder.gep(vectors, [WORD(number)]), align=2)

    def _opaque(self, value: Any) -> Any:
        """Returns the same pointer or vector, of which LLVM does not know where it comes from."""
        kind = ir.FunctionType(value.type, [value.type])
        register = "=x,0" if isinstance(value.type, ir.VectorType) else "=r,0"
        return self._builder.asm(kind, "", register, [value], side_effect=True)

    def _splat(self, value: Any) -> Any:
        return emit_splat(self._builder, value)

    def _add_products(self, variables: list[Any], factors: list[Any], vector: Any) -> None:
        """Adds a vector times each factor to the variable beside it."""
        for variable, factor in zip(variables, factors, strict=True):
            total = self._add_product(self._builder.load(variable), factor, vector)
            self._builder.store(total, variable)

    def _add_product(self, total: Any, left: Any, right: Any) -> Any:
        if isinstance(left.type.element, ir.FloatType):
            name = f"llvm.fmuladd.v{left.type.count}f32"
            return self._call(name, left, right, total, result=left.type)
        if HAS_FAST_PAIRS:
            return self._call(DPBF16PS, total, left, right)
        for widen_half in (self._low, self._high):
            total = self._call(
                f"llvm.fmuladd.v{LANES}f32", widen_half(left), widen_half(right), total
            )
        return total

    def _call(self, name: str, *args: Any, result: ir.Type = FLOAT32X16) -> Any:
        return emit_call(self._builder, name, *args, result=result)

    def _low(self, pairs: Any) -> Any:
        """Returns the first elements of pairs of bfloat16 as float32."""
        lanes = pairs.type.count
        shifted = self._builder.shl(pairs, ir.Constant(pairs.type, [16] * lanes))
        return self._builder.bitcast(shifted, ir.VectorType(ir.FloatType(), lanes))

    def _high(self, pairs: Any) -> Any:
        """Returns the second elements of pairs of bfloat16 as float32."""
        lanes = pairs.type.count
        masked = self._builder.and_(pairs, ir.Constant(pairs.type, [0xFFFF0000] * lanes))
        return self._builder.bitcast(masked, ir.VectorType(ir.FloatType(), lanes))


@overload(multiply_tile, strict=False, prefer_literal=True)
def _overload_multiply_tile(
    x: Any, blocks: Any, bias: Any, out: Any, stride: Any, size: Any
) -> Callable[..., None]:
    return lambda x, blocks, bias, out, stride, size: _multiply_tile(
        x, blocks, bias, out, stride, size
    )
