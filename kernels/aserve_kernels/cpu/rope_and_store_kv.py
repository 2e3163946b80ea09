"""Fuses QK norm, RoPE and the KV-cache store on the CPU, in one compiled call instead of two dozen
torch operators.

    x = x / sqrt(mean(x^2) + eps) * weight                       per query and key head, if normed
    y[i]     = x[i] * cos[i]     - x[i + h] * sin[i]             RoPE (Su et al., 2021), for i < h,
    y[i + h] = x[i + h] * cos[i] + x[i] * sin[i]                 with h = rotary_dim / 2
    keys[slot] = y_key,   values[slot] = value

Halves are paired as in GPT-NeoX. Elements from rotary_dim on stay as they are.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, numba_type, rounded, widen
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.memory import FLOAT32_LIKE, scratch
from aserve_kernels.cpu.precompile import FASTMATH, cached_njit, compile_ahead

NO_NORM = np.empty((0, 0), np.float32)


def rope_and_store_kv(
    heads: Tensor,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    *,
    cos_sin: Tensor,
    weight: Tensor | None = None,
    eps: float = 0.0,
    num_workers: int = 1,
) -> Tensor:
    """Stores keys and values in the pools, and returns the queries, contiguous.

    heads [tokens, query heads + 2 * kv_heads, head_dim], the heads of a token contiguous: queries,
    keys, values. slots int64 [tokens]. pools: keys and values [num_slots, kv_heads, head_dim].
    cos_sin [tokens, rotary_dim], contiguous, cosines then sines. All of these are float32 or all
    bfloat16, or the pools alone are bfloat16, on the CPU. weight float32 [query heads + kv_heads,
    head_dim]; None for no norm. If several tokens have one slot, the last one is kept by one
    worker; of several workers, which divide the tokens, any may be the last.
    `rope_and_store_kv_ref` is the reference.
    """
    keys, values = pools
    num_queries = heads.shape[1] - 2 * keys.shape[1]
    queries = heads.new_empty((len(heads), num_queries, heads.shape[2]))
    arguments = (
        *(as_array(heads.flatten(1)), slots.numpy(), as_array(cos_sin)),
        *(NO_NORM if weight is None else weight.numpy(), eps),
        *(as_array(each) for each in (queries, keys, values)),
    )
    if num_workers == 1:
        _rope_and_store_alone(*arguments)
    else:
        _rope_and_store_shared(*arguments, num_workers)
    return queries


def compile_rope_and_store_kv(dtype: torch.dtype) -> None:
    """Compiles for this dtype, with pools of it and of bfloat16."""
    floats = numba_type(dtype)
    for pool_floats in {floats, numba_type(torch.bfloat16)}:
        pool = types.Array(pool_floats, 3, "C")
        arguments = (
            *(types.Array(floats, 2, "A"), types.Array(types.int64, 1, "C")),
            *(types.Array(floats, 2, "C"), types.Array(types.float32, 2, "C"), types.float64),
            *(types.Array(floats, 3, "C"), pool, pool),
        )
        compile_ahead(_rope_and_store_alone, *arguments)
        compile_ahead(_rope_and_store_shared, *arguments, types.int64)


# WHY: not nogil. A call takes microseconds; getting the GIL back may take milliseconds.
@cached_njit(fastmath=FASTMATH)
def _rope_and_store_alone(
    heads: Floats, slots: Int64s, cos_sin: Floats, weight: Float32s, eps: float,
    queries: Floats, keys: Floats, values: Floats,
) -> None:  # fmt: skip
    _rope_and_store(heads, slots, cos_sin, weight, eps, queries, keys, values)


@cached_njit(parallel=True, nogil=True)
def _rope_and_store_shared(
    heads: Floats, slots: Int64s, cos_sin: Floats, weight: Float32s, eps: float,
    queries: Floats, keys: Floats, values: Floats, num_workers: int,
) -> None:  # fmt: skip
    for worker in prange(num_workers):
        first, last = len(slots) * worker // num_workers, len(slots) * (worker + 1) // num_workers
        part = slice(first, last)
        _rope_and_store(
            heads[part], slots[part], cos_sin[part], weight, eps, queries[part], keys, values
        )


@njit(fastmath=FASTMATH)
def _rope_and_store(
    heads: Floats, slots: Int64s, cos_sin: Floats, weight: Float32s, eps: float,
    queries: Floats, keys: Floats, values: Floats,
) -> None:  # fmt: skip
    """heads [tokens, heads * head_dim]; queries [tokens, heads, head_dim]."""
    head_dim = queries.shape[2]
    query_size, key_size = queries.shape[1] * head_dim, keys.shape[1] * head_dim
    query_rows = queries.reshape(queries.shape[0], query_size)
    key_rows = keys.reshape(keys.shape[0], key_size)
    value_rows = values.reshape(values.shape[0], key_size)
    row = scratch((queries.shape[1] + keys.shape[1], head_dim), FLOAT32_LIKE)
    flat, wide_values = row.reshape(row.size), scratch((key_size,), FLOAT32_LIKE)
    rope = np.empty(cos_sin.shape[1], np.float32)
    for token in range(heads.shape[0]):
        widen(heads[token, : row.size], flat)
        widen(cos_sin[token], rope)
        if weight.size:
            _norm_heads(row, weight, np.float32(eps), queries)
        _rope_heads(row, rope, queries)
        narrow(flat[:query_size], query_rows[token])
        narrow(flat[query_size:], key_rows[slots[token]])
        widen(heads[token, row.size :], wide_values)
        narrow(wide_values, value_rows[slots[token]])


@njit(fastmath=FASTMATH)
def _norm_heads(row: Float32s, weight: Float32s, eps: np.float32, like: Floats) -> None:
    """Normalises a token's heads [heads, head_dim] in place, rounded to the dtype of `like`.

    PERF: unsigned indices need no check for negative ones, which keeps LLVM from vectorising: 36 us
    against 67 at 32 tokens of 24 heads of 128, with norm and RoPE.
    """
    head_dim = np.uint64(row.shape[1])
    for head in range(np.uint64(row.shape[0])):
        total = np.float32(0)
        for i in range(head_dim):
            total += row[head, i] * row[head, i]
        scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(head_dim) + eps))
        for i in range(head_dim):
            row[head, i] = rounded(row[head, i] * scale * weight[head, i], like)


@njit(fastmath=FASTMATH)
def _rope_heads(row: Float32s, rope: Float32s, like: Floats) -> None:
    """Applies RoPE to a token's heads in place, rounded wherever torch rounds but the last time."""
    half = np.uint64(rope.shape[0] // 2)
    for head in range(np.uint64(row.shape[0])):
        for i in range(half):
            left, right = row[head, i], row[head, half + i]
            row[head, i] = rounded(left * rope[i], like) - right * rope[half + i]
            row[head, half + i] = rounded(right * rope[i], like) + left * rope[half + i]
