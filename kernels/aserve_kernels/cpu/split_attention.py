"""Paged attention for few queries per row, of float32 queries with KV of bfloat16.

Keys and values are widened in registers, and a token's heads are read together, in the order of
memory. WHY: the keys of one head lie in few sets of the L1 cache (with 8 heads of 128 they are 2 KB
apart, so two sets have each line of 32 keys), and are lost there before they are read again.

Query rows and outputs are split (split_rows.py). Sums have the same order, however many queries and
tokens there are.

PERF: AVX2, two threads, 8 rows of 100, 1,000 and 4,000 tokens, 16 heads and 8 KV heads of 128, time
over that with tiles that are widened head by head: 0.82, 0.61, 0.77. With two query rows at once,
and prefetches that are spread over the products, 0.92, 0.89, 0.89 of that (128 tokens, not 100).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats
from aserve_kernels.cpu.host_rows import Int64s, find_slots
from aserve_kernels.cpu.online_softmax import output_scale, softmax_update
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT
from aserve_kernels.cpu.split_rows import (
    AT_ONCE,
    Scores,
    SplitRows,
    StoredRows,
    add_rows,
    add_rows_to_two,
    join_row,
    scale_row,
    score_rows,
    split_row,
)

AHEAD = 8  # tokens by which prefetches are ahead, a multiple of AT_ONCE


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def attend_split_block(
    q: Float32s, keys: Floats, values: Floats, out: Floats, pages: Int64s, page_size: int,
    position: int, first_head: int, last_head: int,
    window: int, factor: np.float32, cap: np.float32, sinks: Float32s, value_scale: np.float32,
    vectors: Float32s, softmax: Float32s, scores: Float32s, places: Int64s, tile_size: int,
) -> None:  # fmt: skip
    """Attends q [queries, heads, head_dim], at positions from `position` on, for the KV heads
    first_head..last_head, and writes out [queries, heads, head_dim].

    A query row is one query of one head. Scratch memory: `vectors` for the query rows and their
    outputs, `softmax` for [row_max, row_sum] of each, `scores` [query rows, tile_size or more], and
    `places` for those of a tile's tokens and of the next one's.
    """
    num_queries, width = q.shape[0], q.shape[2]
    group_size = q.shape[1] // keys.shape[1]
    per_head = num_queries * group_size  # query rows
    num_query_rows = (last_head - first_head) * per_head
    queries, outputs = vectors[0], vectors[1]
    all_keys, all_values = keys.reshape(-1), values.reshape(-1)
    all_scores, stride = scores.reshape(-1), scores.shape[1]
    per_token = keys.shape[1] * width
    own, following = places[0], places[1]
    for query_row in range(num_query_rows):
        query = query_row // group_size % num_queries
        head = (first_head + query_row // per_head) * group_size + query_row % group_size
        split_row(q[query, head], factor, queries, query_row * width)
        softmax[query_row, 0] = -np.inf
        softmax[query_row, 1] = np.float32(0)
    for d in range(num_query_rows * width):
        outputs[d] = np.float32(0)
    # Tiles lie at absolute positions, so that a query's sums have the same order in every step.
    start = max(0, position - window + 1) // tile_size * tile_size
    stop = position + num_queries
    size = _find_places(pages, page_size, start, min(tile_size, stop - start), per_token, own)
    for tile in range(start, stop, tile_size):
        rest = max(0, min(tile_size, stop - tile - tile_size))
        next_size = _find_places(pages, page_size, tile + tile_size, rest, per_token, following)
        for j in range(0, size, AT_ONCE):
            then, its_places, first = _ahead(all_keys, own, size, all_values, own, size, j)
            for head in range(first_head, last_head):
                rows = StoredRows(all_keys, own, j, head * width)
                later = StoredRows(then, its_places, first, head * width)
                query_row = (head - first_head) * per_head
                for _ in range(per_head // 2):
                    at = Scores(all_scores, query_row * stride + j, stride)
                    x = SplitRows(queries, query_row * width, width)
                    score_rows(x, rows, later, at, 2)
                    query_row += 2
                if per_head % 2:
                    at = Scores(all_scores, query_row * stride + j, stride)
                    x = SplitRows(queries, query_row * width, width)
                    score_rows(x, rows, later, at, 1)
        num_keys = min(tile_size, stop - tile)
        for query_row in range(num_query_rows):
            query = query_row // group_size % num_queries
            low, high = _seen(position + query - tile, window, num_keys)
            if low < high:
                rescale = softmax_update(scores[query_row], low, high, cap, softmax, query_row)
                scale_row(outputs, query_row * width, width, rescale)
        for j in range(0, size, AT_ONCE):
            then, its_places, first = _ahead(
                all_values, own, size, all_keys, following, next_size, j
            )
            for head in range(first_head, last_head):
                rows = StoredRows(all_values, own, j, head * width)
                later = StoredRows(then, its_places, first, head * width)
                query_row = (head - first_head) * per_head
                for query in range(num_queries):
                    low, high = _seen(position + query - tile, window, num_keys)
                    low, high = max(0, low - j), min(AT_ONCE, high - j)
                    for _ in range(group_size // 2):
                        at = Scores(all_scores, query_row * stride + j, stride)
                        sums = SplitRows(outputs, query_row * width, width)
                        add_rows_to_two(at, rows, later, low, high, sums)
                        query_row += 2
                    if group_size % 2:
                        at = Scores(all_scores, query_row * stride + j, stride)
                        sums = SplitRows(outputs, query_row * width, width)
                        add_rows(at, rows, later, low, high, sums)
                        query_row += 1
        own, following, size = following, own, next_size
    for query_row in range(num_query_rows):
        query = query_row // group_size % num_queries
        head = (first_head + query_row // per_head) * group_size + query_row % group_size
        scale = output_scale(softmax[query_row, 0], softmax[query_row, 1], sinks[head], value_scale)
        join_row(outputs, query_row * width, scale, out[query, head])


@njit(inline="always")
def _find_places(
    pages: Int64s, page_size: int, start: int, size: int, per_token: int, places: Int64s
) -> int:
    """Writes where the KV of `size` tokens from number `start` on begins in flat KV, of which each
    token has `per_token` elements. The last place is repeated up to a multiple of four. Returns how
    many there are."""
    find_slots(pages, page_size, start, size, places)
    for i in range(size):
        places[i] *= per_token
    padded = -(-size // AT_ONCE) * AT_ONCE
    for i in range(size, padded):
        places[i] = places[size - 1]
    return padded


@njit(inline="always")
def _seen(position: int, window: int, num_keys: int) -> tuple[int, int]:
    """Returns the first key of a tile that the query at `position` sees, and the one after its
    last. Positions count from the first key of the tile."""
    return max(0, position - window + 1), min(num_keys, position + 1)


@njit(inline="always")
def _ahead(
    kv: Floats, places: Int64s, size: int, then: Floats, then_places: Int64s, then_size: int, j: int
) -> tuple[Floats, Int64s, int]:  # fmt: skip
    """Returns what is read AHEAD of place j: an array, places in it, and which of them are next.
    `then` is read behind `kv`; behind both, they are those of j again, which are in the cache."""
    if j + AHEAD < size:
        return kv, places, j + AHEAD
    if j + AHEAD - size < then_size:
        return then, then_places, j + AHEAD - size
    return kv, places, j
