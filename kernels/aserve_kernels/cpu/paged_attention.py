"""Attention of few queries per row over paged KV, read where it is: decode, verify windows, short
chunks. Grouped queries share one read; the softmax is online.

It knows no layer and no step. Nothing is kept between calls.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, widen
from aserve_kernels.cpu.host_rows import NO_WINDOW, HostRows, Int64s
from aserve_kernels.cpu.online_softmax import fold_log2, softmax_update
from aserve_kernels.cpu.precompile import FAST, UNCOUNTED, cached_njit, compile_ahead
from aserve_kernels.cpu.simd import (
    LANES,
    add_product,
    dot_products,
    load,
    prefetch,
    splat,
    store,
    zeros,
)
from aserve_kernels.paged_rows import PagedRows, Scoring, attend_ref

TILE = 64  # keys that are widened and scored together at most
TILE_FLOATS = 4096  # of a tile's keys
WIDTH = 2 * LANES  # a head is padded to a multiple of it
BLOCK = 16  # query heads of one KV head that share a read


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *,
    out: Tensor, num_workers: int,
) -> None:  # fmt: skip
    """q and out [tokens, heads, head_dim], keys and values [slots, kv_heads, head_dim]; all float32
    or all bfloat16, on the CPU, all but q contiguous. Writes the rows' queries in `out`, no other.
    `num_workers` share it: one where it was compiled for one, else any number above. `scoring` has
    no scales of stored keys and values: those are for eight bits.
    """
    factor, cap = fold_log2(scoring.scale, scoring.softcap)
    own = rows.queries
    attend = _attend_alone if num_workers == 1 else _attend
    attend(
        q.float().numpy(), as_array(keys), as_array(values), as_array(out),
        rows.page_table, own.rows, own.lens, own.starts, own.query_lens, rows.page_size,
        NO_WINDOW if scoring.window is None else scoring.window,
        np.float32(factor),
        np.float32(cap),
        num_workers,
    )  # fmt: skip


def paged_attention_ref(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *, out: Tensor
) -> None:
    """The same in plain torch, row by row, in the dtype of q."""
    own = rows.queries
    for row, kv_len, start, query_len in zip(
        own.rows, own.lens, own.starts, own.query_lens, strict=True
    ):
        paged = PagedRows(
            torch.from_numpy(rows.page_table),
            rows.page_size,
            rows=torch.tensor([row]),
            lens=torch.tensor([kv_len]),
            cu_query_lens=torch.tensor([start, start + query_len]),
            max_len=int(kv_len),
        )
        attend_ref(q, keys, values, paged, scoring, out=out, takes=lambda _span: True)


def compile_paged_attention(dtype: torch.dtype, num_workers: int) -> None:
    """For this dtype, and either for one worker or for several."""
    floats = types.uint16 if dtype == torch.bfloat16 else types.float32
    heads = types.Array(floats, 3, "C")
    column = types.Array(types.int64, 1, "C")
    compile_ahead(
        _attend_alone if num_workers == 1 else _attend,
        *(types.Array(types.float32, 3, "A"), heads, heads, heads),
        *(types.Array(types.int64, 2, "C"), column, column, column, column),
        *(types.int64, types.int64, types.float32, types.float32, types.int64),
    )


@cached_njit(parallel=True, nogil=True)
def _attend(
    q: Float32s, keys: Floats, values: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, num_workers: int,
) -> None:  # fmt: skip
    for worker in prange(num_workers):
        attend_share(
            q, keys, values, out, page_table, rows, lens, starts, query_lens, page_size,
            window, factor, cap, worker, num_workers,
        )  # fmt: skip


# PERF: a parallel region wakes every thread of numba's pool, however few have work.
@cached_njit(nogil=True)
def _attend_alone(
    q: Float32s, keys: Floats, values: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, num_workers: int,
) -> None:  # fmt: skip
    for worker in range(num_workers):
        attend_share(
            q, keys, values, out, page_table, rows, lens, starts, query_lens, page_size,
            window, factor, cap, worker, num_workers,
        )  # fmt: skip


# Inlined, like what else has one caller: numba optimises a function anew in each that calls it, and
# a call costs more than scoring a few keys (16 rows of 100, 8 heads of 32: 69 us against 85).
@njit(inline="always")
def attend_share(
    q: Float32s, keys: Floats, values: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32,
    worker: int, num_workers: int,
) -> None:  # fmt: skip
    """What one of num_workers does: of units, some KV heads of a block of a row's queries, every
    num_workers-th."""
    num_kv_heads = keys.shape[1]
    num_groups = q.shape[1] // num_kv_heads
    query_len = max(1, BLOCK // num_groups)
    num_blocks = 0
    for r in range(rows.shape[0]):
        num_blocks += -(-query_lens[r] // query_len)
    # PERF: a token's heads lie side by side, so a worker takes as many of them as it can while two
    # units are left for each.
    heads = min(num_kv_heads, max(1, num_blocks * num_kv_heads // (2 * num_workers)))
    width = _width(keys)
    lines = np.zeros((2, heads * query_len * num_groups * width), np.float32)
    softmax = np.empty((heads * query_len * num_groups, 2), np.float32)
    tiles = np.zeros((2, _tile_size(width) * width), np.float32)
    scores, slots = np.empty(TILE, np.float32), np.empty(TILE, np.int64)
    unit = 0
    for r in range(rows.shape[0]):
        for first in range(0, query_lens[r], query_len):
            last = min(first + query_len, query_lens[r])
            for head in range(0, num_kv_heads, heads):
                unit += 1
                if unit % num_workers != worker:
                    continue
                _attend_block(
                    q[starts[r] + first : starts[r] + last],
                    keys, values,
                    out[starts[r] + first : starts[r] + last],
                    page_table[rows[r]], page_size,
                    lens[r] - query_lens[r] + first, head, min(head + heads, num_kv_heads),
                    window, factor, cap, lines, softmax, tiles, scores, slots,
                )  # fmt: skip


@njit(inline="always")
def _width(keys: Floats) -> int:
    """Of a line: a head, padded with zeros, which add nothing to a score."""
    return -(-keys.shape[2] // WIDTH) * WIDTH


@njit(inline="always")
def _tile_size(width: int) -> int:
    """PERF: a tile of keys and one of values stay in the nearest cache, beside the queries."""
    return max(LANES, min(TILE, TILE_FLOATS // width // LANES * LANES))


@njit(nogil=True, fastmath=FAST, **UNCOUNTED)
def _attend_block(
    q: Float32s, keys: Floats, values: Floats, out: Floats, pages: Int64s, page_size: int,
    position: int, first_head: int, last_head: int,
    window: int, factor: np.float32, cap: np.float32,
    lines: Float32s, softmax: Float32s, tiles: Float32s, scores: Float32s, slots: Int64s,
) -> None:  # fmt: skip
    """q, out [queries, heads, head_dim] at `position` and on, for KV heads first_head..last_head.

    Room: `lines` for the queries and their outputs; `softmax` for [most, total] of each; `tiles`
    for keys and values.
    """
    num_queries, head_dim = q.shape[0], q.shape[2]
    num_groups = q.shape[1] // keys.shape[1]
    queries, outputs = lines[0], lines[1]
    tile_keys, tile_values = tiles[0], tiles[1]
    width = _width(keys)
    most_keys = _tile_size(width)
    num_lines = (last_head - first_head) * num_queries * num_groups
    for line in range(num_lines):
        query = line // num_groups % num_queries
        head = first_head + line // (num_groups * num_queries)
        widen(
            q[query, head * num_groups + line % num_groups],
            queries[line * width : line * width + head_dim],
        )
        for d in range(line * width, line * width + width):
            queries[d] *= factor
            outputs[d] = np.float32(0)
        softmax[line, 0] = -np.inf
        softmax[line, 1] = np.float32(0)
    # At absolute places, so that a query's sums are the same whatever stands beside it.
    start = max(0, position - window + 1) // most_keys * most_keys
    stop = position + num_queries
    column = start // page_size
    offset = start % page_size
    for tile in range(start, stop, most_keys):
        size = min(most_keys, stop - tile)
        for j in range(size):
            slots[j] = pages[column] * page_size + offset
            offset += 1
            if offset == page_size:
                offset = 0
                column += 1
        for head in range(first_head, last_head):
            _widen_tile(keys, slots, size, head, tile_keys, width)
            _widen_tile(values, slots, size, head, tile_values, width)
            first_line = (head - first_head) * num_queries * num_groups
            for i in range(num_queries * num_groups):
                own = position + i // num_groups
                low = max(0, own - window + 1 - tile)
                high = min(size, own + 1 - tile)
                if low < high:
                    line = first_line + i
                    _score(queries, line * width, width, tile_keys, low, high, scores)
                    shrink = softmax_update(scores, low, high, cap, softmax, line)
                    _add_values(
                        scores, low, high, tile_values, shrink, outputs, line * width, width
                    )
    for line in range(num_lines):
        query = line // num_groups % num_queries
        head = first_head + line // (num_groups * num_queries)
        share = np.float32(1) / softmax[line, 1]
        for d in range(line * width, line * width + width):
            outputs[d] *= share
        narrow(
            outputs[line * width : line * width + head_dim],
            out[query, head * num_groups + line % num_groups],
        )


@njit(nogil=True, **UNCOUNTED)
def _widen_tile(
    source: Floats, slots: Int64s, size: int, head: int, tile: Float32s, width: int
) -> None:
    """tile [keys * width]: what the slots hold of a head, one after the other."""
    num_heads, head_dim = source.shape[1], source.shape[2]
    whole = head_dim // LANES * LANES
    flat = source.reshape(-1)
    for j in range(size):
        start = (slots[j] * num_heads + head) * head_dim
        # PERF: no machine foresees that the next head's part is read soon. 32 rows of 1,000 tokens,
        # 8 heads of 128 in bfloat16: 14 ms against 34 without.
        for d in range(0, whole, LANES):
            prefetch(flat, start + head_dim + d)
            store(load(flat, start + d), tile, j * width + d)
    if whole < head_dim:
        for j in range(size):
            widen(source[slots[j], head, whole:], tile[j * width + whole : j * width + head_dim])


@njit(inline="always")
def _score(
    queries: Float32s, start: int, width: int, keys: Float32s, low: int, high: int, scores: Float32s
) -> None:
    """Sixteen keys at a time, so some that are not asked for: `scores` and `keys` have room."""
    for j in range(low // LANES * LANES, high, LANES):
        store(dot_products(queries, start, keys, j * width, width), scores, j)


@njit(inline="always")
def _add_values(
    weights: Float32s, low: int, high: int, values: Float32s,
    shrink: np.float32, outputs: Float32s, start: int, width: int,
) -> None:  # fmt: skip
    """output = output * shrink + the weighted sum of values low..high."""
    for i in range(0, width, 2 * LANES):
        a = add_product(zeros(), load(outputs, start + i), splat(shrink))
        b = add_product(zeros(), load(outputs, start + i + LANES), splat(shrink))
        # PERF: sums of even and of odd values, since a sum waits four cycles for the one before.
        c, d = zeros(), zeros()
        for j in range(low, high - 1, 2):
            value = j * width + i
            even, odd = splat(weights[j]), splat(weights[j + 1])
            a = add_product(a, even, load(values, value))
            b = add_product(b, even, load(values, value + LANES))
            c = add_product(c, odd, load(values, value + width))
            d = add_product(d, odd, load(values, value + width + LANES))
        if (high - low) % 2:
            last = splat(weights[high - 1])
            a = add_product(a, last, load(values, (high - 1) * width + i))
            b = add_product(b, last, load(values, (high - 1) * width + i + LANES))
        one = splat(np.float32(1))
        store(add_product(a, c, one), outputs, start + i)
        store(add_product(b, d, one), outputs, start + i + LANES)
