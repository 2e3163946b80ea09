"""Tiles of twelve rows for weights of bfloat16 that are widened as they are loaded (AVX-512).

Rows are first widened and transposed, [tiles, in, 16], of which 12 are used. So each product takes
its input from memory as a broadcast operand, which needs neither an instruction nor a register of
its own, and a widened weight is multiplied by twelve rows in place of eight.

PERF: a loop of such tiles in C does 136 GFLOP/s per thread of a Xeon whose other hyperthreads are
busy, so that it takes fewer instructions per cycle, and one of 8 rows 108; else 160 and 152.

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
from aserve_kernels.cpu.memory import FLOAT32_LIKE, scratch
from aserve_kernels.cpu.packing import transpose_pairs
from aserve_kernels.cpu.precompile import NO_REFCOUNT
from aserve_kernels.cpu.processor import HAS_AVX512
from aserve_kernels.cpu.simd import FLOAT32X16, INDEX, INT32X16, LANES, Intrinsic
from aserve_kernels.cpu.tiles import (
    HALF_WORD,
    HAS_FAST_PAIRS,
    OUTPUTS,
    VECTORS,
    TileEmitter,
    minimum,
    multiply_tile,
    prefetched_by,
)

WIDE_ROWS = 12
LEAST_ROWS = 6  # fewer are as fast in tiles of their own size
# PERF: the rows that pass over the weights together stay in the L2 cache.
BLOCK_BYTES = 1 << 19


def multiply_wide(
    x: Floats, packed: Floats, bias: Float32s, out: Floats, first: int, last: int
) -> bool:
    """Computes the outputs from `first` to `last` - 1, which are whole blocks, of x [tokens, in],
    and returns whether it did: it does not for other machines and dtypes, and for few rows."""
    if not _is_widened(x.dtype == np.uint16, packed.dtype == np.uint16):
        return False
    is_done: bool = _multiply_many(x, packed, bias, out, first, last)
    return is_done


def _is_widened(has_narrow_inputs: bool, has_narrow_weights: bool) -> bool:
    """Whether a product of such dtypes, bfloat16 or float32, widens weights."""
    return HAS_AVX512 and has_narrow_weights and not (has_narrow_inputs and HAS_FAST_PAIRS)


@njit(nogil=True)
def _multiply_many(
    x: Floats, packed: Floats, bias: Float32s, out: Floats, first: int, last: int
) -> bool:
    num_rows, num_in = x.shape
    if num_rows < LEAST_ROWS:
        return False
    padded = -(-num_in // LANES) * LANES
    most = max(1, BLOCK_BYTES // (padded * LANES * 4))  # tiles at once
    num_floats = min(most, -(-num_rows // WIDE_ROWS)) * padded * LANES
    tiles = scratch((num_floats,), FLOAT32_LIKE)
    rows = scratch((WIDE_ROWS * padded,), FLOAT32_LIKE)
    starts = np.minimum(np.arange(LANES), WIDE_ROWS - 1) * 2 * padded
    for start in range(0, num_rows, most * WIDE_ROWS):
        end = min(num_rows, start + most * WIDE_ROWS)
        num_tiles = -(-(end - start) // WIDE_ROWS)
        for tile in range(num_tiles):
            tile_start = start + tile * WIDE_ROWS
            pack_rows(x[tile_start:end], rows, starts, tiles[tile * padded * LANES :])
        _multiply_tiles(tiles, packed, bias, out[start:end], first, last, num_in)
    return True


@njit(nogil=True, **NO_REFCOUNT)
def pack_rows(x: Floats, rows: Float32s, starts: Int64s, tile: Float32s) -> None:
    """Writes the first twelve rows of x [1 or more, in] as [in, 16]. The last row of x stands for
    missing ones. rows [12, in padded to whole vectors], flat, is scratch, and `starts` are those of
    sixteen rows of it, in halves of a float32."""
    padded, num_in = len(rows) // WIDE_ROWS, x.shape[1]
    for row in range(WIDE_ROWS):
        widen(x[min(row, x.shape[0] - 1)], rows[row * padded : row * padded + num_in])
    halves, target = rows.view(np.uint16), tile.view(np.uint16)
    for i in range(0, padded, LANES):
        transpose_pairs(halves[2 * i :], starts, target, 2 * i * LANES, 2 * LANES)


@njit(nogil=True, **NO_REFCOUNT)
def _multiply_tiles(
    tiles: Float32s, packed: Floats, bias: Float32s, out: Floats, first: int, last: int, num_in: int
) -> None:
    """Computes these outputs of the rows of `tiles`; out [rows, all outputs]."""
    num_rows, num_out = out.shape
    outputs, num_tiles = out.reshape(-1), -(-num_rows // WIDE_ROWS)
    padded = -(-num_in // LANES) * LANES
    for output in range(first, last, OUTPUTS):
        weights = packed[output * num_in : (output + OUTPUTS) * num_in]
        block_bias = bias[output : output + OUTPUTS]
        for tile in range(num_tiles):
            row = tile * WIDE_ROWS
            inputs, target = tiles[tile * padded * LANES :], outputs[row * num_out + output :]
            following = prefetched_by(tile, num_tiles, packed, output * num_in, len(weights))
            blocks, rest = (weights, following), num_rows - row
            if rest > 8:
                multiply_wide_tile(inputs, blocks, block_bias, target, num_out, WIDE_ROWS)
            elif rest > 4:
                multiply_wide_tile(inputs, blocks, block_bias, target, num_out, 8)
            else:
                multiply_wide_tile(inputs, blocks, block_bias, target, num_out, 4)


def multiply_wide_tile(
    x: Float32s, blocks: tuple[Floats, Floats], bias: Float32s, out: Floats, stride: int, size: int
) -> None:
    """Does what `tiles.multiply_tile` does, for x [in, 16], flat: for as many rows as `out` has
    room for, and at most `size`, a literal."""
    num_in = len(blocks[0]) // OUTPUTS
    rows = x[: num_in * LANES].reshape(num_in, LANES).T[: min(-(-len(out) // stride), size)]
    multiply_tile(np.ascontiguousarray(rows).reshape(-1), blocks, bias, out, stride, size)


@intrinsic(prefer_literal=True)
def _multiply_wide_tile(
    typing: Any, x: Any, blocks: Any, bias: Any, out: Any, stride: Any, size: Any
) -> Intrinsic | None:
    if not isinstance(size, types.IntegerLiteral):
        return None
    block, next_ = blocks.types

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def array(kind: Any, value: Any) -> Any:
            return context.make_array(kind)(context, builder, value)

        def data(kind: Any, value: Any, element: ir.Type) -> Any:
            return builder.bitcast(array(kind, value).data, element.as_pointer())

        weights, following = (builder.extract_value(args[1], number) for number in range(2))
        num_steps = builder.udiv(array(block, weights).nitems, INDEX(2 * OUTPUTS))
        tile = _WideTile(builder)
        tile.order_memory()
        sums = tile.start(data(bias, args[2], FLOAT32X16), size.literal_value)
        inputs, vectors = data(x, args[0], FLOAT32X16), data(block, weights, INT32X16)
        paced = tile.paced(array(next_, following), num_steps)
        with cgutils.for_range(builder, num_steps, intp=INDEX) as loop:
            tile.add_pair(sums, inputs, vectors, loop.index)
            tile.prefetch(paced, loop.index)
        targets = data(out, args[3], HALF_WORD if out.dtype == types.uint16 else ir.FloatType())
        # Missing rows are the last one.
        last = builder.udiv(builder.sub(array(out, args[3]).nitems, INDEX(1)), args[4])
        for number, row_sums in enumerate(sums):
            row = minimum(builder, INDEX(number), last)
            tile.store(row_sums, builder.gep(targets, [builder.mul(args[4], row)]))
        tile.order_memory()
        return context.get_dummy_value()

    return types.void(x, blocks, bias, out, types.intp, size), emit


class _WideTile(TileEmitter):
    """Emits the instructions of such a tile."""

    __slots__ = ()

    def __init__(self, builder: Any) -> None:
        super().__init__(builder, is_paired=True)

    def order_memory(self) -> None:
        """LLVM moves no load or store past this. It does not know that `_add_broadcast` loads."""
        kind = ir.FunctionType(ir.VoidType(), [])
        self._builder.asm(kind, "", "~{memory}", [], side_effect=True)

    def add_pair(self, sums: list[list[Any]], inputs: Any, weights: Any, step: Any) -> None:
        """Adds a pair of inputs of every row times the weights of all outputs."""
        builder = self._builder
        start = builder.gep(weights, [builder.mul(step, INDEX(VECTORS))])
        pairs = [self._load(start, number) for number in range(VECTORS)]
        pair_of_rows = builder.gep(inputs, [builder.mul(step, INDEX(2))])
        for number, widen_half in enumerate((self._low, self._high)):
            vectors = [widen_half(pair) for pair in pairs]
            for row, row_sums in enumerate(sums):
                offset = 4 * (number * LANES + row)
                for variable, vector in zip(row_sums, vectors, strict=True):
                    total = self._add_broadcast(
                        builder.load(variable), vector, pair_of_rows, offset
                    )
                    builder.store(total, variable)

    def _add_broadcast(self, total: Any, vector: Any, address: Any, offset: int) -> Any:
        """total + vector * (the float32 at address + offset).

        WHY: LLVM loads a value that two products take to a register of its own.
        """
        kind = ir.FunctionType(FLOAT32X16, [FLOAT32X16, address.type, FLOAT32X16])
        instruction = f"vfmadd231ps {offset}($2){{1to16}}, $1, $0"
        return self._builder.asm(
            kind, instruction, "=v,v,r,0", [vector, address, total], side_effect=False
        )


@overload(multiply_wide, strict=False)
def _overload_multiply_wide(
    x: Any, packed: Any, bias: Any, out: Any, first: Any, last: Any
) -> Callable[..., bool]:
    if not _is_widened(x.dtype == types.uint16, packed.dtype == types.uint16):
        return lambda x, packed, bias, out, first, last: False
    return lambda x, packed, bias, out, first, last: _multiply_many(
        x, packed, bias, out, first, last
    )


@overload(multiply_wide_tile, strict=False, prefer_literal=True)
def _overload_multiply_wide_tile(
    x: Any, blocks: Any, bias: Any, out: Any, stride: Any, size: Any
) -> Callable[..., None]:
    return lambda x, blocks, bias, out, stride, size: _multiply_wide_tile(
        x, blocks, bias, out, stride, size
    )
