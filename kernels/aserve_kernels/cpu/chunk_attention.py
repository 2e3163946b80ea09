"""Paged attention on the CPU for many queries per row in bfloat16: prefill and chunked prefill.

    out = softmax(cap(scale * q k^T) + mask) v

Both matrix products are gemm.py's, of pairs of bfloat16. Each tile of keys and values is packed
once, for all queries of a block. Scores stay float32; the softmax is online. Work is divided among
threads by row, block of queries and KV head.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, narrow
from aserve_kernels.cpu.exp2 import power_of_two
from aserve_kernels.cpu.host_rows import NO_WINDOW, HostRows, Int64s
from aserve_kernels.cpu.online_softmax import fold_log2, greatest
from aserve_kernels.cpu.packing import Bf16Bits, interleave, transpose_pairs
from aserve_kernels.cpu.precompile import FASTMATH, cached_njit, compile_ahead
from aserve_kernels.cpu.simd import LANES, fma, load, splat, store
from aserve_kernels.cpu.tiles import OUTPUTS, ROWS, multiply_tile
from aserve_kernels.paged_rows import Scoring

BLOCK = 1024  # query rows (queries times heads of one KV head) that share a packed tile
# PERF: the keys of a packed tile. 1,024 queries behind 2,048 keys of 8 heads of 128, CPU time
# of one thread: 112 ms with 64, 89 with 128, 76 with 256, 70 with 512 and with 1,024.
TILE = 512
PAIR = 2


def chunk_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *,
    out: Tensor, num_workers: int,
) -> None:  # fmt: skip
    """The same as `paged_attention`, for bfloat16 and a head_dim that is a multiple of 32.

    WHY: packing copies every key and value, which would dominate a decode step; here all queries of
    a block share the copy.
    """
    factor, cap = fold_log2(scoring.scale, scoring.softcap)
    if factor < 0:  # the greatest product is to be the greatest score
        q, factor = -q, -factor
    queries = rows.queries
    attend = _attend_alone if num_workers == 1 else _attend
    attend(
        _bits(q), _bits(keys), _bits(values), _bits(out),
        rows.page_table, queries.rows, queries.lens, queries.starts, queries.query_lens,
        rows.page_size,
        NO_WINDOW if scoring.window is None else scoring.window,
        np.float32(factor),
        np.float32(cap),
        num_workers,
    )  # fmt: skip


def _bits(tensor: Tensor) -> Bf16Bits:
    bits: Bf16Bits = tensor.view(torch.uint16).numpy()
    return bits


def compile_chunk_attention(num_workers: int) -> None:
    """Compiles either for one worker or for several."""
    heads = types.Array(types.uint16, 3, "C")
    column = types.Array(types.int64, 1, "C")
    compile_ahead(
        _attend_alone if num_workers == 1 else _attend,
        *(types.Array(types.uint16, 3, "A"), heads, heads, heads),
        *(types.Array(types.int64, 2, "C"), column, column, column, column),
        *(types.int64, types.int64, types.float32, types.float32, types.int64),
    )


@cached_njit(parallel=True, nogil=True)
def _attend(
    q: Bf16Bits, keys: Bf16Bits, values: Bf16Bits, out: Bf16Bits,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, num_workers: int,
) -> None:  # fmt: skip
    for worker in prange(num_workers):
        _attend_share(
            q, keys, values, out, page_table, rows, lens, starts, query_lens, page_size,
            window, factor, cap, worker, num_workers,
        )  # fmt: skip


@cached_njit(nogil=True)
def _attend_alone(
    q: Bf16Bits, keys: Bf16Bits, values: Bf16Bits, out: Bf16Bits,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, num_workers: int,
) -> None:  # fmt: skip
    for worker in range(num_workers):
        _attend_share(
            q, keys, values, out, page_table, rows, lens, starts, query_lens, page_size,
            window, factor, cap, worker, num_workers,
        )  # fmt: skip


@njit(inline="always")
def _attend_share(
    q: Bf16Bits, keys: Bf16Bits, values: Bf16Bits, out: Bf16Bits,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32,
    worker: int, num_workers: int,
) -> None:  # fmt: skip
    """The share of one worker: every num_workers-th unit of work. A unit is one KV head of one
    block of a row's queries."""
    num_kv_heads, head_dim = keys.shape[1], keys.shape[2]
    group_size = q.shape[1] // num_kv_heads
    query_len = max(1, BLOCK // group_size)
    num_query_rows = -(-query_len * group_size // ROWS) * ROWS
    queries = np.zeros(num_query_rows * head_dim, np.uint16)
    outputs = np.empty(num_query_rows * head_dim, np.float32)
    softmax = np.empty((num_query_rows, 2), np.float32)
    packed = np.empty((2, TILE * head_dim), np.uint16)
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
                    lens[r] - query_lens[r] + first, head, window, factor, cap,
                    queries, outputs, softmax, packed,
                )  # fmt: skip


@njit(nogil=True, fastmath=FASTMATH)
def _attend_block(
    q: Bf16Bits, keys: Bf16Bits, values: Bf16Bits, out: Bf16Bits, pages: Int64s, page_size: int,
    position: int, head: int, window: int, factor: np.float32, cap: np.float32,
    queries: Bf16Bits, outputs: Float32s, softmax: Float32s, packed: Bf16Bits,
) -> None:  # fmt: skip
    """Attends q [queries, heads, head_dim], at positions from `position` on, for one KV head, and
    writes out [queries, heads, head_dim].

    A query row is one query of one head; query rows are padded to a multiple of ROWS. Scratch
    memory: `queries` and `outputs` for the query rows, `softmax` for [row_max, row_sum] of each,
    `packed` for a tile of keys and one of values.
    """
    num_queries, head_dim = q.shape[0], q.shape[2]
    group_size = q.shape[1] // keys.shape[1]
    num_query_rows = num_queries * group_size
    for query_row in range(num_query_rows):
        vector = q[query_row // group_size, head * group_size + query_row % group_size]
        for d in range(head_dim):
            queries[query_row * head_dim + d] = vector[d]
    outputs[:] = np.float32(0)
    softmax[:, 0] = -np.inf
    softmax[:, 1] = np.float32(0)
    indices = np.empty(TILE, np.int64)
    products = np.empty(ROWS * max(TILE, head_dim), np.float32)
    weights = np.empty(ROWS * TILE, np.uint16)
    rescales = np.empty(ROWS, np.float32)
    zeros = np.zeros(OUTPUTS, np.float32)
    # Tiles begin at the first key that a query sees: keys before it may be NaN.
    stop = position + num_queries
    for tile in range(max(0, position - window + 1), stop, TILE):
        size = min(TILE, stop - tile)
        width = -(-size // OUTPUTS) * OUTPUTS
        _find_keys(pages, page_size, keys.shape[1], head, head_dim, tile, indices[:size])
        indices[size:width] = indices[size - 1]
        packed_keys, packed_values = packed[0, : width * head_dim], packed[1, : width * head_dim]
        _pack_keys(keys.reshape(-1), indices[:width], head_dim, packed_keys)
        _pack_values(values.reshape(-1), indices[:width], head_dim, packed_values)
        for query_row in range(0, num_query_rows, ROWS):
            first_position = position + query_row // group_size
            last_position = position + (min(query_row + ROWS, num_query_rows) - 1) // group_size
            if last_position < tile or first_position - window + 1 >= tile + size:
                continue
            # Later keys are masked for all of these query rows.
            seen = min(width, -(-(last_position + 1 - tile) // OUTPUTS) * OUTPUTS)
            q_rows = queries[query_row * head_dim : (query_row + ROWS) * head_dim]
            _multiply(q_rows, packed_keys, head_dim, zeros, products, seen)
            for i in range(ROWS):
                # A padding row has zeros, and the mask of the last query row.
                query_position = position + min(query_row + i, num_query_rows - 1) // group_size
                low = max(0, query_position - window + 1 - tile)
                high = min(size, query_position + 1 - tile)
                rescales[i] = _weigh(
                    products[i * seen : (i + 1) * seen], low, high, factor, cap,
                    softmax, query_row + i, weights[i * seen : (i + 1) * seen],
                )  # fmt: skip
            _multiply(weights[: ROWS * seen], packed_values, width, zeros, products, head_dim)
            _add(products, rescales, outputs[query_row * head_dim : (query_row + ROWS) * head_dim])
    for query_row in range(num_query_rows):
        output = outputs[query_row * head_dim : (query_row + 1) * head_dim]
        scale = np.float32(1) / softmax[query_row, 1]
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


@njit(inline="always")
def _pack_keys(source: Bf16Bits, indices: Int64s, head_dim: int, packed: Bf16Bits) -> None:
    """Packs keys as [blocks of keys, pairs of dimensions, keys of a block, 2]."""
    for j in range(0, len(indices), LANES):
        first = j // OUTPUTS * OUTPUTS * head_dim + j % OUTPUTS * PAIR
        for d in range(0, head_dim, LANES * PAIR):
            starts = indices[j : j + LANES] + d
            transpose_pairs(source, starts, packed, first + d * OUTPUTS, OUTPUTS * PAIR)


@njit(inline="always")
def _pack_values(source: Bf16Bits, indices: Int64s, head_dim: int, packed: Bf16Bits) -> None:
    """Packs values as [blocks of dimensions, pairs of keys, dimensions of a block, 2]."""
    for j in range(0, len(indices), PAIR):
        for d in range(0, head_dim, LANES):
            target = d // OUTPUTS * OUTPUTS * len(indices) + j * OUTPUTS + d % OUTPUTS * PAIR
            interleave(source, indices[j] + d, indices[j + 1] + d, packed, target)


@njit(inline="always")
def _multiply(
    x: Bf16Bits, packed: Bf16Bits, packed_inputs: int, zeros: Float32s, out: Float32s,
    num_outputs: int,
) -> None:  # fmt: skip
    """Multiplies eight contiguous rows of x by the first inputs and outputs of a packed matrix,
    which has `packed_inputs` -> out [8, num_outputs], flat. `zeros` is the bias."""
    num_inputs = len(x) // ROWS
    for first in range(0, num_outputs, OUTPUTS):
        start = first * packed_inputs
        block = packed[start : start + OUTPUTS * num_inputs]
        multiply_tile(x, (block, packed[:0]), zeros, out[first:], num_outputs, ROWS)


@njit(inline="always")
def _weigh(
    scores: Float32s, low: int, high: int, factor: np.float32, cap: np.float32,
    softmax: Float32s, query_row: int, weights: Bf16Bits,
) -> np.float32:  # fmt: skip
    """Does what `softmax_update` does to scores that lack the factor, which is not negative; the
    weights become bfloat16, and those of masked keys zeros. Overwrites scores.

    PERF: the scores are read twice: for the maximum, and for the weights with their sum.
    """
    if low >= high:
        weights[:] = np.uint16(0)
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
    added = np.float32(0)
    for j in range(stop):
        weight = power_of_two(factor * scores[j] - row_max)
        added += weight
        weights[j] = _nearest(weight)
    weights[stop:] = np.uint16(0)
    softmax[query_row, 0] = row_max
    softmax[query_row, 1] = softmax[query_row, 1] * rescale + added
    return rescale


@njit(inline="always")
def _nearest(weight: np.float32) -> np.uint16:
    """Does what `bf16_bits` does to values whose NaN come from bfloat16 or from arithmetic.

    PERF: without a case for other NaN, a prefill's attention takes 5 % less time.
    """
    bits = np.float32(weight).view(np.uint32)
    to_even = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + to_even) >> np.uint32(16))


@njit(inline="always")
def _add(added: Float32s, rescales: Float32s, outputs: Float32s) -> None:
    """outputs = outputs * rescale[query row] + added."""
    head_dim = len(outputs) // ROWS
    for query_row in range(ROWS):
        rescale = splat(rescales[query_row])
        for d in range(query_row * head_dim, (query_row + 1) * head_dim, LANES):
            total = fma(load(added, d), load(outputs, d), rescale)
            store(total, outputs, d)
