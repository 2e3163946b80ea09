"""What lies between a layer's projection and its attention, in one launch: query and key heads are
normed each by itself, where they have norms, and get their rotary positions; keys and values go
into their paged pools, by slot.

Halves are paired as in neox: element i turns with element i + rotary_dim / 2; elements from
rotary_dim on don't turn. A pool of 8-bit floats holds what is divided by a scale, cut at the type's
range. It knows no layer, no table of positions and no page table: whoever calls has the slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.rope import apply_rope_ref

# PERF: a program's heads fill a few thousand elements: decoding has few tokens, and many
# processors to read them.
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
    """heads [tokens, heads, head_dim] of queries, keys and values, those of a token side by side;
    slots int64 [tokens]; pools of keys and of values [num_slots, kv_heads, head_dim], contiguous,
    in any float dtype; turns [tokens, rotary_dim], contiguous, in the dtype of heads: cosines, then
    sines; weight float32 [heads of queries and keys, head_dim], or None for no norm. What is stored
    is divided by its scale. Of tokens with the same slot any may win.

    -> the queries, contiguous, rounded where torch rounds. Without turns keys are stored as they
    are, and the queries are a view of heads.
    """
    key_pool, value_pool = pools
    num_tokens, num_heads, head_dim = heads.shape
    num_kv_heads = key_pool.shape[1]
    num_queries = num_heads - 2 * num_kv_heads
    queries, first = heads[:, :num_queries], num_queries
    if cos_sin is not None:
        queries, first = heads.new_empty(queries.shape), 0
    if not num_tokens:
        return queries
    block = triton.next_power_of_2(head_dim)
    group = max(1, ELEMENTS // block)
    _turn_and_store[(num_tokens, triton.cdiv(num_heads - first, group))](
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
        first,
        num_queries,
        num_kv_heads,
        head_dim,
        0 if cos_sin is None else cos_sin.shape[1],
        group,
        block,
    )
    return queries


def turn_and_store_ref(
    heads: Tensor,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    *,
    cos_sin: Tensor | None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    num_kv_heads = pools[0].shape[1]
    rotated, values = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    rotated = apply_rope_ref(rotated, cos_sin=cos_sin, weight=weight, eps=eps)
    queries, keys = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
    for given, pool, scale in zip((keys, values), pools, scales, strict=True):
        scaled = given.float() / scale
        if pool.dtype.itemsize == 1:
            bound = torch.finfo(pool.dtype).max
            narrow = scaled.clamp(-bound, bound).to(pool.dtype)
            pool.view(torch.uint8).index_copy_(0, slots, narrow.view(torch.uint8))
        else:
            pool.index_copy_(0, slots, scaled.to(pool.dtype))
    return queries


@triton.jit
def _turn_and_store(
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
    IS_CUT: tl.constexpr,
    IS_NORMED: tl.constexpr,
    FIRST: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A token's heads from FIRST on, a group of them in each program. An element that turns is read
    beside its partner: twice, the second time from the cache."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    NUM_TURNED: tl.constexpr = NUM_QUERIES + NUM_KV_HEADS
    dtype = heads.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    numbers = (FIRST + tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    is_in = (numbers < NUM_TURNED + NUM_KV_HEADS) & (columns < HEAD_DIM)
    indices = numbers * HEAD_DIM + columns
    of_token = heads + token * stride
    own = tl.load(of_token + indices, mask=is_in, other=0.0).to(tl.float32)
    if ROTARY_DIM > 0:
        is_rotary = is_in & (numbers < NUM_TURNED) & (columns < ROTARY_DIM)
        partners = tl.where(columns < HALF, columns + HALF, columns - HALF)
        of_partners = numbers * HEAD_DIM + partners
        partner = tl.load(of_token + of_partners, mask=is_rotary, other=0.0).to(tl.float32)
        if IS_NORMED:
            has_norm = is_in & (numbers < NUM_TURNED)
            root = tl.sqrt(tl.sum(own * own, axis=1) / HEAD_DIM + eps)[:, None]
            factors = tl.load(weight + indices, mask=has_norm, other=0.0)
            of_pairs = tl.load(weight + of_partners, mask=is_rotary, other=0.0)
            normed = (own / root * factors).to(dtype).to(tl.float32)
            own = tl.where(has_norm, normed, own)
            partner = (partner / root * of_pairs).to(dtype).to(tl.float32)
        angles = cos_sin + token * ROTARY_DIM + tl.where(columns < HALF, columns, columns - HALF)
        cos = tl.load(angles, mask=columns < ROTARY_DIM, other=0.0).to(tl.float32)
        sin = tl.load(angles + HALF, mask=columns < ROTARY_DIM, other=0.0).to(tl.float32)
        near = (own * cos).to(dtype).to(tl.float32)
        rotated = near + tl.where(columns < HALF, -partner, partner) * sin
        own = tl.where(is_rotary, rotated, own).to(dtype).to(tl.float32)
        is_query = is_in & (numbers < NUM_QUERIES)
        of_query = token * NUM_QUERIES * HEAD_DIM + indices
        tl.store(queries + of_query, own.to(dtype), mask=is_query)
    is_key = (numbers >= NUM_QUERIES) & (numbers < NUM_TURNED)
    stored = own / tl.where(is_key, key_scale, value_scale)
    if IS_CUT:
        stored = tl.minimum(tl.maximum(stored, -bound), bound)
    slot = tl.load(slots + token) * NUM_KV_HEADS * HEAD_DIM
    of_key = slot + indices - NUM_QUERIES * HEAD_DIM
    of_value = slot + indices - NUM_TURNED * HEAD_DIM
    rounded = stored.to(key_pool.dtype.element_ty)
    tl.store(key_pool + of_key, rounded, mask=is_in & is_key)
    tl.store(value_pool + of_value, rounded, mask=is_in & (numbers >= NUM_TURNED))
