"""Paged attention for rows with several queries: prefill, chunked prefill and verification.

This is FlashAttention over the page table; paged_tiles.py explains it, and states the formula. A
program finds the row and the block of queries that it computes on the device, by bisection over
`cu_query_lens`, so nothing is planned on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.paged_rows import PagedRows, Scoring, attend_ref
from aserve_kernels.paged_tiles import (
    LOG2_E,
    TREE,
    KvSplits,
    attend_keys,
    empty_state,
    extend_tiles,
    keys_end,
    mask_kind,
    merge_states,
    normalised,
    padded,
    score_factors,
)


def paged_extend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    paged: PagedRows,
    scoring: Scoring,
    *,
    out: Tensor,
    splits: KvSplits,
) -> None:
    """Writes `out` for the rows with more than one query, and for no other.

    q and out [tokens, heads, head_dim], float32, bfloat16 or float16; keys and values [slots,
    kv_heads, head_dim] of that dtype or float8_e4m3, contiguous. All are on the device.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    tiles = extend_tiles(group_size, head_dim, q.dtype, splits)
    queries = tiles.block_m // group_size
    # Row i's blocks begin at cu_query_lens[i] // queries + i. That leaves each row at least as many
    # blocks as it needs, and needs no sum over the rows before it.
    num_blocks = num_tokens // queries + len(paged.rows)
    if num_blocks == 0:
        return
    factor, cap = score_factors(scoring)
    tree = paged.tree
    seen, depths, seen_stride = paged.lens, paged.lens, 0  # not read without a tree
    if tree is not None:
        seen, depths, seen_stride = tree.seen.view(torch.uint8), tree.depths, tree.seen.stride(0)
    _attend_blocks[(num_blocks, num_kv_heads)](
        q, keys, values, out,
        paged.page_table, paged.rows, paged.lens, paged.cu_query_lens,
        seen, depths, len(paged.rows), seen_stride,
        paged.page_table.stride(0), q.stride(0), q.stride(1),
        factor, cap, scoring.sinks, scoring.value_scale,
        LOG2E=LOG2_E,
        WINDOW=scoring.window or 0,
        MASK=mask_kind(paged, scoring),
        HAS_CAP=scoring.softcap is not None,
        PAGE_SIZE=paged.page_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_D=padded(head_dim),
        BLOCK_N=tiles.block_n,
        SPLIT=splits.fixed_split or 0,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=splits.fixed_split is None,
    )  # fmt: skip


def paged_extend_ref(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    paged: PagedRows,
    scoring: Scoring,
    *,
    out: Tensor,
    splits: KvSplits,
) -> None:
    """The same in plain torch, in the dtype of q; it ignores `splits`."""
    attend_ref(q, keys, values, paged, scoring, out=out, takes=lambda num: num > 1)


# NOTE: unspecialised, since a kernel for one row or for trees of 16 nodes would be compiled while
# requests wait.
@triton.jit(do_not_specialize=["num_rows", "seen_stride"])
def _attend_blocks(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, out: tl.tensor, page_table: tl.tensor,
    rows: tl.tensor, lens: tl.tensor, cu_query_lens: tl.tensor, seen: tl.tensor, depths: tl.tensor,
    num_rows: int, seen_stride: int, table_stride: int, q_token_stride: int, q_head_stride: int,
    factor: float, cap: float, sinks: tl.tensor | None, value_scale: float, LOG2E: tl.constexpr,
    WINDOW: tl.constexpr, MASK: tl.constexpr, HAS_CAP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Attends up to QUERIES queries of one row, with the query heads of one KV head."""
    # PERF: the last blocks of a row read the row_max keys, so they are launched first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of(block, cu_query_lens, num_rows, QUERIES)
    row_start = tl.load(cu_query_lens + row).to(tl.int32)
    query_len = tl.load(cu_query_lens + row + 1).to(tl.int32) - row_start
    start = (block - (row_start // QUERIES + row)) * QUERIES
    if (query_len == 1) | (start >= query_len):
        return
    stop = tl.minimum(start + QUERIES, query_len)
    kv_len = tl.load(lens + row).to(tl.int32)
    prefix_len = kv_len - query_len
    pages = page_table + tl.load(rows + row).to(tl.int64) * table_stride
    query_rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    offsets = start + query_rows // GROUP_SIZE
    is_query = (query_rows < QUERIES * GROUP_SIZE) & (offsets < stop)
    nodes = row_start + tl.minimum(offsets, stop - 1)
    positions = prefix_len - row_start + nodes
    tokens = (row_start + offsets).to(tl.int64)
    heads = kv_head * GROUP_SIZE + query_rows % GROUP_SIZE
    in_bounds = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    indices = (tokens * q_token_stride + heads * q_head_stride)[:, None] + dims[None, :]
    queries = tl.load(q + indices, mask=in_bounds, other=0.0)
    first_query = prefix_len + start
    last_query = prefix_len + stop - 1
    if MASK == TREE:
        first_query = prefix_len
        positions = prefix_len + tl.load(depths + nodes).to(tl.int32)
        seen += nodes.to(tl.int64) * seen_stride
        depths += row_start
    key_end = keys_end(last_query, kv_len, WINDOW, MASK)
    first_key = first_query * 0
    if WINDOW > 0:
        first_key = tl.maximum(0, first_query - WINDOW + 1) // BLOCK_N * BLOCK_N
    if SPLIT == 0:
        row_max, row_sum, acc = attend_keys(
            queries, positions, first_query, last_query, kv_len, seen, depths, first_key, key_end,
            pages, keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM, factor, cap,
            WINDOW, MASK, HAS_CAP, PAGE_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_M, BLOCK_D,
            BLOCK_N,
        )  # fmt: skip
    else:
        row_max, row_sum, acc = empty_state(BLOCK_M, BLOCK_D)
        for first in range(first_key // SPLIT * SPLIT, key_end, SPLIT):
            split_max, split_sum, split_acc = attend_keys(
                queries, positions, first_query, last_query, kv_len, seen, depths, first,
                first + SPLIT, pages, keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM,
                factor, cap, WINDOW, MASK, HAS_CAP, PAGE_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM,
                BLOCK_M, BLOCK_D, BLOCK_N,
            )  # fmt: skip
            row_max, row_sum, acc = merge_states(
                row_max, row_sum, acc, split_max, split_sum, split_acc
            )
    result = normalised(row_max, row_sum, acc, sinks, heads, is_query, LOG2E) * value_scale
    indices = (tokens * (NUM_KV_HEADS * GROUP_SIZE) + heads) * HEAD_DIM
    indices = indices[:, None] + dims[None, :]
    tl.store(out + indices, result.to(out.dtype.element_ty), mask=in_bounds)


@triton.jit
def _row_of(
    block: tl.tensor, cu_query_lens: tl.tensor, num_rows: int, QUERIES: tl.constexpr
) -> tl.tensor:
    """Returns the row that `block` belongs to: the last one whose first block is not above it."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_query_lens + middle).to(tl.int32) // QUERIES + middle <= block:
            low = middle
        else:
            high = middle
    return low
