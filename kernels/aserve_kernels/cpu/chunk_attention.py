"""Attention of several queries per row over paged KV of bfloat16, in products of pairs of bfloat16:
chunks of prompts, fresh or behind a prefix. What is read of a tile of keys and values is packed for
all queries of a block; scores stay float32, the softmax is online.

It knows no layer and no step. Nothing is kept between calls.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, narrow
from aserve_kernels.cpu.gemm import OUTPUTS, ROWS, multiply_tile
from aserve_kernels.cpu.host_rows import NO_WINDOW, HostRows, Int64s
from aserve_kernels.cpu.online_softmax import fold_log2, softmax_update
from aserve_kernels.cpu.packing import Halves, interleave, transpose_pairs
from aserve_kernels.cpu.precompile import FAST, cached_njit, compile_ahead
from aserve_kernels.cpu.simd import LANES, add_product, load, splat, store
from aserve_kernels.paged_rows import Scoring

LINES = 256  # queries of heads that share a KV head: those that share what was packed
# PERF: keys that are packed together. 1,024 queries behind 2,048 keys of 8 heads of 128, CPU time
# of one thread: 112 ms with 64, 89 with 128, 76 with 256, 70 with 512 and with 1,024.
TILE = 512
PAIR = 2


def chunk_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *,
    out: Tensor, num_workers: int,
) -> None:  # fmt: skip
    """As `paged_attention` and its reference; all are bfloat16, head_dim is a multiple of 32.

    WHY: it packs copies of what it reads, which a decode step could not afford; here all queries of
    a block share them.
    """
    factor, cap = fold_log2(scoring.scale, scoring.softcap)
    own = rows.queries
    attend = _attend_alone if num_workers == 1 else _attend
    attend(
        _bits(q), _bits(keys), _bits(values), _bits(out),
        rows.page_table, own.rows, own.lens, own.starts, own.query_lens, rows.page_size,
        NO_WINDOW if scoring.window is None else scoring.window,
        np.float32(factor),
        np.float32(cap),
        num_workers,
    )  # fmt: skip


def _bits(tensor: Tensor) -> Halves:
    bits: Halves = tensor.view(torch.uint16).numpy()
    return bits


def compile_chunk_attention(num_workers: int) -> None:
    """Either for one worker or for several."""
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
    q: Halves, keys: Halves, values: Halves, out: Halves,
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
    q: Halves, keys: Halves, values: Halves, out: Halves,
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
    q: Halves, keys: Halves, values: Halves, out: Halves,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32,
    worker: int, num_workers: int,
) -> None:  # fmt: skip
    """What one of num_workers does: of units, a KV head of a block of a row's queries, every
    num_workers-th."""
    num_kv_heads, head_dim = keys.shape[1], keys.shape[2]
    num_groups = q.shape[1] // num_kv_heads
    query_len = max(1, LINES // num_groups)
    num_lines = -(-query_len * num_groups // ROWS) * ROWS
    queries = np.zeros(num_lines * head_dim, np.uint16)
    outputs = np.empty(num_lines * head_dim, np.float32)
    softmax = np.empty((num_lines, 2), np.float32)
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


@njit(nogil=True, fastmath=FAST)
def _attend_block(
    q: Halves, keys: Halves, values: Halves, out: Halves, pages: Int64s, page_size: int,
    position: int, head: int, window: int, factor: np.float32, cap: np.float32,
    queries: Halves, outputs: Float32s, softmax: Float32s, packed: Halves,
) -> None:  # fmt: skip
    """q, out [queries, heads, head_dim] at `position` and on, for one KV head. A line is one of its
    query heads at one position; lines are filled up to whole products.

    Room: `queries` and `outputs` for the lines; `softmax` for [most, total] of each; `packed` for
    a tile of keys and one of values.
    """
    num_queries, head_dim = q.shape[0], q.shape[2]
    num_groups = q.shape[1] // keys.shape[1]
    num_lines = num_queries * num_groups
    for line in range(num_lines):
        own = q[line // num_groups, head * num_groups + line % num_groups]
        for d in range(head_dim):
            queries[line * head_dim + d] = own[d]
    outputs[:] = np.float32(0)
    softmax[:, 0] = -np.inf
    softmax[:, 1] = np.float32(0)
    indices = np.empty(TILE, np.int64)
    products = np.empty(ROWS * max(TILE, head_dim), np.float32)
    weights = np.empty(ROWS * TILE, np.uint16)
    shrinks = np.empty(ROWS, np.float32)
    none = np.zeros(OUTPUTS, np.float32)
    # From the first that any of them sees: what no query sees may be anything, also NaN.
    stop = position + num_queries
    for tile in range(max(0, position - window + 1), stop, TILE):
        size = min(TILE, stop - tile)
        width = -(-size // OUTPUTS) * OUTPUTS
        for j in range(width):
            at = tile + min(j, size - 1)
            slot = pages[at // page_size] * page_size + at % page_size
            indices[j] = (slot * keys.shape[1] + head) * head_dim
        packed_keys, packed_values = packed[0, : width * head_dim], packed[1, : width * head_dim]
        _pack_keys(keys.reshape(-1), indices[:width], head_dim, packed_keys)
        _pack_values(values.reshape(-1), indices[:width], head_dim, packed_values)
        for line in range(0, num_lines, ROWS):
            first_position = position + line // num_groups
            last_position = position + (min(line + ROWS, num_lines) - 1) // num_groups
            if last_position < tile or first_position - window + 1 >= tile + size:
                continue
            own_softmax = softmax[line : line + ROWS]
            _multiply(queries[line * head_dim :], packed_keys, none, products, width)
            for i in range(ROWS):
                # A line beyond the last has zeros, which see what the last sees.
                own_position = position + min(line + i, num_lines - 1) // num_groups
                low = max(0, own_position - window + 1 - tile)
                high = min(size, own_position + 1 - tile)
                scores = products[i * width : (i + 1) * width]
                shrinks[i] = _weigh_line(scores, low, high, factor, cap, own_softmax, i)
                narrow(scores, weights[i * width : (i + 1) * width])
            _multiply(weights[: ROWS * width], packed_values, none, products, head_dim)
            _add(products, shrinks, outputs[line * head_dim : (line + ROWS) * head_dim])
    for line in range(num_lines):
        wide = outputs[line * head_dim : (line + 1) * head_dim]
        share = np.float32(1) / softmax[line, 1]
        for d in range(head_dim):
            wide[d] *= share
        narrow(wide, out[line // num_groups, head * num_groups + line % num_groups])


@njit(inline="always")
def _pack_keys(source: Halves, indices: Int64s, head_dim: int, packed: Halves) -> None:
    """packed [blocks of keys, pairs of dimensions, keys of a block, 2]."""
    for j in range(0, len(indices), LANES):
        first = j // OUTPUTS * OUTPUTS * head_dim + j % OUTPUTS * PAIR
        for d in range(0, head_dim, LANES * PAIR):
            own = indices[j : j + LANES] + d
            transpose_pairs(source, own, packed, first + d * OUTPUTS, OUTPUTS * PAIR)


@njit(inline="always")
def _pack_values(source: Halves, indices: Int64s, head_dim: int, packed: Halves) -> None:
    """packed [blocks of dimensions, pairs of keys, dimensions of a block, 2]."""
    for j in range(0, len(indices), PAIR):
        for d in range(0, head_dim, LANES):
            target = d // OUTPUTS * OUTPUTS * len(indices) + j * OUTPUTS + d % OUTPUTS * PAIR
            interleave(source, indices[j] + d, indices[j + 1] + d, packed, target)


@njit(inline="always")
def _multiply(x: Halves, packed: Halves, none: Float32s, out: Float32s, num_outputs: int) -> None:
    """Eight lines of x, side by side, times what was packed -> as many lines of `num_outputs`.
    `none` is what sums begin with."""
    num_inputs = len(packed) // num_outputs
    for first in range(0, num_outputs, OUTPUTS):
        block = packed[first * num_inputs : (first + OUTPUTS) * num_inputs]
        multiply_tile(x[: ROWS * num_inputs], block, none, out[first:], num_outputs, ROWS)


@njit(inline="always")
def _weigh_line(
    scores: Float32s, low: int, high: int, factor: np.float32, cap: np.float32,
    softmax: Float32s, line: int,
) -> np.float32:  # fmt: skip
    """As `softmax_update`; weights of what is not seen become zeros."""
    shrink = np.float32(1)
    stop = 0
    if low < high:
        stop = -(-high // LANES) * LANES
        for j in range(stop):
            scores[j] *= factor
        shrink = softmax_update(scores, low, high, cap, softmax, line)
    for j in range(stop, len(scores)):
        scores[j] = np.float32(0)
    return shrink


@njit(inline="always")
def _add(added: Float32s, shrinks: Float32s, outputs: Float32s) -> None:
    """outputs = outputs * shrink of their line + added."""
    head_dim = len(outputs) // ROWS
    for line in range(ROWS):
        shrink = splat(shrinks[line])
        for d in range(line * head_dim, (line + 1) * head_dim, LANES):
            total = add_product(load(added, d), load(outputs, d), shrink)
            store(total, outputs, d)
