"""Paged attention for few queries per row, of float32 queries with KV of bfloat16.

Keys and values are widened in registers, and a token's heads are read together, in the order of
memory. WHY: the keys of one head lie in few sets of the L1 cache (with 8 heads of 128 they are 2 KB
apart, so two sets have each line of 32 keys), and are lost there before they are read again.

Query rows and outputs are split (split_rows.py). Sums have the same order, however many queries and
tokens there are.

PERF: AVX2, two threads, 8 rows of 100, 1,000 and 4,000 tokens, 16 heads and 8 KV heads of 128, time
over that with tiles that are widened head by head: 0.82, 0.61, 0.77.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats
from aserve_kernels.cpu.host_rows import Int64s, find_slots
from aserve_kernels.cpu.online_softmax import output_scale, softmax_update
from aserve_kernels.cpu.pair_rows import PAIRS
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT
from aserve_kernels.cpu.simd import prefetch
from aserve_kernels.cpu.split_rows import (
    AT_ONCE,
    add_rows,
    add_rows_to_two,
    join_row,
    scale_row,
    score_rows,
    split_row,
)

AHEAD = 8  # tokens by which prefetches are ahead


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def attend_split_block(
    q: Float32s, keys: Floats, values: Floats, out: Floats, pages: Int64s, page_size: int,
    position: int, first_head: int, last_head: int,
    window: int, factor: np.float32, cap: np.float32, sinks: Float32s, value_scale: np.float32,
    vectors: Float32s, softmax: Float32s, scores: Float32s, slots: Int64s, tile_size: int,
) -> None:  # fmt: skip
    """Attends q [queries, heads, head_dim], at positions from `position` on, for the KV heads
    first_head..last_head, and writes out [queries, heads, head_dim].

    A query row is one query of one head. Scratch memory: `vectors` for the query rows and their
    outputs, `softmax` for [row_max, row_sum] of each, `scores` for those of a tile, `slots` for
    those of a tile and of the next one, and the places of a head in some of them.
    """
    num_queries, width = q.shape[0], q.shape[2]
    group_size = q.shape[1] // keys.shape[1]
    per_head = num_queries * group_size  # query rows
    num_query_rows = (last_head - first_head) * per_head
    queries, outputs = vectors[0], vectors[1]
    all_keys, all_values = keys.reshape(-1), values.reshape(-1)
    num_heads = keys.shape[1]
    own_slots, next_slots, places = slots[0], slots[1], slots[2]
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
    find_slots(pages, page_size, start, min(tile_size, stop - start), own_slots)
    for tile in range(start, stop, tile_size):
        own = own_slots[: min(tile_size, stop - tile)]
        next_ = next_slots[: max(0, min(tile_size, stop - tile - tile_size))]
        find_slots(pages, page_size, tile + tile_size, len(next_), next_slots)
        for j in range(0, len(own), AT_ONCE):
            for head in range(first_head, last_head):
                _find_places(own, j, num_heads, head, width, places)
                _prefetch(all_keys, own, all_values, own, j, num_heads, head, width)
                first = (head - first_head) * per_head
                for query_row in range(first, first + per_head):
                    own_scores = scores[query_row, j:]
                    score_rows(queries, query_row * width, width, all_keys, places, own_scores)
        for query_row in range(num_query_rows):
            low, high = _seen(query_row, num_queries, group_size, position - tile, window, len(own))
            if low < high:
                rescale = softmax_update(scores[query_row], low, high, cap, softmax, query_row)
                scale_row(outputs, query_row * width, width, rescale)
        for j in range(0, len(own), AT_ONCE):
            for head in range(first_head, last_head):
                _find_places(own, j, num_heads, head, width, places)
                _prefetch(all_values, own, all_keys, next_, j, num_heads, head, width)
                first = (head - first_head) * per_head
                for query_row in range(first, first + per_head, 2 - group_size % 2):
                    low, high = _seen(
                        query_row, num_queries, group_size, position - tile, window, len(own)
                    )
                    low, high = max(0, low - j), min(AT_ONCE, high - j)
                    if low >= high:
                        continue
                    at = query_row * width
                    if group_size % 2:
                        add_rows(
                            scores[query_row, j:], all_values, places, low, high,
                            outputs, at, width,
                        )  # fmt: skip
                    else:
                        add_rows_to_two(
                            scores[query_row : query_row + 2, j:], all_values, places,
                            low, high, outputs, at, width,
                        )  # fmt: skip
        own_slots, next_slots = next_slots, own_slots
    for query_row in range(num_query_rows):
        query = query_row // group_size % num_queries
        head = (first_head + query_row // per_head) * group_size + query_row % group_size
        scale = output_scale(softmax[query_row, 0], softmax[query_row, 1], sinks[head], value_scale)
        join_row(outputs, query_row * width, scale, out[query, head])


@njit(inline="always")
def _seen(
    query_row: int, num_queries: int, group_size: int, position: int, window: int, size: int
) -> tuple[int, int]:
    """Returns the first key of a tile that a query row sees, and the one after its last. The tile
    has `size` keys; `position`, that of the first query, counts from its first key."""
    own = position + query_row // group_size % num_queries
    return max(0, own - window + 1), min(size, own + 1)


@njit(inline="always")
def _find_places(
    slots: Int64s, j: int, num_heads: int, head: int, head_dim: int, places: Int64s
) -> None:
    """Writes where this head of four slots, from number j on, begins in flat KV; behind the slots,
    places repeat the last one."""
    for i in range(AT_ONCE):
        places[i] = (slots[min(j + i, len(slots) - 1)] * num_heads + head) * head_dim


@njit(inline="always")
def _prefetch(
    kv: Floats,
    slots: Int64s,
    later: Floats,
    later_slots: Int64s,
    j: int,
    num_heads: int,
    head: int,
    head_dim: int,
) -> None:
    """Prefetches this head of four slots, AHEAD of number j: those of `kv`, and behind them those
    of `later`."""
    for i in range(j + AHEAD, j + AHEAD + AT_ONCE):
        if i < len(slots):
            start = (slots[i] * num_heads + head) * head_dim
            for d in range(0, head_dim, PAIRS):
                prefetch(kv, start + d)
        elif i - len(slots) < len(later_slots):
            start = (later_slots[i - len(slots)] * num_heads + head) * head_dim
            for d in range(0, head_dim, PAIRS):
                prefetch(later, start + d)
