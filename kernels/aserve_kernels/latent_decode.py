"""Attention over paged latents (absorbed MLA): multi-query attention whose values are in its keys.

    out_h = softmax(cap(scale * q_h k^T) + causal mask) k[:, :value_dim]

This is Flash-Decoding as in paged_decode.py, but a tile of latents is read once for the products
with the queries and with the weights, and the last elements of a latent (its rope part), which are
no value, form a tile of their own. A program computes some query heads of one token, so all rows
run in this kernel, whatever their number of queries. In a draft tree a token sees the keys before
its row's queries, its ancestors, which come before it, and itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.dot import dot_add
from aserve_kernels.paged_decode import MERGED_AT_ONCE, merge_splits, splits_of
from aserve_kernels.paged_rows import PagedRows, Scoring, attend_ref
from aserve_kernels.paged_tiles import LOG2_E, KvSplits, empty_state, padded, score_factors

HEADS_PER_PROGRAM = 32  # NOTE: not measured; 32 x 512 accumulators take 64 registers per thread
# Their queries beside two tiles of latents take 104 KiB at DeepSeek's sizes where a GPU has no
# asynchronous products (compute capability 8.9), and half as many heads 86 KiB.
LARGE_SHARED_BYTES = 112 << 10


@dataclass(frozen=True, slots=True)
class TokenTrees:
    """The draft trees of tokens that are rows of their own."""

    seen: Tensor  # bool [tokens, n]: which queries of its sequence a token sees
    prefix_lens: Tensor  # int64 [tokens]: the keys before these queries


def latent_decode(
    q: Tensor,
    latents: Tensor,
    paged: PagedRows,
    scoring: Scoring,
    *,
    out: Tensor,
    splits: KvSplits,
    trees: TokenTrees | None = None,
) -> None:
    """q [tokens, heads, head_dim] and out [tokens, heads, value_dim], float32, bfloat16 or float16;
    latents [slots, 1, head_dim] of that dtype or float8_e4m3, contiguous. Each row of `paged` has
    one query, and its length ends with it; there is no window, and no sinks. `key_scale` and
    `value_scale` are equal.

    With `fixed_split`, a program attends to all keys of its token, in order.
    """
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 0:
        return
    value_dim = out.shape[2]
    has_room = splits.chip.shared_bytes >= LARGE_SHARED_BYTES
    block_m = min(padded(num_heads), HEADS_PER_PROGRAM if has_room else HEADS_PER_PROGRAM // 2)
    num_blocks = triton.cdiv(num_heads, block_m)
    # Enough tokens fill the device without splits. NOTE: two values alone, because each one is a
    # compilation, which warm-up must have seen.
    is_full = num_tokens * num_blocks > splits.chip.num_sms
    has_splits = splits.fixed_split is None and not is_full
    max_splits = splits.most(paged.max_len, None) if has_splits else 1
    split_accs = q.new_empty((num_tokens, num_heads, max_splits, value_dim), dtype=torch.float32)
    split_softmax = q.new_empty((num_tokens, num_heads, max_splits, 2), dtype=torch.float32)
    factor, cap = score_factors(scoring)
    block_n = 64 // q.element_size()
    parts = {"BLOCK_N": block_n, "MIN_SPLIT": splits.min_split, "MAX_SPLITS": max_splits}
    seen, prefix_lens, seen_stride = paged.lens, paged.lens, 0  # not read without trees
    if trees is not None:
        seen, prefix_lens = trees.seen.view(torch.uint8), trees.prefix_lens
        seen_stride = trees.seen.stride(0)
    _attend_latents[(num_blocks, num_tokens, max_splits)](
        q, latents, split_accs, split_softmax, paged.page_table, paged.rows, paged.lens,
        seen, prefix_lens, seen_stride,
        paged.page_table.stride(0), q.stride(0), q.stride(1), factor, cap,
        HAS_TREES=trees is not None,
        HAS_CAP=scoring.softcap is not None,
        PAGE_SIZE=paged.page_size,
        NUM_HEADS=num_heads,
        LATENT_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_M=block_m,
        BLOCK_V=padded(value_dim),
        BLOCK_P=padded(head_dim - value_dim),
        num_warps=8,
        num_stages=2 if q.element_size() == 2 else 1,
        enable_fp_fusion=splits.fixed_split is None,
        **parts,
    )  # fmt: skip
    merge_splits[(num_tokens, num_heads)](
        split_accs, split_softmax, out, paged.lens, paged.cu_query_lens, None,
        scoring.value_scale, LOG2E=LOG2_E, WINDOW=0, NUM_HEADS=num_heads, HEAD_DIM=value_dim,
        BLOCK_D=padded(value_dim), IS_FIXED=False, AT_ONCE=min(MERGED_AT_ONCE, max_splits),
        num_warps=1, enable_fp_fusion=splits.fixed_split is None, **parts,
    )  # fmt: skip


def latent_decode_ref(
    q: Tensor,
    latents: Tensor,
    paged: PagedRows,
    scoring: Scoring,
    *,
    out: Tensor,
    splits: KvSplits,
    trees: TokenTrees | None = None,
) -> None:
    """The same in plain torch, in the dtype of q; it ignores `splits`."""
    if trees is None:
        values = latents[..., : out.shape[2]]
        attend_ref(q, latents, values, paged, scoring, out=out, takes=lambda _query_len: True)
        return
    for token, kv_len in enumerate(paged.lens.tolist()):
        prefix_len = int(trees.prefix_lens[token])
        own = prefix_len + trees.seen[token, : kv_len - prefix_len].nonzero().flatten()
        positions = torch.cat((torch.arange(prefix_len, device=q.device), own))
        pages = paged.page_table[paged.rows[token], positions // paged.page_size]
        slots = pages * paged.page_size + positions % paged.page_size
        keys = latents[slots, 0].to(q.dtype) * scoring.key_scale
        scores = q[token] @ keys.T * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        out[token] = scores.softmax(dim=-1) @ keys[:, : out.shape[2]]


# NOTE: unspecialised, since a kernel for trees of 16 nodes would be compiled while requests wait.
@triton.jit(do_not_specialize=["seen_stride"])
def _attend_latents(
    q: tl.tensor, latents: tl.tensor, split_accs: tl.tensor, split_softmax: tl.tensor,
    page_table: tl.tensor, rows: tl.tensor, lens: tl.tensor, seen: tl.tensor,
    prefix_lens: tl.tensor, seen_stride: int,
    table_stride: int, q_token_stride: int, q_head_stride: int, factor: float, cap: float,
    HAS_TREES: tl.constexpr, HAS_CAP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr, LATENT_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Attends BLOCK_M heads of one token to one split of its keys."""
    token = tl.program_id(1).to(tl.int64)
    split_id = tl.program_id(2)
    kv_len = tl.load(lens + token).to(tl.int32)
    _, split, num_splits = splits_of(kv_len, 0, BLOCK_N, MIN_SPLIT, False, MAX_SPLITS)
    if split_id >= num_splits:
        return
    pages = page_table + tl.load(rows + token).to(tl.int64) * table_stride
    heads = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    value_dims = tl.arange(0, BLOCK_V)[None, :]
    rope_dims = VALUE_DIM + tl.arange(0, BLOCK_P)[None, :]
    is_value, is_rope = value_dims < VALUE_DIM, rope_dims < LATENT_DIM
    is_head = (heads < NUM_HEADS)[:, None]
    queries = q + token * q_token_stride + heads[:, None] * q_head_stride
    q_value = tl.load(queries + value_dims, mask=is_head & is_value, other=0.0)
    q_rope = tl.load(queries + rope_dims, mask=is_head & is_rope, other=0.0)
    row_max, row_sum, acc = empty_state(BLOCK_M, BLOCK_V)
    if HAS_TREES:
        prefix_len = tl.load(prefix_lens + token).to(tl.int32)
        tree = seen + token * seen_stride
    first = split_id * split
    last = tl.minimum(first + split, kv_len)
    for tile in range(first, last, BLOCK_N):
        positions = tile + tl.arange(0, BLOCK_N)
        is_key = positions < last
        if HAS_TREES:
            nodes = positions - prefix_len
            seen_nodes = tl.load(tree + nodes, mask=is_key & (nodes >= 0), other=1)
            is_key = is_key & (seen_nodes != 0)
        page = tl.load(pages + positions // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
        starts = ((page * PAGE_SIZE + positions % PAGE_SIZE) * LATENT_DIM)[:, None]
        # WHY: what lies behind a row's keys may be NaN, and NaN * 0 is NaN.
        is_loaded = is_key[:, None]
        c = tl.load(latents + starts + value_dims, mask=is_loaded & is_value, other=0.0)
        k_rope = tl.load(latents + starts + rope_dims, mask=is_loaded & is_rope, other=0.0)
        c = c.to(q_value.dtype)
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        scores = dot_add(scores, q_value, tl.trans(c))
        scores = dot_add(scores, q_rope, tl.trans(k_rope.to(q_rope.dtype))) * factor
        if HAS_CAP:
            scores = cap * (1 - 2 / (1 + tl.exp2(scores)))
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = new_max
        if HAS_TREES:  # there may be no seen key so far
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = dot_add(acc * rescale[:, None], weights.to(q_value.dtype), c)
        row_max = new_max
    index = (token * NUM_HEADS + heads) * MAX_SPLITS + split_id
    tl.store(split_softmax + index * 2, row_max, mask=heads < NUM_HEADS)
    tl.store(split_softmax + index * 2 + 1, row_sum, mask=heads < NUM_HEADS)
    addresses = split_accs + index[:, None] * VALUE_DIM + value_dims
    tl.store(addresses, acc, mask=is_head & is_value)
