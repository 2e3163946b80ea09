"""Paged attention on the CPU for few queries per row: decode, verification and short chunks.

    out = softmax(cap(scale * q k^T) + mask) v    a head's sink joins its softmax, without a value

Keys and values are read through the page table, a tile at a time. Those of bfloat16 are multiplied
as they are stored, by queries of bfloat16 where the processor has dot products of those, else as
split_attention.py does it; others are widened to float32. The query heads that share a KV head
(grouped-query attention), of up to BLOCK queries and heads, share each tile; the softmax is online.
Tiles lie at absolute positions, so a query's sums have the same order in every step. Work is
divided among threads by row, block of queries and KV heads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, numba_type, widen
from aserve_kernels.cpu.exp2 import LOG2_E
from aserve_kernels.cpu.host_rows import NO_WINDOW, HostRows, Int64s, find_slots
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, scratch
from aserve_kernels.cpu.online_softmax import fold_log2, output_scale, softmax_update
from aserve_kernels.cpu.pair_rows import (
    PAIRS,
    load_even,
    load_odd,
    pair_dot_products,
    store_pairs,
)
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT, cached_njit, compile_ahead
from aserve_kernels.cpu.simd import (
    LANES,
    dot_products,
    fma,
    load,
    prefetch,
    splat,
    store,
    zeros,
)
from aserve_kernels.cpu.split_attention import attend_split_block
from aserve_kernels.cpu.team import worker_of
from aserve_kernels.cpu.tiles import HAS_FAST_PAIRS
from aserve_kernels.paged_rows import PagedRows, Scoring, attend_ref

TILE = 64  # the most keys of a tile
TILE_FLOATS = 4096  # the most elements of a tile's keys
WIDTH = 2 * LANES  # head_dim is padded to a multiple of it
BLOCK = 16  # query rows (queries times heads of one KV head) that share a tile


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *,
    out: Tensor, num_workers: int,
) -> None:  # fmt: skip
    """Writes `out` for the queries of `rows`, and for no other token.

    q and out [tokens, heads, head_dim], keys and values [slots, kv_heads, head_dim]; all float32 or
    all bfloat16, or keys and values bfloat16 or fp8, on the CPU, and contiguous but for q.
    `num_workers` threads share the work: one if it was compiled for one, else any number above.
    """
    factor, cap = fold_log2(scoring.scale * scoring.key_scale, scoring.softcap)
    queries = rows.queries
    attend = _attend_alone if num_workers == 1 else _attend
    attend(
        q.float().numpy(), as_array(keys), as_array(values), as_array(out),
        rows.page_table, queries.rows, queries.lens, queries.starts, queries.query_lens,
        rows.page_size,
        NO_WINDOW if scoring.window is None else scoring.window,
        np.float32(factor),
        np.float32(cap),
        _sinks(scoring.sinks, q.shape[1]),
        np.float32(scoring.value_scale),
        num_workers,
    )  # fmt: skip


def _sinks(sinks: Tensor | None, num_heads: int) -> Float32s:
    """The sinks in units of log2(e), [heads]; -inf for none."""
    if sinks is None:
        return np.full(num_heads, -np.inf, np.float32)
    return np.asarray(sinks.float().numpy() * np.float32(LOG2_E))


def paged_attention_ref(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *, out: Tensor
) -> None:
    """The same in plain torch, row by row, in the dtype of q."""
    queries = rows.queries
    for row, kv_len, start, query_len in zip(
        queries.rows, queries.lens, queries.starts, queries.query_lens, strict=True
    ):
        paged = PagedRows(
            torch.from_numpy(rows.page_table),
            rows.page_size,
            rows=torch.tensor([row]),
            lens=torch.tensor([kv_len]),
            cu_query_lens=torch.tensor([start, start + query_len]),
            max_len=int(kv_len),
        )
        attend_ref(q, keys, values, paged, scoring, out=out, takes=lambda _query_len: True)


def compile_paged_attention(
    dtype: torch.dtype, num_workers: int, kv_dtype: torch.dtype | None = None
) -> None:
    """Compiles for this dtype, of KV as well unless another one is given, and either for one worker
    or for several."""
    heads = types.Array(numba_type(dtype), 3, "C")
    pool = types.Array(numba_type(kv_dtype or dtype), 3, "C")
    column = types.Array(types.int64, 1, "C")
    compile_ahead(
        _attend_alone if num_workers == 1 else _attend,
        *(types.Array(types.float32, 3, "A"), pool, pool, heads),
        *(types.Array(types.int64, 2, "C"), column, column, column, column),
        *(types.int64, types.int64, types.float32, types.float32),
        *(types.Array(types.float32, 1, "C"), types.float32, types.int64),
    )


@cached_njit(parallel=True, nogil=True)
def _attend(
    q: Float32s, keys: Floats, values: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, sinks: Float32s,
    value_scale: np.float32, num_workers: int,
) -> None:  # fmt: skip
    for index in prange(num_workers):
        attend_share(
            q, keys, values, out, page_table, rows, lens, starts, query_lens, page_size,
            window, factor, cap, sinks, value_scale, worker_of(index), num_workers,
        )  # fmt: skip


# PERF: a parallel region wakes every thread of numba's pool, even if one has work.
@cached_njit(nogil=True)
def _attend_alone(
    q: Float32s, keys: Floats, values: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, sinks: Float32s,
    value_scale: np.float32, num_workers: int,
) -> None:  # fmt: skip
    for worker in range(num_workers):
        attend_share(
            q, keys, values, out, page_table, rows, lens, starts, query_lens, page_size,
            window, factor, cap, sinks, value_scale, worker, num_workers,
        )  # fmt: skip


# PERF: inlined, like all functions with one caller: a call costs more than scoring a few keys (16
# rows of 100, 8 heads of 32: 69 us against 85).
@njit(inline="always")
def attend_share(
    q: Float32s, keys: Floats, values: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, sinks: Float32s,
    value_scale: np.float32, worker: int, num_workers: int,
) -> None:  # fmt: skip
    """The share of one worker: every num_workers-th unit of work. A unit is some KV heads of one
    block of a row's queries."""
    num_kv_heads = keys.shape[1]
    group_size = q.shape[1] // num_kv_heads
    longest, num_blocks = 1, 0
    for r in range(rows.shape[0]):
        longest = max(longest, query_lens[r])
    query_len = max(1, min(BLOCK // group_size, longest))
    for r in range(rows.shape[0]):
        num_blocks += -(-query_lens[r] // query_len)
    # PERF: a token's heads are adjacent in memory, so a unit has as many of them as leave two units
    # for each worker, or one from each block. One row of 4,000 tokens, two workers: units of 4 of 8
    # heads take 0.84 of the time of 2.
    heads = max(-(-num_kv_heads // num_workers), num_blocks * num_kv_heads // (2 * num_workers))
    heads = min(num_kv_heads, heads)
    while num_kv_heads % heads:
        heads -= 1
    width = padded_width(keys)
    num_query_rows = heads * query_len * group_size
    vectors = scratch((2, num_query_rows * width), FLOAT32_LIKE)
    vectors[:] = np.float32(0)
    softmax = scratch((num_query_rows, 2), FLOAT32_LIKE)
    has_pairs = keys.itemsize == 2 and keys.shape[2] % PAIRS == 0
    is_split = has_pairs and not has_dots(out)
    tiles = scratch((2, 0 if has_pairs else tile_len(width) * width), FLOAT32_LIKE)
    tiles[:] = np.float32(0)
    pairs = scratch((num_query_rows * width,), keys)
    scores = scratch((num_query_rows if is_split else 2, TILE), FLOAT32_LIKE)
    slots = scratch((4, TILE), INT64_LIKE)
    unit = 0
    for r in range(rows.shape[0]):
        for first in range(0, query_lens[r], query_len):
            last = min(first + query_len, query_lens[r])
            for head in range(0, num_kv_heads, heads):
                unit += 1
                if unit % num_workers != worker:
                    continue
                own_q = q[starts[r] + first : starts[r] + last]
                own_out = out[starts[r] + first : starts[r] + last]
                position = lens[r] - query_lens[r] + first
                last_head = min(head + heads, num_kv_heads)
                if is_split:
                    attend_split_block(
                        own_q, keys, values, own_out, page_table[rows[r]], page_size,
                        position, head, last_head, window, factor, cap, sinks, value_scale,
                        vectors, softmax, scores, slots, TILE,
                    )  # fmt: skip
                    continue
                _attend_block(
                    own_q, keys, values, own_out, page_table[rows[r]], page_size,
                    position, head, last_head, window, factor, cap, sinks, value_scale,
                    vectors, pairs, softmax, tiles, scores, slots,
                )  # fmt: skip


@njit(inline="always")
def has_dots(out: Floats) -> bool:
    """Returns whether one instruction multiplies pairs of bfloat16, and is fast.

    PERF: where it is slow (tiles.py), 8 rows of 4,000 tokens take 0.94 of the time without it.
    """
    return HAS_FAST_PAIRS and out.itemsize == 2


@njit(inline="always")
def padded_width(keys: Floats) -> int:
    """head_dim, padded with zeros to a multiple of WIDTH; zeros add nothing to a score."""
    return -(-keys.shape[2] // WIDTH) * WIDTH


@njit(inline="always")
def tile_len(width: int) -> int:
    """Returns the keys of a tile. PERF: a tile of keys and one of values stay in the L1 cache,
    beside the queries.
    """
    return max(LANES, min(TILE, TILE_FLOATS // width // LANES * LANES))


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def _attend_block(
    q: Float32s, keys: Floats, values: Floats, out: Floats, pages: Int64s, page_size: int,
    position: int, first_head: int, last_head: int,
    window: int, factor: np.float32, cap: np.float32, sinks: Float32s, value_scale: np.float32,
    vectors: Float32s, pairs: Floats, softmax: Float32s, tiles: Float32s, scores: Float32s,
    slots: Int64s,
) -> None:  # fmt: skip
    """Attends q [queries, heads, head_dim], at positions from `position` on, for the KV heads
    first_head..last_head, and writes out [queries, heads, head_dim].

    A query row is one query of one head. Scratch memory: `vectors` for the query rows and their
    outputs, `pairs` for query rows in the dtype of KV, `softmax` for [row_max, row_sum] of each,
    `tiles` for a tile of keys and one of values, `slots` for those of a tile and of the next one,
    the places of a head there, and the places that are read after those.
    """
    num_queries, head_dim = q.shape[0], q.shape[2]
    group_size = q.shape[1] // keys.shape[1]
    queries, outputs = vectors[0], vectors[1]
    tile_keys, tile_values = tiles[0], tiles[1]
    all_keys, all_values = keys.reshape(-1), values.reshape(-1)
    own_slots, next_slots, places, next_places = slots[0], slots[1], slots[2], slots[3]
    is_paired = has_dots(out) and keys.itemsize == 2 and head_dim % PAIRS == 0
    # PERF: two heads of a query weight the same values, which are loaded and widened once.
    num_together = 2 if is_paired and group_size % 2 == 0 else 1
    width = padded_width(keys)
    tile_size = tile_len(width)
    num_query_rows = (last_head - first_head) * num_queries * group_size
    for query_row in range(num_query_rows):
        query = query_row // group_size % num_queries
        head = first_head + query_row // (group_size * num_queries)
        own, end = q[query, head * group_size + query_row % group_size], (query_row + 1) * width
        if is_paired:
            narrow(own, pairs[query_row * width : end])
        else:
            widen(own, queries[query_row * width : query_row * width + head_dim])
            for d in range(query_row * width, end):
                queries[d] *= factor
        for d in range(query_row * width, end):
            outputs[d] = np.float32(0)
        softmax[query_row, 0] = -np.inf
        softmax[query_row, 1] = np.float32(0)
    # Tiles lie at absolute positions, so that a query's sums have the same order in every step.
    start = max(0, position - window + 1) // tile_size * tile_size
    stop = position + num_queries
    find_slots(pages, page_size, start, min(tile_size, stop - start), own_slots)
    for tile in range(start, stop, tile_size):
        size = min(tile_size, stop - tile)
        next_size = min(tile_size, stop - tile - tile_size)
        find_slots(pages, page_size, tile + tile_size, next_size, next_slots)
        for head in range(first_head, last_head):
            if is_paired:
                find_places(keys, own_slots, size, head, size, places)
                if head + 1 < last_head or next_size <= 0:
                    find_places(keys, own_slots, size, head + 1, size, next_places)
                else:
                    find_places(keys, next_slots, next_size, first_head, size, next_places)
            else:
                widen_tile(keys, own_slots, size, head, tile_keys, width)
                widen_tile(values, own_slots, size, head, tile_values, width)
            first_query_row = (head - first_head) * num_queries * group_size
            for i in range(0, num_queries * group_size, num_together):
                query_position = position + i // group_size
                low = max(0, query_position - window + 1 - tile)
                high = min(size, query_position + 1 - tile)
                if low < high:
                    query_row = first_query_row + i
                    at = query_row * width
                    if not is_paired:
                        score(queries, at, width, tile_keys, low, high, scores[0])
                        rescale = softmax_update(scores[0], low, high, cap, softmax, query_row)
                        add_values(scores[0], low, high, tile_values, rescale, outputs, at, width)
                        continue
                    score_pairs(pairs, at, width, all_keys, places, low, high, factor, scores[0])
                    rescale = softmax_update(scores[0], low, high, cap, softmax, query_row)
                    is_first, is_last = i == 0, i + num_together == num_queries * group_size
                    if num_together == 1:
                        add_pairs(
                            scores[0], low, high, all_values, places, rescale, outputs, at, width,
                            all_keys, next_places, is_first, is_last,
                        )  # fmt: skip
                        continue
                    score_pairs(
                        pairs, at + width, width, all_keys, places, low, high, factor, scores[1]
                    )
                    next_rescale = softmax_update(scores[1], low, high, cap, softmax, query_row + 1)
                    add_two_pairs(
                        scores, low, high, all_values, places, rescale, next_rescale, outputs, at,
                        width, all_keys, next_places, is_first, is_last,
                    )  # fmt: skip
        own_slots, next_slots = next_slots, own_slots
    for query_row in range(num_query_rows):
        query = query_row // group_size % num_queries
        head = first_head + query_row // (group_size * num_queries)
        own_head = head * group_size + query_row % group_size
        scale = output_scale(
            softmax[query_row, 0], softmax[query_row, 1], sinks[own_head], value_scale
        )
        for d in range(query_row * width, query_row * width + width):
            outputs[d] *= scale
        if is_paired:
            for d in range(0, head_dim, PAIRS):
                even, odd = (query_row * width + d, query_row * width + d + LANES)
                store_pairs(load(outputs, even), load(outputs, odd), out[query, own_head], d)
        else:
            own = outputs[query_row * width : query_row * width + head_dim]
            narrow(own, out[query, own_head])


@njit(nogil=True, **NO_REFCOUNT)
def widen_tile(
    source: Floats, slots: Int64s, size: int, head: int, tile: Float32s, width: int
) -> None:
    """Copies one head of these slots into tile [keys * width], widened to float32."""
    num_heads, head_dim = source.shape[1], source.shape[2]
    num_whole = head_dim // LANES * LANES
    flat = source.reshape(-1)
    for j in range(size):
        start = (slots[j] * num_heads + head) * head_dim
        # PERF: no hardware prefetcher foresees that the next head is read soon. 32 rows of 1,000
        # tokens, 8 heads of 128 in bfloat16: 14 ms against 34 without.
        for d in range(0, num_whole, LANES):
            prefetch(flat, start + head_dim + d)
            store(load(flat, start + d), tile, j * width + d)
    if num_whole < head_dim:
        for j in range(size):
            widen(
                source[slots[j], head, num_whole:],
                tile[j * width + num_whole : j * width + head_dim],
            )


@njit(inline="always")
def score(
    queries: Float32s, start: int, width: int, keys: Float32s, low: int, high: int, scores: Float32s
) -> None:
    """scores[low:high] = q k^T. Keys are computed sixteen at a time, some outside the range too."""
    for j in range(low // LANES * LANES, high, LANES):
        store(dot_products(queries, start, keys, j * width, width), scores, j)


@njit(inline="always")
def add_values(
    weights: Float32s, low: int, high: int, values: Float32s,
    rescale: np.float32, outputs: Float32s, start: int, width: int,
) -> None:  # fmt: skip
    """output = output * rescale + the weighted sum of values low..high."""
    for i in range(0, width, 2 * LANES):
        a = fma(zeros(), load(outputs, start + i), splat(rescale))
        b = fma(zeros(), load(outputs, start + i + LANES), splat(rescale))
        # PERF: even and odd values have separate sums, since an FMA waits four cycles for the last.
        c, d = zeros(), zeros()
        for j in range(low, high - 1, 2):
            value = j * width + i
            even, odd = splat(weights[j]), splat(weights[j + 1])
            a = fma(a, even, load(values, value))
            b = fma(b, even, load(values, value + LANES))
            c = fma(c, odd, load(values, value + width))
            d = fma(d, odd, load(values, value + width + LANES))
        if (high - low) % 2:
            last = splat(weights[high - 1])
            a = fma(a, last, load(values, (high - 1) * width + i))
            b = fma(b, last, load(values, (high - 1) * width + i + LANES))
        one = splat(np.float32(1))
        store(fma(a, c, one), outputs, start + i)
        store(fma(b, d, one), outputs, start + i + LANES)


@njit(inline="always")
def find_places(
    keys: Floats, slots: Int64s, num_slots: int, head: int, size: int, places: Int64s
) -> None:
    """Writes where this head of the slots begins in flat KV, `size` places and those up to the next
    multiple of 16; behind the slots, places repeat the last one."""
    num_heads, head_dim = keys.shape[1], keys.shape[2]
    for j in range(-(-size // LANES) * LANES):
        places[j] = (slots[min(j, num_slots - 1)] * num_heads + head) * head_dim


@njit(inline="always")
def score_pairs(
    queries: Floats, start: int, width: int, keys: Floats, places: Int64s, low: int, high: int,
    factor: np.float32, scores: Float32s,
) -> None:  # fmt: skip
    """scores[low:high] = factor * q k^T, as `score` does it."""
    for j in range(low // LANES * LANES, high, LANES):
        products = pair_dot_products(queries, start, keys, places, j, width)
        store(fma(zeros(), products, splat(factor)), scores, j)


@njit(inline="always")
def add_pairs(
    weights: Float32s, low: int, high: int, values: Floats, places: Int64s,
    rescale: np.float32, outputs: Float32s, start: int, width: int,
    keys: Floats, next_places: Int64s, is_first: bool, is_last: bool,
) -> None:  # fmt: skip
    """Does what `add_values` does. Of each 32 elements of the output, the even ones come first.

    Meanwhile the first and the last query row of a head prefetch the keys and the values at
    `next_places`, which are read next.
    """
    for i in range(0, width, PAIRS):
        a = fma(zeros(), load(outputs, start + i), splat(rescale))
        b = fma(zeros(), load(outputs, start + i + LANES), splat(rescale))
        c, d = zeros(), zeros()
        for j in range(low, high - 1, 2):
            prefetch_pairs(keys, values, next_places, j, i, is_first, is_last)
            even, odd = splat(weights[j]), splat(weights[j + 1])
            value, next_value = places[j] + i, places[j + 1] + i
            a = fma(a, even, load_even(values, value))
            b = fma(b, even, load_odd(values, value))
            c = fma(c, odd, load_even(values, next_value))
            d = fma(d, odd, load_odd(values, next_value))
        if (high - low) % 2:
            last, value = splat(weights[high - 1]), places[high - 1] + i
            a = fma(a, last, load_even(values, value))
            b = fma(b, last, load_odd(values, value))
        one = splat(np.float32(1))
        store(fma(a, c, one), outputs, start + i)
        store(fma(b, d, one), outputs, start + i + LANES)


@njit(inline="always")
def add_two_pairs(
    weights: Float32s, low: int, high: int, values: Floats, places: Int64s,
    rescale: np.float32, next_rescale: np.float32, outputs: Float32s, start: int, width: int,
    keys: Floats, next_places: Int64s, is_first: bool, is_last: bool,
) -> None:  # fmt: skip
    """Does what `add_pairs` does, in its order, for two query rows that follow each other; weights
    [2, keys]."""
    for i in range(0, width, PAIRS):
        at, next_at = start + i, start + width + i
        a = fma(zeros(), load(outputs, at), splat(rescale))
        b = fma(zeros(), load(outputs, at + LANES), splat(rescale))
        e = fma(zeros(), load(outputs, next_at), splat(next_rescale))
        f = fma(zeros(), load(outputs, next_at + LANES), splat(next_rescale))
        c, d, g, h = zeros(), zeros(), zeros(), zeros()
        for j in range(low, high - 1, 2):
            prefetch_pairs(keys, values, next_places, j, i, is_first, is_last)
            value, next_value = places[j] + i, places[j + 1] + i
            left, right = load_even(values, value), load_odd(values, value)
            first, second = splat(weights[0, j]), splat(weights[1, j])
            a, b = fma(a, first, left), fma(b, first, right)
            e, f = fma(e, second, left), fma(f, second, right)
            left, right = load_even(values, next_value), load_odd(values, next_value)
            first, second = splat(weights[0, j + 1]), splat(weights[1, j + 1])
            c, d = fma(c, first, left), fma(d, first, right)
            g, h = fma(g, second, left), fma(h, second, right)
        if (high - low) % 2:
            value = places[high - 1] + i
            left, right = load_even(values, value), load_odd(values, value)
            first, second = splat(weights[0, high - 1]), splat(weights[1, high - 1])
            a, b = fma(a, first, left), fma(b, first, right)
            e, f = fma(e, second, left), fma(f, second, right)
        one = splat(np.float32(1))
        store(fma(a, c, one), outputs, at)
        store(fma(b, d, one), outputs, at + LANES)
        store(fma(e, g, one), outputs, next_at)
        store(fma(f, h, one), outputs, next_at + LANES)


# PERF: no hardware prefetcher foresees the next head or page, and prefetches all at once would
# leave memory idle while products are computed. 8 rows of 151 tokens, 16 heads and 8 KV heads of
# 128: 529 us of a layer's attention in one thread against 714.
@njit(inline="always")
def prefetch_pairs(
    keys: Floats, values: Floats, places: Int64s, j: int, i: int, has_keys: bool, has_values: bool
) -> None:
    """Prefetches elements from `i` on of the keys or values at places j and j + 1."""
    if has_keys:
        prefetch(keys, places[j] + i)
        prefetch(keys, places[j + 1] + i)
    if has_values:
        prefetch(values, places[j] + i)
        prefetch(values, places[j + 1] + i)
