"""The scores of an indexer over paged index keys on the CPU: see ../index_scores.py.

A tile of keys is read through the page table and widened to float32 once for all index heads of a
token. Tiles lie at absolute positions, so a score has the same bits in every step.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, numba_type, widen
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, scratch
from aserve_kernels.cpu.paged_attention import TILE, padded_width, score, tile_len, widen_tile
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT, cached_njit, compile_ahead
from aserve_kernels.cpu.team import worker_of
from aserve_kernels.paged_rows import PagedRows


def index_scores(
    q: Tensor, weights: Tensor, keys: Tensor, paged: PagedRows, *, num_workers: int
) -> Tensor:
    """The contract of the Triton kernel, for float32 and bfloat16 on the CPU. `num_workers` threads
    share the work: one if it was compiled for one, else any number above."""
    out = torch.empty((len(q), paged.max_len), dtype=torch.float32)
    work = _score_alone if num_workers == 1 else _score
    work(
        q.float().numpy(), weights.float().contiguous().numpy(), as_array(keys[:, None]),
        out.numpy(), paged.page_table.numpy(), paged.rows.numpy(), paged.lens.numpy(),
        paged.page_size, num_workers,
    )  # fmt: skip
    return out


def compile_index_scores(dtype: torch.dtype, num_workers: int) -> None:
    """Compiles for this dtype, and either for one worker or for several."""
    floats = numba_type(dtype)
    matrix, column = types.Array(types.float32, 2, "C"), types.Array(types.int64, 1, "C")
    compile_ahead(
        _score_alone if num_workers == 1 else _score,
        *(types.Array(types.float32, 3, "A"), matrix, types.Array(floats, 3, "C"), matrix),
        *(types.Array(types.int64, 2, "C"), column, column, types.int64, types.int64),
    )


@cached_njit(parallel=True, nogil=True)
def _score(
    q: Float32s, weights: Float32s, keys: Floats, out: Float32s,
    page_table: Int64s, rows: Int64s, lens: Int64s, page_size: int, num_workers: int,
) -> None:  # fmt: skip
    for index in prange(num_workers):
        _score_share(
            q, weights, keys, out, page_table, rows, lens, page_size, worker_of(index), num_workers
        )


@cached_njit(nogil=True)
def _score_alone(
    q: Float32s, weights: Float32s, keys: Floats, out: Float32s,
    page_table: Int64s, rows: Int64s, lens: Int64s, page_size: int, num_workers: int,
) -> None:  # fmt: skip
    for worker in range(num_workers):
        _score_share(q, weights, keys, out, page_table, rows, lens, page_size, worker, num_workers)


@njit(inline="always")
def _score_share(
    q: Float32s, weights: Float32s, keys: Floats, out: Float32s,
    page_table: Int64s, rows: Int64s, lens: Int64s, page_size: int,
    worker: int, num_workers: int,
) -> None:  # fmt: skip
    """The share of one worker: of each token every num_workers-th tile of keys."""
    num_tokens, num_heads, dim = q.shape
    width = padded_width(keys)
    tile_size = tile_len(width)
    queries = scratch((num_heads * width,), FLOAT32_LIKE)
    queries[:] = np.float32(0)
    tile = scratch((tile_size * width,), FLOAT32_LIKE)
    tile[:] = np.float32(0)
    scores, slots = scratch((TILE,), FLOAT32_LIKE), scratch((TILE,), INT64_LIKE)
    for token in range(num_tokens):
        for head in range(num_heads):
            widen(q[token, head], queries[head * width : head * width + dim])
        _score_token(
            queries, weights[token], keys, out[token, : lens[token]], page_table[rows[token]],
            page_size, worker * tile_size, num_workers * tile_size, tile, scores, slots,
        )  # fmt: skip


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def _score_token(
    queries: Float32s, weights: Float32s, keys: Floats, out: Float32s, pages: Int64s,
    page_size: int, first: int, stride: int, tile: Float32s, scores: Float32s, slots: Int64s,
) -> None:  # fmt: skip
    """Writes `out` [keys] for the tiles that begin at first, first + stride, and so on."""
    width = padded_width(keys)
    tile_size = tile_len(width)
    for start in range(first, len(out), stride):
        size = min(tile_size, len(out) - start)
        for j in range(size):
            position = start + j
            slots[j] = pages[position // page_size] * page_size + position % page_size
            out[position] = np.float32(0)
        widen_tile(keys, slots, size, 0, tile, width)
        for head in range(len(weights)):
            score(queries, head * width, width, tile, 0, size, scores)
            for j in range(size):
                # NaN, which an unsound model gives, is not less than 0 and stays.
                if not scores[j] < np.float32(0):
                    out[start + j] += weights[head] * scores[j]
