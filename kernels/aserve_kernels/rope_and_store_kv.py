"""Fuses QK norm, RoPE and the KV-cache store: everything between a layer's QKV projection and its
attention, in one kernel launch.

    x = x / sqrt(mean(x^2) + eps) * weight                       per query and key head, if normed
    y[i]     = x[i] * cos[i]     - x[i + h] * sin[i]             RoPE (Su et al., 2021), for i < h,
    y[i + h] = x[i + h] * cos[i] + x[i] * sin[i]                 with h = rotary_dim / 2
    key_pool[slot] = y_key / key_scale,   value_pool[slot] = value / value_scale

Halves are paired as in GPT-NeoX. Elements from rotary_dim on stay as they are. A pool of 8-bit
floats saturates at the range of its type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.early_launch import launches_early, wait_for_inputs

# PERF: the heads of one program have about this many elements: decode has few tokens, and many SMs
# to spread them over.
ELEMENTS = 2048


def rope_and_store_kv(
    heads: Tensor,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    *,
    cos_sin: Tensor | None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Stores keys and values in the pools, and returns the queries [tokens, query heads, head_dim].

    heads [tokens, query heads + 2 * kv_heads, head_dim], the heads of a token contiguous: queries,
    keys, values. slots int64 [tokens]. pools: keys and values [num_slots, kv_heads, head_dim],
    contiguous, of any float dtype. cos_sin [tokens, rotary_dim], contiguous, in the dtype of heads,
    cosines then sines; None for no RoPE. weight float32 [query heads + kv_heads, head_dim]; None
    for no norm. If several tokens have one slot, any of them may be kept.

    Results are rounded wherever torch rounds. The queries are contiguous; without `cos_sin` they
    are a view of heads. `rope_and_store_kv_ref` is the reference.
    """
    key_pool, value_pool = pools
    num_tokens, num_heads, head_dim = heads.shape
    num_kv_heads = key_pool.shape[1]
    num_queries = num_heads - 2 * num_kv_heads
    queries, first_head = heads[:, :num_queries], num_queries
    if cos_sin is not None:
        queries, first_head = heads.new_empty(queries.shape), 0
    if not num_tokens:
        return queries
    block = triton.next_power_of_2(head_dim)
    group = max(1, ELEMENTS // block)
    early = launches_early(heads)
    _rope_and_store[(num_tokens, triton.cdiv(num_heads - first_head, group))](
        heads,
        heads if cos_sin is None else cos_sin,
        heads if weight is None else weight,
        slots,
        queries,
        key_pool,
        value_pool,
        heads.stride(0),
        eps,
        scales[0],
        scales[1],
        torch.finfo(key_pool.dtype).max,
        key_pool.dtype.itemsize == 1,
        weight is not None,
        first_head,
        num_queries,
        num_kv_heads,
        head_dim,
        0 if cos_sin is None else cos_sin.shape[1],
        group,
        block,
        early,
        launch_pdl=early,
    )
    return queries


@triton.jit
def _rope_and_store(
    heads: tl.tensor,
    cos_sin: tl.tensor,
    weight: tl.tensor,
    slots: tl.tensor,
    queries: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    stride: int,
    eps: float,
    key_scale: float,
    value_scale: float,
    bound: float,
    SATURATES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program handles GROUP heads of one token, from head FIRST_HEAD on. A rotated element is
    loaded twice, once as its pair's partner; the second load hits the cache."""
    wait_for_inputs(IS_EARLY)
    HALF: tl.constexpr = ROTARY_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_QUERIES + NUM_KV_HEADS
    dtype = heads.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head_ids = (FIRST_HEAD + tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    in_bounds = (head_ids < NUM_ROTATED + NUM_KV_HEADS) & (columns < HEAD_DIM)
    indices = head_ids * HEAD_DIM + columns
    token_heads = heads + token * stride
    x = tl.load(token_heads + indices, mask=in_bounds, other=0.0).to(tl.float32)
    if ROTARY_DIM > 0:
        is_rotary = in_bounds & (head_ids < NUM_ROTATED) & (columns < ROTARY_DIM)
        partners = tl.where(columns < HALF, columns + HALF, columns - HALF)
        partner_indices = head_ids * HEAD_DIM + partners
        partner = tl.load(token_heads + partner_indices, mask=is_rotary, other=0.0).to(tl.float32)
        if HAS_NORM:
            has_norm = in_bounds & (head_ids < NUM_ROTATED)
            rms = tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
            factors = tl.load(weight + indices, mask=has_norm, other=0.0)
            partner_factors = tl.load(weight + partner_indices, mask=is_rotary, other=0.0)
            normed = (x / rms * factors).to(dtype).to(tl.float32)
            x = tl.where(has_norm, normed, x)
            partner = (partner / rms * partner_factors).to(dtype).to(tl.float32)
        cos_address = (
            cos_sin + token * ROTARY_DIM + tl.where(columns < HALF, columns, columns - HALF)
        )
        cos = tl.load(cos_address, mask=columns < ROTARY_DIM, other=0.0).to(tl.float32)
        sin = tl.load(cos_address + HALF, mask=columns < ROTARY_DIM, other=0.0).to(tl.float32)
        product = (x * cos).to(dtype).to(tl.float32)
        rotated = product + tl.where(columns < HALF, -partner, partner) * sin
        x = tl.where(is_rotary, rotated, x).to(dtype).to(tl.float32)
        is_query = in_bounds & (head_ids < NUM_QUERIES)
        query_indices = token * NUM_QUERIES * HEAD_DIM + indices
        tl.store(queries + query_indices, x.to(dtype), mask=is_query)
    is_key = (head_ids >= NUM_QUERIES) & (head_ids < NUM_ROTATED)
    stored = x / tl.where(is_key, key_scale, value_scale)
    if SATURATES:
        stored = tl.minimum(tl.maximum(stored, -bound), bound)
    slot = tl.load(slots + token) * NUM_KV_HEADS * HEAD_DIM
    key_indices = slot + indices - NUM_QUERIES * HEAD_DIM
    value_indices = slot + indices - NUM_ROTATED * HEAD_DIM
    rounded = stored.to(key_pool.dtype.element_ty)
    tl.store(key_pool + key_indices, rounded, mask=in_bounds & is_key)
    tl.store(value_pool + value_indices, rounded, mask=in_bounds & (head_ids >= NUM_ROTATED))
