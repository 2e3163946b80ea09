"""Tiles of a GEMM by the matrix instructions of AMX: up to 32 rows times a packed block of outputs.

A tile register has up to sixteen rows of 64 bytes. Inputs are read where they are, sixteen rows of
32; a packed block of bfloat16 is what TDPBF16PS takes as its second operand, 16 pairs of 16
outputs, beside those of the other 16 outputs. So a step of 32 inputs reads two registers of weights
and one or two of inputs, and adds to two or four of sums ("Intel 64 and IA-32 Architectures
Software Developer's Manual", volume 1, chapter 18).

All numbers of rows take these tiles, because vdpbf16ps adds products in another order. PERF: a
Xeon, 2 threads, layers of Qwen3-0.6B, time over that of oneDNN's packed weights, 1, 8, 32, 128 and
2,048 rows: 0.9 to 1.0, 0.9 to 1.0, 0.8, 0.7 to 1.04, 1.0 to 1.35 (most with 1,024 inputs). Inputs
that are copied into tiles first, and steps in chunks whose weights fit in the L1 cache, took 1.05
to 1.6 times as long as this.

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

from aserve_kernels.cpu.bf16 import Float32s, Floats
from aserve_kernels.cpu.precompile import NO_REFCOUNT
from aserve_kernels.cpu.processor import HAS_AMX
from aserve_kernels.cpu.simd import (
    BYTE,
    FLOAT32X16,
    IN_L2,
    INDEX,
    INT16X32,
    Intrinsic,
    emit_call,
    emit_prefetch,
)
from aserve_kernels.cpu.tiles import OUTPUTS, minimum, multiply_tile

MATRIX_ROWS = 16  # of a register
PAIR_ROWS = 2 * MATRIX_ROWS
STEP = 32  # inputs, which fill one row of a register
ROW_BYTES = 64
SUMS, INPUTS, WEIGHTS = 0, 4, 6  # the first registers of each
# A configuration: palette 1, from byte 16 on the bytes per row of each register, two each, and from
# byte 48 on their rows. REGISTERS have the first sixteen rows and the second.
CONFIG = bytes([1, *[0] * 15, *[ROW_BYTES, 0] * 8])
NUM_CONFIG_BYTES, FIRST_WIDTH, FIRST_SIZE = 64, 16, 48
REGISTERS = ((SUMS, SUMS + 1, INPUTS), (SUMS + 2, SUMS + 3, INPUTS + 1))
# PERF: the rows that pass over the weights together stay in the L2 cache.
BLOCK_BYTES, MOST_ROWS = 3 << 18, 192
GROUP_BYTES = 1 << 18  # of the weights that pass over the rows together
AHEAD = 2 * STEP * OUTPUTS  # weights by which the prefetches of a few rows are ahead


def multiply_by_matrices(
    x: Floats, packed: Floats, bias: Float32s, out: Floats, first: int, last: int
) -> bool:
    """Computes the outputs from `first` to `last` - 1, which are whole blocks, of x [tokens, in],
    and returns whether it did: it does not for other machines and dtypes, and where inputs fill no
    whole steps."""
    if not _has_matrices(x.dtype == np.uint16, packed.dtype == np.uint16):
        return False
    is_done: bool = _multiply_rows(x, packed, bias, out, first, last)
    return is_done


def _has_matrices(has_narrow_inputs: bool, has_narrow_weights: bool) -> bool:
    """Whether products of such dtypes, bfloat16 or float32, have matrix instructions."""
    return HAS_AMX and has_narrow_inputs and has_narrow_weights


@njit(nogil=True)
def _multiply_rows(
    x: Floats, packed: Floats, bias: Float32s, out: Floats, first: int, last: int
) -> bool:
    num_rows, num_in = x.shape
    if num_in % STEP:
        return False
    most = max(1, min(MOST_ROWS, BLOCK_BYTES // (2 * num_in)) // PAIR_ROWS) * PAIR_ROWS
    for start in range(0, num_rows, most):
        end = min(num_rows, start + most)
        _multiply_blocks(x[start:end], packed, bias, out[start:end], first, last)
    release_tiles()
    return True


@njit(nogil=True, **NO_REFCOUNT)
def _multiply_blocks(
    x: Floats, packed: Floats, bias: Float32s, out: Floats, first: int, last: int
) -> None:
    """Computes these outputs of some rows."""
    (num_rows, num_in), num_out = x.shape, out.shape[1]
    inputs, outputs, size = x.reshape(-1), out.reshape(-1), OUTPUTS * num_in
    width, configured = max(1, GROUP_BYTES // (2 * size)) * OUTPUTS, 0
    for output in range(first, last, width):
        num_blocks, origin = min(width, last - output) // OUTPUTS, output * num_in
        num_parts, part = num_blocks * -(-num_rows // PAIR_ROWS), 0
        for row in range(0, num_rows, PAIR_ROWS):
            rows = min(PAIR_ROWS, num_rows - row)
            if rows != configured:
                configure_tiles(rows, ROW_BYTES)
                configured = rows
            for column in range(output, output + num_blocks * OUTPUTS, OUTPUTS):
                weights = packed[column * num_in : column * num_in + size]
                if num_rows > PAIR_ROWS:
                    following = _prefetched_by(part, num_parts, packed, origin, num_blocks * size)
                else:
                    following = packed[column * num_in + AHEAD :][:size]
                blocks, own_bias = (weights, following), bias[column : column + OUTPUTS]
                source, target = inputs[row * num_in :], outputs[row * num_out + column :]
                if rows > MATRIX_ROWS:
                    multiply_matrix(source, blocks, own_bias, target, num_out, PAIR_ROWS)
                else:
                    multiply_matrix(source, blocks, own_bias, target, num_out, MATRIX_ROWS)
                part += 1


@njit(inline="always")
def _prefetched_by(part: int, num_parts: int, packed: Floats, start: int, size: int) -> Floats:
    """Returns the weights that part number `part` of the products with packed[start : start + size]
    prefetches: its share of as many that follow."""
    end = start + size
    return packed[end + size * part // num_parts : end + size * (part + 1) // num_parts]


def multiply_matrix(
    x: Floats, blocks: tuple[Floats, Floats], bias: Float32s, out: Floats, stride: int, size: int
) -> None:
    """Does what `tiles.multiply_tile` does, for inputs that fill whole steps. `size` is
    MATRIX_ROWS, or PAIR_ROWS for more rows; `configure_tiles` was called with their number."""
    multiply_tile(x, blocks, bias, out, stride, size)


def configure_tiles(num_rows: int, width: int) -> None:
    """Gives this thread's tile registers the shapes for 1 to 32 rows, if it has any, and steps of
    `width` bytes of inputs, a multiple of 4. They are in use until `release_tiles`."""


def release_tiles() -> None:
    """Ends the use of tile registers, which Linux would save with each change of threads."""


def emit_tile_call(builder: Any, name: str, *args: Any) -> None:
    """Emits an instruction; registers are numbers that LLVM needs as constants."""
    values = [BYTE(arg) if isinstance(arg, int) else arg for arg in args]
    emit_call(builder, f"llvm.x86.{name}", *values, result=ir.VoidType())


def sums_register(row: int, column: int) -> int:
    """Returns the register with the sums of the first or second sixteen rows and outputs."""
    return SUMS + 2 * row + column


@intrinsic
def _configure_tiles(typing: Any, num_rows: Any, width: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shape = ir.ArrayType(BYTE, NUM_CONFIG_BYTES)
        padded = CONFIG.ljust(NUM_CONFIG_BYTES, bytes(1))
        with builder.goto_entry_block():
            memory = builder.alloca(shape)
        builder.store(ir.Constant(shape, bytearray(padded)), memory)
        start, most = builder.bitcast(memory, BYTE.as_pointer()), INDEX(MATRIX_ROWS)
        first = minimum(builder, args[0], most)
        rest = builder.sub(args[0], first)
        # A register without rows would need 0 bytes per row as well, so it has one.
        second = builder.select(builder.icmp_unsigned("==", rest, INDEX(0)), INDEX(1), rest)
        for registers, rows in zip(REGISTERS, (first, second), strict=True):
            size = builder.trunc(rows, BYTE)
            for register in registers:
                builder.store(size, builder.gep(start, [INDEX(FIRST_SIZE + register)]))
        size, num_words = (
            builder.trunc(value, BYTE) for value in (args[1], builder.udiv(args[1], INDEX(4)))
        )
        for number in (0, 1):
            place = INDEX(FIRST_WIDTH + 2 * (INPUTS + number))
            builder.store(size, builder.gep(start, [place]))
            builder.store(num_words, builder.gep(start, [INDEX(FIRST_SIZE + WEIGHTS + number)]))
        emit_tile_call(builder, "ldtilecfg", start)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), emit


@intrinsic
def _release_tiles(typing: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_tile_call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic(prefer_literal=True)
def _multiply_matrix(
    typing: Any, x: Any, blocks: Any, bias: Any, out: Any, stride: Any, size: Any
) -> Intrinsic | None:
    if not isinstance(size, types.IntegerLiteral):
        return None
    block, next_ = blocks.types

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def array(kind: Any, value: Any) -> Any:
            return context.make_array(kind)(context, builder, value)

        def data(kind: Any, value: Any) -> Any:
            return builder.bitcast(array(kind, value).data, BYTE.as_pointer())

        weights, following = (builder.extract_value(args[1], number) for number in range(2))
        num_steps = builder.udiv(array(block, weights).nitems, INDEX(STEP * OUTPUTS))
        tile = _MatrixTile(builder, data(x, args[0]), data(block, weights), num_steps)
        rows = range(size.literal_value // MATRIX_ROWS)
        tile.start(data(bias, args[2]), rows)
        paced = tile.paced(array(next_, following))
        with cgutils.for_range(builder, num_steps, intp=INDEX) as loop:
            tile.add(rows, loop.index)
            tile.prefetch(paced, loop.index)
        if out.dtype == types.uint16:
            last = builder.udiv(builder.sub(array(out, args[3]).nitems, INDEX(1)), args[4])
            tile.store_rounded(data(out, args[3]), args[4], rows, last)
        else:
            tile.store(data(out, args[3]), builder.mul(args[4], INDEX(4)), rows)
        return context.get_dummy_value()

    return types.void(x, blocks, bias, out, types.intp, size), emit


class _MatrixTile:
    """Emits the instructions of a tile. Pointers are to bytes."""

    __slots__ = ("_builder", "_inputs", "_num_steps", "_weights")

    def __init__(self, builder: Any, inputs: Any, weights: Any, num_steps: Any) -> None:
        self._builder, self._inputs, self._weights = builder, inputs, weights
        self._num_steps = num_steps

    def start(self, bias: Any, rows: range) -> None:
        for row in rows:
            for column in (0, 1):
                self._load(sums_register(row, column), bias, ROW_BYTES * column, INDEX(0))

    def add(self, rows: range, step: Any) -> None:
        """Adds a step of inputs of every row times the weights of all outputs."""
        builder = self._builder
        weights = builder.gep(self._weights, [builder.mul(step, INDEX(2 * STEP * OUTPUTS))])
        stride = builder.mul(self._num_steps, INDEX(ROW_BYTES))
        first = builder.gep(self._inputs, [builder.mul(step, INDEX(ROW_BYTES))])
        for column in (0, 1):
            self._load(WEIGHTS + column, weights, ROW_BYTES * column, INDEX(2 * ROW_BYTES))
            for row in rows:
                if column == 0:
                    source = builder.gep(first, [builder.mul(stride, INDEX(MATRIX_ROWS * row))])
                    self._load(INPUTS + row, source, 0, stride)
                operands = (sums_register(row, column), INPUTS + row, WEIGHTS + column)
                emit_tile_call(builder, "tdpbf16ps", *operands)

    def paced(self, array: Any) -> tuple[Any, Any]:
        """Returns where an array begins, and how many of its cache lines each step prefetches."""
        builder = self._builder
        per_step = builder.udiv(array.nitems, builder.mul(self._num_steps, INDEX(STEP)))
        return builder.bitcast(array.data, BYTE.as_pointer()), per_step

    def prefetch(self, paced: tuple[Any, Any], step: Any) -> None:
        """Prefetches a step's share of an array."""
        builder, (data, num_lines) = self._builder, paced
        first = builder.mul(step, num_lines)
        with cgutils.for_range(builder, num_lines, intp=INDEX) as loop:
            offset = builder.mul(builder.add(first, loop.index), INDEX(ROW_BYTES))
            emit_prefetch(builder, builder.gep(data, [offset]), IN_L2)

    def store(self, out: Any, stride: Any, rows: range) -> None:
        """Stores rows that are `stride` bytes apart."""
        builder = self._builder
        for row in rows:
            first = builder.gep(out, [builder.mul(stride, INDEX(MATRIX_ROWS * row))])
            for column in (0, 1):
                target = builder.gep(first, [INDEX(ROW_BYTES * column)])
                operands = (sums_register(row, column), target, stride)
                emit_tile_call(builder, "tilestored64", *operands)

    def store_rounded(self, out: Any, stride: Any, rows: range, last: Any) -> None:
        """Stores rows, as far as number `last`, that are `stride` elements apart as bfloat16, next
        to the sums, ties to even: of two vectors by one instruction."""
        builder, num_rows, size = self._builder, MATRIX_ROWS * len(rows), 4 * OUTPUTS
        kind = ir.FunctionType(INT16X32, [FLOAT32X16, FLOAT32X16])
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(BYTE, num_rows * size))
        memory.align = ROW_BYTES
        sums = builder.bitcast(memory, BYTE.as_pointer())
        self.store(sums, INDEX(size), rows)
        count = minimum(builder, INDEX(num_rows), builder.add(last, INDEX(1)))
        with cgutils.for_range(builder, count, intp=INDEX) as loop:
            source = builder.gep(sums, [builder.mul(loop.index, INDEX(size))])
            low, high = (
                builder.load(builder.bitcast(start, FLOAT32X16.as_pointer()))
                for start in (source, builder.gep(source, [INDEX(ROW_BYTES)]))
            )
            pairs = builder.asm(kind, "vcvtne2ps2bf16 $2, $1, $0", "=v,v,v", [high, low], False)
            target = builder.gep(out, [builder.mul(builder.mul(loop.index, stride), INDEX(2))])
            builder.store(pairs, builder.bitcast(target, INT16X32.as_pointer()), align=2)

    def _load(self, register: int, source: Any, offset: int, stride: Any) -> None:
        start = self._builder.gep(source, [INDEX(offset)])
        emit_tile_call(self._builder, "tileloadd64", register, start, stride)


@overload(multiply_by_matrices, strict=False)
def _overload_multiply_by_matrices(
    x: Any, packed: Any, bias: Any, out: Any, first: Any, last: Any
) -> Callable[..., bool]:
    if not _has_matrices(x.dtype == types.uint16, packed.dtype == types.uint16):
        return lambda x, packed, bias, out, first, last: False
    return lambda x, packed, bias, out, first, last: _multiply_rows(
        x, packed, bias, out, first, last
    )


@overload(multiply_matrix, strict=False, prefer_literal=True)
def _overload_multiply_matrix(
    x: Any, blocks: Any, bias: Any, out: Any, stride: Any, size: Any
) -> Callable[..., None]:
    return lambda x, blocks, bias, out, stride, size: _multiply_matrix(
        x, blocks, bias, out, stride, size
    )


@overload(configure_tiles, strict=False)
def _overload_configure_tiles(num_rows: Any, width: Any) -> Callable[[int, int], None]:
    if not HAS_AMX:
        return lambda num_rows, width: None
    return lambda num_rows, width: _configure_tiles(num_rows, width)


@overload(release_tiles, strict=False)
def _overload_release_tiles() -> Callable[[], None]:
    return (lambda: _release_tiles()) if HAS_AMX else (lambda: None)
