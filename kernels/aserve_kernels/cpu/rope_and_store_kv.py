"""What lies between a layer's projection and its attention, for a few tokens: query and key heads
are normed each by itself, where they have norms, and get their rotary positions; keys and values go
into their paged pools, by slot. One call where torch takes two dozen.

It knows no layer, no table of positions and no page table. Halves are paired as in neox: element i
turns with element i + rotary_dim / 2; elements from rotary_dim on don't turn.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, rounded, widen
from aserve_kernels.cpu.precompile import FAST, cached_njit, compile_ahead

NO_NORM = np.empty((0, 0), np.float32)


def rope_and_store_kv(
    heads: Tensor,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    *,
    cos_sin: Tensor,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """heads [tokens, heads, head_dim] of queries, keys and values, those of a token side by side;
    slots int64 [tokens]; pools of keys and of values [num_slots, kv_heads, head_dim]; turns
    [tokens, rotary_dim], contiguous: cosines, then sines; all float32 or all bfloat16. weight
    float32 [heads of queries and keys, head_dim], or None for no norm. All on the CPU -> the
    queries, contiguous. Of tokens with the same slot the last one's keys and values stay."""
    keys, values = pools
    num_queries = heads.shape[1] - 2 * keys.shape[1]
    queries = heads.new_empty((len(heads), num_queries, heads.shape[2]))
    _turn_and_store(
        as_array(heads.flatten(1)),
        slots.numpy(),
        as_array(cos_sin),
        NO_NORM if weight is None else weight.numpy(),
        eps,
        as_array(queries),
        as_array(keys),
        as_array(values),
    )
    return queries


def compile_rope_and_store_kv(dtype: torch.dtype) -> None:
    """For this dtype."""
    floats = types.uint16 if dtype == torch.bfloat16 else types.float32
    compile_ahead(
        _turn_and_store,
        *(types.Array(floats, 2, "A"), types.Array(types.int64, 1, "C")),
        *(types.Array(floats, 2, "C"), types.Array(types.float32, 2, "C"), types.float64),
        *[types.Array(floats, 3, "C") for _ in ("queries", "keys", "values")],
    )


# WHY: it keeps the GIL. A call takes microseconds; to get the GIL back may take milliseconds.
@cached_njit(fastmath=FAST)
def _turn_and_store(
    heads: Floats,
    slots: np.ndarray[tuple[int], np.dtype[np.int64]],
    cos_sin: Floats,
    weight: Float32s,
    eps: float,
    queries: Floats,
    keys: Floats,
    values: Floats,
) -> None:
    """heads [tokens, heads * head_dim]; queries [tokens, heads, head_dim]."""
    head_dim = queries.shape[2]
    of_queries, of_keys = queries.shape[1] * head_dim, keys.shape[1] * head_dim
    query_rows = queries.reshape(queries.shape[0], of_queries)
    key_rows = keys.reshape(keys.shape[0], of_keys)
    value_rows = values.reshape(values.shape[0], of_keys)
    row = np.empty((queries.shape[1] + keys.shape[1], head_dim), np.float32)
    flat = row.reshape(row.size)
    rope = np.empty(cos_sin.shape[1], np.float32)
    for token in range(heads.shape[0]):
        widen(heads[token, : row.size], flat)
        widen(cos_sin[token], rope)
        if weight.size:
            _norm_heads(row, weight, np.float32(eps), queries)
        _rope_heads(row, rope, queries)
        narrow(flat[:of_queries], query_rows[token])
        narrow(flat[of_queries:], key_rows[slots[token]])
        value_row = value_rows[slots[token]]
        for i in range(of_keys):
            value_row[i] = heads[token, row.size + i]


@njit(fastmath=FAST)
def _norm_heads(row: Float32s, weight: Float32s, eps: np.float32, like: Floats) -> None:
    """A token's heads [heads, head_dim], in place, rounded to what `like` holds.

    PERF: indices that are unsigned need no check for one below zero, which keeps loops from being
    vectorised: 36 us against 67 at 32 tokens of 24 heads of 128, normed and turned.
    """
    head_dim = np.uint64(row.shape[1])
    for head in range(np.uint64(row.shape[0])):
        total = np.float32(0)
        for i in range(head_dim):
            total += row[head, i] * row[head, i]
        scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(head_dim) + eps))
        for i in range(head_dim):
            row[head, i] = rounded(row[head, i] * scale * weight[head, i], like)


@njit(fastmath=FAST)
def _rope_heads(row: Float32s, rope: Float32s, like: Floats) -> None:
    """Likewise, rounded wherever torch rounds but for the last time."""
    half = np.uint64(rope.shape[0] // 2)
    for head in range(np.uint64(row.shape[0])):
        for i in range(half):
            left, right = row[head, i], row[head, half + i]
            row[head, i] = rounded(left * rope[i], like) - right * rope[half + i]
            row[head, half + i] = rounded(right * rope[i], like) + left * rope[half + i]
