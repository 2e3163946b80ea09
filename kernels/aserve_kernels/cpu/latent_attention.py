"""Attention over paged latents on the CPU: multi-query attention whose values are in its keys.

    out_h = softmax(scale * q_h k^T + causal mask) k[:, :value_dim]

All query heads share one KV head, as absorbed MLA does, so a tile of latents is read and widened to
float32 once for the scores and the sums. A query row is one head of one query; a unit of work is
BLOCK of them in order, whatever the number of heads. The softmax is online, and tiles lie at
absolute positions, so a query's sums have the same order in every step.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, numba_type, widen
from aserve_kernels.cpu.host_rows import NO_WINDOW, HostRows, Int64s, find_slots
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, scratch
from aserve_kernels.cpu.online_softmax import fold_log2, softmax_update
from aserve_kernels.cpu.paged_attention import (
    TILE,
    add_values,
    padded_width,
    score,
    tile_len,
    widen_tile,
)
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT, cached_njit, compile_ahead
from aserve_kernels.cpu.team import worker_of
from aserve_kernels.paged_rows import Scoring

BLOCK = 16  # query rows that share a tile


def latent_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *,
    out: Tensor, num_workers: int,
) -> None:  # fmt: skip
    """The contract of `paged_attention`, for one KV head. `values` [slots, 1, value_dim] is a view
    of the first elements of `keys`; out [tokens, heads, value_dim]. `paged_attention_ref` is its
    reference."""
    factor, cap = fold_log2(scoring.scale, scoring.softcap)
    queries = rows.queries
    attend = _attend_alone if num_workers == 1 else _attend
    attend(
        q.float().numpy(), as_array(keys), as_array(out),
        rows.page_table, queries.rows, queries.lens, queries.starts, queries.query_lens,
        rows.page_size,
        NO_WINDOW if scoring.window is None else scoring.window,
        np.float32(factor),
        np.float32(cap),
        num_workers,
    )  # fmt: skip


def compile_latent_attention(dtype: torch.dtype, num_workers: int) -> None:
    """Compiles for this dtype, and either for one worker or for several."""
    floats = numba_type(dtype)
    heads = types.Array(floats, 3, "C")
    column = types.Array(types.int64, 1, "C")
    compile_ahead(
        _attend_alone if num_workers == 1 else _attend,
        *(types.Array(types.float32, 3, "A"), heads, heads),
        *(types.Array(types.int64, 2, "C"), column, column, column, column),
        *(types.int64, types.int64, types.float32, types.float32, types.int64),
    )


@cached_njit(parallel=True, nogil=True)
def _attend(
    q: Float32s, latents: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, num_workers: int,
) -> None:  # fmt: skip
    for index in prange(num_workers):
        _attend_share(
            q, latents, out, page_table, rows, lens, starts, query_lens, page_size,
            window, factor, cap, worker_of(index), num_workers,
        )  # fmt: skip


@cached_njit(nogil=True)
def _attend_alone(
    q: Float32s, latents: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, num_workers: int,
) -> None:  # fmt: skip
    for worker in range(num_workers):
        _attend_share(
            q, latents, out, page_table, rows, lens, starts, query_lens, page_size,
            window, factor, cap, worker, num_workers,
        )  # fmt: skip


@njit(inline="always")
def _attend_share(
    q: Float32s, latents: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32,
    worker: int, num_workers: int,
) -> None:  # fmt: skip
    """The share of one worker: every num_workers-th unit of work."""
    num_heads = q.shape[1]
    width = padded_width(latents)
    vectors = scratch((2, BLOCK * width), FLOAT32_LIKE)
    vectors[:] = np.float32(0)
    softmax = scratch((BLOCK, 2), FLOAT32_LIKE)
    tile = scratch((tile_len(width) * width,), FLOAT32_LIKE)
    tile[:] = np.float32(0)
    scores, slots = scratch((TILE,), FLOAT32_LIKE), scratch((TILE,), INT64_LIKE)
    unit = 0
    for r in range(rows.shape[0]):
        num_query_rows = query_lens[r] * num_heads
        for first in range(0, num_query_rows, BLOCK):
            unit += 1
            if unit % num_workers != worker:
                continue
            _attend_block(
                q[starts[r] : starts[r] + query_lens[r]],
                latents,
                out[starts[r] : starts[r] + query_lens[r]],
                page_table[rows[r]], page_size,
                lens[r] - query_lens[r], first, min(first + BLOCK, num_query_rows),
                window, factor, cap, vectors, softmax, tile, scores, slots,
            )  # fmt: skip


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def _attend_block(
    q: Float32s, latents: Floats, out: Floats, pages: Int64s, page_size: int,
    position: int, first_row: int, last_row: int,
    window: int, factor: np.float32, cap: np.float32,
    vectors: Float32s, softmax: Float32s, tile: Float32s, scores: Float32s, slots: Int64s,
) -> None:  # fmt: skip
    """Attends the query rows first_row..last_row of q [queries, heads, head_dim], at positions from
    `position` on, and writes out [queries, heads, value_dim].

    Scratch memory: `vectors` for the query rows and their outputs, `softmax` for [row_max, row_sum]
    of each, `tile` for a tile of latents.
    """
    num_heads, head_dim, value_dim = q.shape[1], q.shape[2], out.shape[2]
    queries, outputs = vectors[0], vectors[1]
    width = padded_width(latents)
    tile_size = tile_len(width)
    num_rows = last_row - first_row
    for i in range(num_rows):
        row = first_row + i
        widen(q[row // num_heads, row % num_heads], queries[i * width : i * width + head_dim])
        for d in range(i * width, i * width + width):
            queries[d] *= factor
            outputs[d] = np.float32(0)
        softmax[i, 0] = -np.inf
        softmax[i, 1] = np.float32(0)
    # Tiles lie at absolute positions, so that a query's sums have the same order in every step.
    start = max(0, position + first_row // num_heads - window + 1) // tile_size * tile_size
    stop = position + (last_row - 1) // num_heads + 1
    for first_key in range(start, stop, tile_size):
        size = min(tile_size, stop - first_key)
        find_slots(pages, page_size, first_key, size, slots)
        widen_tile(latents, slots, size, 0, tile, width)
        for i in range(num_rows):
            query_position = position + (first_row + i) // num_heads
            low = max(0, query_position - window + 1 - first_key)
            high = min(size, query_position + 1 - first_key)
            if low < high:
                score(queries, i * width, width, tile, low, high, scores)
                rescale = softmax_update(scores, low, high, cap, softmax, i)
                add_values(scores, low, high, tile, rescale, outputs, i * width, width)
    for i in range(num_rows):
        row = first_row + i
        scale = np.float32(1) / softmax[i, 1]
        for d in range(i * width, i * width + value_dim):
            outputs[d] *= scale
        narrow(outputs[i * width : i * width + value_dim], out[row // num_heads, row % num_heads])
