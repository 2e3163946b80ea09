"""A GEMM with a weight that is packed once: y = x W^T + b. Threads share the outputs.

The micro-kernels are in tiles.py, block_pairs.py, wide_tiles.py and matrix_tiles.py. An output is
summed in one order, whatever other rows and threads there are, so a row's result is the same in
every batch.

PERF: Qwen3-0.6B's layers in bfloat16, one thread of an AVX512-bf16 machine, GB/s of weights at 1,
4, 8, 16 rows against those of oneDNN's packed weights: 23, 25, 20, 6 against 13, 15, 11, 4. With
AVX2 and inputs of float32, two threads, at 1, 8, 16, 32, 256, 1,024 rows, time of FBGEMM's products
with weights of float16 over this one's: 1.02, 1.15, 1.10, 1.02, 0.94, 0.97.
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, numba_type
from aserve_kernels.cpu.block_pairs import THREE, multiply_pair
from aserve_kernels.cpu.callback import Callback
from aserve_kernels.cpu.matrix_tiles import multiply_by_matrices
from aserve_kernels.cpu.memory import FLOAT32_LIKE, array_at, scratch
from aserve_kernels.cpu.precompile import NO_REFCOUNT, cached_njit, compile_ahead
from aserve_kernels.cpu.processor import HAS_AVX512
from aserve_kernels.cpu.product import LIKE, RECORD_LIKE, compile_product
from aserve_kernels.cpu.team import worker_of
from aserve_kernels.cpu.tiles import (
    NEXT_BYTES,
    OUTPUTS,
    ROWS,
    multiply_tile,
    outputs_of,
    prefetched_by,
)
from aserve_kernels.cpu.wide_tiles import multiply_wide

Int32s: TypeAlias = npt.NDArray[np.int32]

# PERF: the rows that pass over the weights together stay in the L2 cache.
BLOCK_BYTES = 1 << 18


def pack(weight: Tensor) -> Floats:
    """Packs weight [out, in], float32 or bfloat16, as [blocks, in / pair, OUTPUTS, pair], flat.

    A pair is two inputs of bfloat16, or one of float32. Missing outputs and inputs are zeros.
    """
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    num_out, num_in = weight.shape
    shape = (-num_out // OUTPUTS * -OUTPUTS, -num_in // pair * -pair)
    padded = weight
    if weight.shape != shape:
        padded = torch.zeros(shape, dtype=weight.dtype)
        padded[:num_out, :num_in] = weight
    blocks = padded.reshape(-1, OUTPUTS, padded.shape[1] // pair, pair)
    return as_array(blocks.transpose(1, 2).contiguous().flatten())


def packed_linear(x: Tensor, packed: Floats, bias: Float32s, *, num_workers: int = 1) -> Tensor:
    """x [tokens, in] float32 or bfloat16 on the CPU, `packed` of the same dtype or bfloat16, bias
    [out] (zeros for no bias) -> [tokens, out] like x. With weights of bfloat16, `in` must be even.
    `num_workers` threads share the work: one if it was compiled for one, else any number above."""
    out = torch.empty((len(x), len(bias)), dtype=x.dtype)
    product = _multiply_alone if num_workers == 1 else _multiply
    product(as_array(x.contiguous()), packed, bias, as_array(out), num_workers)
    return out


def packed_linear_ref(x: Tensor, packed: Floats, bias: Float32s) -> Tensor:
    dtype, pair = (torch.bfloat16, 2) if packed.dtype == np.uint16 else (torch.float32, 1)
    blocks = torch.from_numpy(packed).view(dtype).view(-1, x.shape[1] // pair, OUTPUTS, pair)
    weight = blocks.transpose(1, 2).reshape(-1, x.shape[1])[: len(bias)]
    return (x.float() @ weight.float().t() + torch.from_numpy(bias)).to(x.dtype)


def packed_grouped_linear(
    x: Tensor, packed: Floats, biases: Float32s, starts: Int32s, ends: Int32s
) -> Tensor:
    """Does what `packed_linear` does, for the rows of each expert with its own weight: those from
    starts[e] to ends[e] - 1.

    packed [experts, packed weight], biases [experts, out]. Other rows are undefined."""
    out = torch.empty((len(x), biases.shape[1]), dtype=x.dtype)
    _multiply_groups(as_array(x.contiguous()), packed, biases, starts, ends, as_array(out))
    return out


def compile_grouped_linear(dtype: torch.dtype) -> None:
    floats = numba_type(dtype)
    rows, biases = types.Array(floats, 2, "C"), types.Array(types.float32, 2, "C")
    bounds = types.Array(types.int32, 1, "C")
    compile_ahead(_multiply_groups, rows, rows, biases, bounds, bounds, rows)


def compile_packed_linear(
    dtype: torch.dtype, num_workers: int = 1, stored: torch.dtype | None = None
) -> None:
    """Compiles for this dtype, of weights as well unless `stored` is another one, and either for
    one worker or for several."""
    rows = types.Array(numba_type(dtype), 2, "C")
    flat = types.Array(numba_type(stored or dtype), 1, "C")
    product = _multiply_alone if num_workers == 1 else _multiply
    compile_ahead(product, rows, flat, types.Array(types.float32, 1, "C"), rows, types.int64)
    tiles_product(dtype, stored or dtype)


@cache
def tiles_product(dtype: torch.dtype, stored: torch.dtype) -> Callback:
    """Returns the product of inputs of this dtype with a packed weight of the dtype `stored`."""
    like, weight_like = LIKE[dtype], LIKE[stored]

    def multiply_tiles(
        record: int, x: int, num_tokens: int, out: int, worker: int, num_workers: int
    ) -> None:
        layer = array_at(record, (1,), RECORD_LIKE)[0]
        num_in, num_out = layer["num_in"], layer["num_out"]
        packed = array_at(
            layer["weight"], (-(-num_out // OUTPUTS) * OUTPUTS * num_in,), weight_like
        )
        bias = array_at(layer["bias"], (num_out,), FLOAT32_LIKE)
        inputs = array_at(x, (num_tokens, num_in), like)
        wide = array_at(out, (num_tokens, num_out), FLOAT32_LIKE)
        multiply(inputs, packed, bias, wide, worker, num_workers)

    return compile_product(multiply_tiles)


@cached_njit(parallel=True, nogil=True)
def _multiply(x: Floats, packed: Floats, bias: Float32s, out: Floats, num_workers: int) -> None:
    for index in prange(num_workers):
        multiply(x, packed, bias, out, worker_of(index), num_workers)


@cached_njit(nogil=True)
def _multiply_alone(
    x: Floats, packed: Floats, bias: Float32s, out: Floats, num_workers: int
) -> None:
    for worker in range(num_workers):
        multiply(x, packed, bias, out, worker, num_workers)


@cached_njit(nogil=True)
def _multiply_groups(
    x: Floats, packed: Floats, biases: Float32s, starts: Int32s, ends: Int32s, out: Floats
) -> None:
    for expert in range(len(starts)):
        start, end = starts[expert], ends[expert]
        if start < end:
            multiply(x[start:end], packed[expert], biases[expert], out[start:end], 0, 1)


@njit(nogil=True)
def multiply(
    x: Floats, packed: Floats, bias: Float32s, out: Floats, worker: int, num_workers: int
) -> None:
    """x [tokens, in], bias [out] -> out [tokens, out], contiguous, float32 or the dtype of x: a
    worker's share of the outputs, for all rows."""
    first, last = outputs_of(out.shape[1], worker, num_workers)
    num_whole = last // OUTPUTS * OUTPUTS
    multiply_whole(x, packed, bias, out, first, num_whole)
    if num_whole < last:
        rest = last - num_whole
        tail = scratch((x.shape[0], OUTPUTS), out)
        tail_bias = np.zeros(OUTPUTS, np.float32)
        for i in range(rest):
            tail_bias[i] = bias[num_whole + i]
        multiply_whole(x, packed[num_whole * x.shape[1] :], tail_bias, tail, 0, OUTPUTS)
        for row in range(x.shape[0]):
            for i in range(rest):
                out[row, num_whole + i] = tail[row, i]


@njit(nogil=True)
def multiply_whole(
    x: Floats, packed: Floats, bias: Float32s, out: Floats, first: int, last: int
) -> None:
    """Computes the outputs from `first` to `last` - 1, which are whole blocks."""
    if multiply_by_matrices(x, packed, bias, out, first, last):
        return
    if not multiply_wide(x, packed, bias, out, first, last):
        multiply_blocks(x, packed, bias, out, first, last)


@njit(nogil=True, **NO_REFCOUNT)
def multiply_blocks(
    x: Floats, packed: Floats, bias: Float32s, out: Floats, first: int, last: int
) -> None:
    """Does so in tiles of at most eight rows. Blocks are taken in pairs where the last of several
    tiles has three rows, which are multiplied by both blocks at once."""
    num_rows, num_in = x.shape
    num_out, size = out.shape[1], OUTPUTS * num_in
    inputs, outputs = x.reshape(-1), out.reshape(-1)
    most = max(ROWS, BLOCK_BYTES // (num_in * x.itemsize) // ROWS * ROWS)
    # A last pass of a few rows would wait for the weights, so all passes are about as long.
    num_passes = max(1, -(-num_rows // most))
    per_pass = max(1, -(-num_rows // num_passes // ROWS)) * ROWS
    for start in range(0, num_rows, per_pass):
        end = min(num_rows, start + per_pass)
        num_tiles, ends_with_three = _tiles_of(end - start)
        fits = 2 * size * packed.itemsize <= NEXT_BYTES
        width = 2 * OUTPUTS if ends_with_three and num_tiles > 1 and fits else OUTPUTS
        for output in range(first, last, width):
            num_blocks = min(width, last - output) // OUTPUTS
            num_alone = num_tiles - num_blocks + 1  # tiles with one block each
            num_parts = num_alone * num_blocks + num_blocks - 1
            origin, group = output * num_in, num_blocks * size
            for block in range(num_blocks):
                weights = packed[origin + block * size : origin + (block + 1) * size]
                column = output + block * OUTPUTS
                block_bias, row = bias[column : column + OUTPUTS], start
                for tile in range(num_alone):
                    part, target = block * num_alone + tile, outputs[row * num_out + column :]
                    following = prefetched_by(part, num_parts, packed, origin, group)
                    blocks, source = (weights, following), inputs[row * num_in :]
                    rows = _size_of_tile(end - row)
                    # PERF: a tile that computes some rows twice takes less time than several small
                    # tiles. 15 rows of the tiny model in docs/performance.md: 210 us against 307.
                    if rows > 5:
                        multiply_tile(source, blocks, block_bias, target, num_out, ROWS)
                    elif rows == 5:  # a window of four drafts
                        multiply_tile(source, blocks, block_bias, target, num_out, 5)
                    elif rows > 2:
                        multiply_tile(source, blocks, block_bias, target, num_out, 4)
                    elif rows == 2:
                        multiply_tile(source, blocks, block_bias, target, num_out, 2)
                    else:
                        multiply_tile(source, blocks, block_bias, target, num_out, 1)
                    row += rows
            if num_blocks == 2:
                following = prefetched_by(num_parts - 1, num_parts, packed, origin, group)
                pair, row = (packed[origin : origin + group], following), end - THREE
                source, target = inputs[row * num_in :], outputs[row * num_out + output :]
                multiply_pair(source, pair, bias[output : output + width], target, num_out)


@njit(inline="always")
def _tiles_of(num_rows: int) -> tuple[int, bool]:
    """Returns how many tiles the rows take, and whether the last one has three rows."""
    num_tiles, rows = 0, 0
    while num_rows > 0:
        rows = _size_of_tile(num_rows)
        num_tiles += 1
        num_rows -= rows
    return num_tiles, rows == THREE


@njit(inline="always")
def _size_of_tile(num_rows: int) -> int:
    """Returns how many of the rows that are left the next tile takes.

    PERF: a tile of one or two rows takes as long as one of four, because each sum waits for its
    last product. So the last of several tiles has at least four with AVX-512, and three with AVX2,
    where it has two blocks; there a tile of four rows is slower than one of five, too.
    """
    if num_rows <= ROWS:
        return num_rows
    if HAS_AVX512:
        return num_rows - 4 if num_rows < ROWS + 4 else ROWS
    if num_rows < ROWS + 4:
        return num_rows - THREE
    return -(-num_rows // -(-num_rows // ROWS))
