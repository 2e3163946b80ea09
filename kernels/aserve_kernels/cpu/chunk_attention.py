"""Paged attention on the CPU for many queries per row: prefill and chunked prefill.

    out = softmax(cap(scale * q k^T) + mask) v

Both matrix products are gemm.py's: of pairs of bfloat16, by AMX where there is any, or of float32.
Each tile of keys and values is packed once, for all queries of a block (chunk_tiles.py). Scores
stay float32; the softmax is online. Work is divided among threads by row, block of queries and KV
head.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, numba_type
from aserve_kernels.cpu.chunk_tiles import (
    copy_query,
    multiply_rows,
    pack_keys,
    pack_values,
    packed_like,
    rows_at_once,
    store_all_weights,
)
from aserve_kernels.cpu.exp2 import power_of_two
from aserve_kernels.cpu.host_rows import NO_WINDOW, HostRows, Int64s
from aserve_kernels.cpu.matrix_tiles import ROW_BYTES, configure_tiles, release_tiles
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, scratch
from aserve_kernels.cpu.online_softmax import fold_log2, greatest
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT, cached_njit, compile_ahead
from aserve_kernels.cpu.simd import LANES, fma, load, splat, store
from aserve_kernels.cpu.team import worker_of
from aserve_kernels.cpu.tiles import OUTPUTS
from aserve_kernels.paged_rows import Scoring

BLOCK = 1024  # query rows (queries times heads of one KV head) that share a packed tile
# PERF: the keys of a packed tile. 1,024 queries behind 2,048 keys of 8 heads of 128, CPU time
# of one thread: 112 ms with 64, 89 with 128, 76 with 256, 70 with 512 and with 1,024.
TILE = 512


def chunk_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *,
    out: Tensor, num_workers: int,
) -> None:  # fmt: skip
    """The same as `paged_attention`, without sinks, for a head_dim that is a multiple of OUTPUTS.

    WHY: packing copies every key and value, which would dominate a decode step; here all queries of
    a block share the copy.
    """
    factor, cap = fold_log2(scoring.scale * scoring.key_scale, scoring.softcap)
    if factor < 0:  # the greatest product is to be the greatest score
        q, factor = -q, -factor
    queries = rows.queries
    attend = _attend_alone if num_workers == 1 else _attend
    attend(
        as_array(q), as_array(keys), as_array(values), as_array(out),
        rows.page_table, queries.rows, queries.lens, queries.starts, queries.query_lens,
        rows.page_size,
        NO_WINDOW if scoring.window is None else scoring.window,
        np.float32(factor),
        np.float32(cap),
        np.float32(scoring.value_scale),
        num_workers,
    )  # fmt: skip


def compile_chunk_attention(
    dtype: torch.dtype, num_workers: int, kv_dtype: torch.dtype | None = None
) -> None:
    """Compiles for this dtype, of KV as well unless another one is given, and either for one worker
    or for several."""
    floats, pool = numba_type(dtype), types.Array(numba_type(kv_dtype or dtype), 3, "C")
    column = types.Array(types.int64, 1, "C")
    compile_ahead(
        _attend_alone if num_workers == 1 else _attend,
        *(types.Array(floats, 3, "A"), pool, pool, types.Array(floats, 3, "C")),
        *(types.Array(types.int64, 2, "C"), column, column, column, column),
        *(types.int64, types.int64, types.float32, types.float32, types.float32, types.int64),
    )


@cached_njit(parallel=True, nogil=True)
def _attend(
    q: Floats, keys: Floats, values: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, value_scale: np.float32,
    num_workers: int,
) -> None:  # fmt: skip
    for index in prange(num_workers):
        _attend_share(
            q, keys, values, out, page_table, rows, lens, starts, query_lens, page_size,
            window, factor, cap, value_scale, worker_of(index), num_workers,
        )  # fmt: skip


@cached_njit(nogil=True)
def _attend_alone(
    q: Floats, keys: Floats, values: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, value_scale: np.float32,
    num_workers: int,
) -> None:  # fmt: skip
    for worker in range(num_workers):
        _attend_share(
            q, keys, values, out, page_table, rows, lens, starts, query_lens, page_size,
            window, factor, cap, value_scale, worker, num_workers,
        )  # fmt: skip


@njit(inline="always")
def _attend_share(
    q: Floats, keys: Floats, values: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, value_scale: np.float32,
    worker: int, num_workers: int,
) -> None:  # fmt: skip
    """The share of one worker: every num_workers-th unit of work. A unit is one KV head of one
    block of a row's queries."""
    num_kv_heads, head_dim = keys.shape[1], keys.shape[2]
    group_size = q.shape[1] // num_kv_heads
    longest = 1
    for r in range(rows.shape[0]):
        longest = max(longest, query_lens[r])
    query_len = min(longest, max(1, BLOCK // group_size))
    like = packed_like(q, keys)
    at_once = rows_at_once(like)
    num_query_rows = -(-query_len * group_size // at_once) * at_once
    queries = scratch((num_query_rows * head_dim,), like)
    queries[:] = 0
    outputs = scratch((num_query_rows * head_dim,), FLOAT32_LIKE)
    softmax = scratch((num_query_rows, 2), FLOAT32_LIKE)
    packed = scratch((2, TILE * head_dim), like)
    configure_tiles(at_once, ROW_BYTES)
    unit = 0
    for r in range(rows.shape[0]):
        for first in range(0, query_lens[r], query_len):
            last = min(first + query_len, query_lens[r])
            for head in range(num_kv_heads):
                unit += 1
                if unit % num_workers != worker:
                    continue
                _attend_block(
                    q[starts[r] + first : starts[r] + last],
                    keys, values,
                    out[starts[r] + first : starts[r] + last],
                    page_table[rows[r]], page_size,
                    lens[r] - query_lens[r] + first, head, window, factor, cap, value_scale,
                    queries, outputs, softmax, packed,
                )  # fmt: skip
    release_tiles()


@njit(nogil=True, fastmath=FASTMATH)
def _attend_block(
    q: Floats, keys: Floats, values: Floats, out: Floats, pages: Int64s, page_size: int,
    position: int, head: int, window: int, factor: np.float32, cap: np.float32,
    value_scale: np.float32,
    queries: Floats, outputs: Float32s, softmax: Float32s, packed: Floats,
) -> None:  # fmt: skip
    """Attends q [queries, heads, head_dim], at positions from `position` on, for one KV head, and
    writes out [queries, heads, head_dim].

    A query row is one query of one head; query rows are padded to a multiple of `rows_at_once`.
    Scratch memory: `queries` and `outputs` for the query rows, `softmax` for [row_max, row_sum] of
    each, `packed` for a tile of keys and one of values.
    """
    num_queries, head_dim = q.shape[0], q.shape[2]
    group_size = q.shape[1] // keys.shape[1]
    num_query_rows = num_queries * group_size
    for query_row in range(num_query_rows):
        vector = q[query_row // group_size, head * group_size + query_row % group_size]
        copy_query(vector, queries[query_row * head_dim : (query_row + 1) * head_dim])
    at_once = rows_at_once(queries)
    num_padded = -(-num_query_rows // at_once) * at_once
    outputs[: num_padded * head_dim] = 0
    softmax[:num_padded, 0] = -np.inf
    softmax[:num_padded, 1] = 0
    indices = scratch((TILE,), INT64_LIKE)
    products = scratch((at_once * max(TILE, head_dim),), FLOAT32_LIKE)
    weights = scratch((at_once * TILE,), queries)
    rescales = scratch((at_once,), FLOAT32_LIKE)
    zeros = scratch((OUTPUTS,), FLOAT32_LIKE)
    zeros[:] = np.float32(0)
    # Tiles begin at the first key that a query sees: keys before it may be NaN.
    stop = position + num_queries
    for tile in range(max(0, position - window + 1), stop, TILE):
        size = min(TILE, stop - tile)
        width = -(-size // OUTPUTS) * OUTPUTS
        _find_keys(pages, page_size, keys.shape[1], head, head_dim, tile, indices[:size])
        indices[size:width] = indices[size - 1]
        packed_keys, packed_values = packed[0, : width * head_dim], packed[1, : width * head_dim]
        pack_keys(keys.reshape(-1), indices[:width], head_dim, packed_keys)
        pack_values(values.reshape(-1), indices[:width], head_dim, packed_values)
        for query_row in range(0, num_query_rows, at_once):
            first_position = position + query_row // group_size
            last_position = position + (min(query_row + at_once, num_query_rows) - 1) // group_size
            if last_position < tile or first_position - window + 1 >= tile + size:
                continue
            # Later keys are masked for all of these query rows.
            seen = min(width, -(-(last_position + 1 - tile) // OUTPUTS) * OUTPUTS)
            own = slice(query_row * head_dim, (query_row + at_once) * head_dim)
            _multiply(queries[own], packed_keys, head_dim, zeros, products, seen)
            for i in range(at_once):
                # A padding row has zeros, and the mask of the last query row.
                query_position = position + min(query_row + i, num_query_rows - 1) // group_size
                low = max(0, query_position - window + 1 - tile)
                high = min(size, query_position + 1 - tile)
                rescales[i] = _weigh(
                    products[i * seen : (i + 1) * seen], low, high, factor, cap,
                    softmax, query_row + i, weights[i * seen : (i + 1) * seen],
                )  # fmt: skip
            _multiply(weights[: at_once * seen], packed_values, width, zeros, products, head_dim)
            _add(products, rescales, outputs[own])
    for query_row in range(num_query_rows):
        output = outputs[query_row * head_dim : (query_row + 1) * head_dim]
        scale = value_scale / softmax[query_row, 1]
        for d in range(head_dim):
            output[d] *= scale
        narrow(output, out[query_row // group_size, head * group_size + query_row % group_size])


@njit(inline="always")
def _find_keys(
    pages: Int64s, page_size: int, num_heads: int, head: int, head_dim: int, first: int,
    indices: Int64s,
) -> None:  # fmt: skip
    """Writes where the keys of one head begin in the flat pool, from position `first` on."""
    j = 0
    while j < len(indices):
        # PERF: a division for each page, not for each key.
        page, offset = (first + j) // page_size, (first + j) % page_size
        slot = pages[page] * page_size + offset
        stop = min(len(indices), j + page_size - offset)
        while j < stop:
            indices[j] = (slot * num_heads + head) * head_dim
            slot += 1
            j += 1


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def _multiply(
    x: Floats, packed: Floats, packed_inputs: int, zeros: Float32s, out: Float32s,
    num_outputs: int,
) -> None:  # fmt: skip
    """Multiplies `rows_at_once` contiguous rows of x by the first inputs and outputs of a packed
    matrix, which has `packed_inputs` -> out [rows, num_outputs], flat. `zeros` is the bias."""
    num_inputs = len(x) // rows_at_once(packed)
    for first in range(0, num_outputs, OUTPUTS):
        start = first * packed_inputs
        block = packed[start : start + OUTPUTS * num_inputs]
        multiply_rows(x, block, zeros, out[first:], num_outputs)


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def _weigh(
    scores: Float32s, low: int, high: int, factor: np.float32, cap: np.float32,
    softmax: Float32s, query_row: int, weights: Floats,
) -> np.float32:  # fmt: skip
    """Does what `softmax_update` does to scores that lack the factor, which is not negative; the
    weights have the dtype of packed tiles, and those of masked keys are zeros. Overwrites scores.

    PERF: the scores are read twice: for the maximum, and for the weights with their sum.
    """
    if low >= high:
        weights[:] = 0
        return np.float32(1)
    if cap > 0:
        for j in range(low, high):
            scores[j] = cap * np.float32(math.tanh(factor * scores[j]))
        factor = np.float32(1)
    stop = -(-high // LANES) * LANES
    for j in range(low):
        scores[j] = -np.inf
    for j in range(high, stop):
        scores[j] = -np.inf
    row_max = max(softmax[query_row, 0], factor * greatest(scores[:stop]))
    rescale = power_of_two(softmax[query_row, 0] - row_max)
    added = store_all_weights(scores[:stop], factor, row_max, weights)
    weights[stop:] = 0
    softmax[query_row, 0] = row_max
    softmax[query_row, 1] = softmax[query_row, 1] * rescale + added
    return rescale


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def _add(added: Float32s, rescales: Float32s, outputs: Float32s) -> None:
    """outputs = outputs * rescale[query row] + added."""
    head_dim = len(outputs) // len(rescales)
    for query_row in range(len(rescales)):
        rescale = splat(rescales[query_row])
        for d in range(query_row * head_dim, (query_row + 1) * head_dim, LANES):
            total = fma(load(added, d), load(outputs, d), rescale)
            store(total, outputs, d)
