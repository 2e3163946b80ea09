"""Tiles of keys and values that many queries multiply, packed as the tiles of a GEMM take weights.

They are pairs of bfloat16 where the processor is fast at multiplying these, and all inputs have
them, else float32, to which keys and values of any dtype are widened once. The plain functions run
with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from aserve_kernels.cpu.bf16 import Float32s, Floats, widen
from aserve_kernels.cpu.exp2 import power_of_two
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.matrix_tiles import PAIR_ROWS, multiply_matrix
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, UINT16_LIKE, scratch
from aserve_kernels.cpu.packing import interleave, transpose_pairs
from aserve_kernels.cpu.processor import HAS_AMX
from aserve_kernels.cpu.simd import LANES, fma, load, reduce_sum, splat, store, zeros
from aserve_kernels.cpu.softmax_weights import store_weights
from aserve_kernels.cpu.tiles import HAS_FAST_PAIRS, OUTPUTS, ROWS, multiply_tile

PAIR = 2
HAS_PAIRS = HAS_FAST_PAIRS or HAS_AMX  # and multiplies them faster than float32


def packed_like(q: Floats, keys: Floats) -> Floats:
    """Returns an array that stands for the dtype in which queries, keys and values are multiplied:
    the bits of bfloat16, or float32."""
    has_pairs = q.dtype == keys.dtype == np.uint16
    return UINT16_LIKE if HAS_PAIRS and has_pairs else FLOAT32_LIKE


def copy_query(source: Floats, target: Any) -> None:
    """target[:] = source, one query of one head, in the dtype of packed tiles. Both are [n]."""
    if target.dtype == np.uint16:
        target[:] = source
    else:
        widen(source, target)


def pack_keys(source: Floats, indices: Int64s, head_dim: int, packed: Floats) -> None:
    """Packs the keys that begin at source[indices[j]] as [blocks of keys, dimensions / pair, keys
    of a block, pair]. Their number and head_dim are multiples of OUTPUTS. All arrays are flat."""
    if packed.dtype == np.uint16:
        _pack_key_pairs(source, indices, head_dim, packed)
    else:
        _pack_wide_keys(source, indices, head_dim, packed)


def pack_values(source: Floats, indices: Int64s, head_dim: int, packed: Floats) -> None:
    """Packs values as [blocks of dimensions, keys / pair, dimensions of a block, pair]."""
    if packed.dtype == np.uint16:
        _pack_value_pairs(source, indices, head_dim, packed)
    else:
        _pack_wide_values(source, indices, head_dim, packed)


def rows_at_once(packed: Floats) -> int:
    """Returns how many rows `multiply_rows` multiplies by tiles of the dtype of `packed`."""
    has_matrices = HAS_AMX and packed.dtype == np.uint16
    return PAIR_ROWS if has_matrices else ROWS


def multiply_rows(x: Floats, block: Floats, bias: Float32s, out: Float32s, stride: int) -> None:
    """Multiplies `rows_at_once` contiguous rows of x by a packed block of outputs, plus bias. Row r
    of the result is out[r * stride : r * stride + OUTPUTS]. All arrays are flat."""
    multiply_tile(x, (block, block[:0]), bias, out, stride, rows_at_once(block))


def store_all_weights(
    scores: Float32s, factor: np.float32, row_max: np.float32, weights: Floats
) -> np.float32:
    """Writes 2^(factor * s - row_max) for each score s, of a multiple of 16, to the first of
    `weights`, which have the dtype of packed tiles, and returns the sum."""
    if weights.dtype == np.uint16:
        return _store_pairs(scores, factor, row_max, weights)
    return _store_wide(scores, factor, row_max, weights)


@njit(inline="always")
def _store_pairs(
    scores: Float32s, factor: np.float32, row_max: np.float32, weights: Floats
) -> np.float32:
    total, one = zeros(), splat(np.float32(1))
    for j in range(0, len(scores), LANES):
        total = fma(store_weights(scores, j, factor, row_max, weights), total, one)
    return reduce_sum(total)


@njit(inline="always")
def _store_wide(
    scores: Float32s, factor: np.float32, row_max: np.float32, weights: Floats
) -> np.float32:
    total = np.float32(0)
    for j in range(len(scores)):
        weight = power_of_two(factor * scores[j] - row_max)
        total += weight
        weights[j] = weight
    return total


@njit(inline="always")
def _pack_key_pairs(source: Any, indices: Int64s, head_dim: int, packed: Any) -> None:
    for j in range(0, len(indices), LANES):
        first = j // OUTPUTS * OUTPUTS * head_dim + j % OUTPUTS * PAIR
        for d in range(0, head_dim, LANES * PAIR):
            starts = indices[j : j + LANES] + d
            transpose_pairs(source, starts, packed, first + d * OUTPUTS, OUTPUTS * PAIR)


@njit(inline="always")
def _pack_value_pairs(source: Any, indices: Int64s, head_dim: int, packed: Any) -> None:
    for j in range(0, len(indices), PAIR):
        for d in range(0, head_dim, LANES):
            target = d // OUTPUTS * OUTPUTS * len(indices) + j * OUTPUTS + d % OUTPUTS * PAIR
            interleave(source, indices[j] + d, indices[j + 1] + d, packed, target)


@njit(inline="always")
def _pack_wide_keys(source: Floats, indices: Int64s, head_dim: int, packed: Any) -> None:
    rows = scratch((LANES * head_dim,), packed)
    # Pairs of halves of float32: transposed like pairs of bfloat16.
    halves, target = rows.view(np.uint16), packed.view(np.uint16)
    starts = scratch((LANES,), INT64_LIKE)
    for lane in range(LANES):
        starts[lane] = lane * PAIR * head_dim
    for j in range(0, len(indices), LANES):
        for lane in range(LANES):
            start = indices[j + lane]
            widen(source[start : start + head_dim], rows[lane * head_dim : (lane + 1) * head_dim])
        first = j // OUTPUTS * OUTPUTS * head_dim + j % OUTPUTS
        for d in range(0, head_dim, LANES):
            to = (first + d * OUTPUTS) * PAIR
            transpose_pairs(halves[d * PAIR :], starts, target, to, OUTPUTS * PAIR)


@njit(inline="always")
def _pack_wide_values(source: Floats, indices: Int64s, head_dim: int, packed: Any) -> None:
    for d in range(0, head_dim, LANES):
        first = d // OUTPUTS * OUTPUTS * len(indices) + d % OUTPUTS
        for j in range(len(indices)):
            store(load(source, indices[j] + d), packed, first + j * OUTPUTS)


@overload(packed_like, strict=False)
def _overload_packed_like(q: Any, keys: Any) -> Callable[[Floats, Floats], Floats]:
    has_pairs = HAS_PAIRS and q.dtype == keys.dtype == types.uint16
    like: Floats = UINT16_LIKE if has_pairs else FLOAT32_LIKE
    return lambda q, keys: like


@overload(copy_query, inline="always", strict=False)
def _overload_copy_query(source: Any, target: Any) -> Callable[[Any, Any], None]:
    def widen_query(source: Any, target: Any) -> None:
        widen(source, target)

    def copy(source: Any, target: Any) -> None:
        for d in range(len(target)):
            target[d] = source[d]

    return copy if target.dtype == types.uint16 else widen_query


@overload(pack_keys, inline="always", strict=False)
def _overload_pack_keys(
    source: Any, indices: Any, head_dim: Any, packed: Any
) -> Callable[..., None]:
    pack = _pack_key_pairs if packed.dtype == types.uint16 else _pack_wide_keys
    return lambda source, indices, head_dim, packed: pack(source, indices, head_dim, packed)


@overload(pack_values, inline="always", strict=False)
def _overload_pack_values(
    source: Any, indices: Any, head_dim: Any, packed: Any
) -> Callable[..., None]:
    pack = _pack_value_pairs if packed.dtype == types.uint16 else _pack_wide_values
    return lambda source, indices, head_dim, packed: pack(source, indices, head_dim, packed)


@overload(rows_at_once, strict=False)
def _overload_rows_at_once(packed: Any) -> Callable[[Floats], int]:
    num_rows = PAIR_ROWS if HAS_AMX and packed.dtype == types.uint16 else ROWS
    return lambda packed: num_rows


@overload(multiply_rows, inline="always", strict=False)
def _overload_multiply_rows(
    x: Any, block: Any, bias: Any, out: Any, stride: Any
) -> Callable[..., None]:
    def by_matrices(x: Floats, block: Floats, bias: Float32s, out: Float32s, stride: int) -> None:
        multiply_matrix(x, (block, block[:0]), bias, out, stride, PAIR_ROWS)

    def by_vectors(x: Floats, block: Floats, bias: Float32s, out: Float32s, stride: int) -> None:
        multiply_tile(x, (block, block[:0]), bias, out, stride, ROWS)

    return by_matrices if HAS_AMX and block.dtype == types.uint16 else by_vectors


@overload(store_all_weights, inline="always", strict=False)
def _overload_store_all_weights(
    scores: Any, factor: Any, row_max: Any, weights: Any
) -> Callable[..., np.float32]:
    store_all = _store_pairs if weights.dtype == types.uint16 else _store_wide
    return lambda scores, factor, row_max, weights: store_all(scores, factor, row_max, weights)
