"""Attention of several queries per row over paged KV, read where it is: prompts, and chunks behind
a prefix.

It knows no layer and no step. Which block of which row a program computes is found on the device,
so that nothing is planned on the host.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.paged_rows import PagedRows, Scoring, attend_ref
from aserve_kernels.paged_tiles import (
    Cut,
    attend_part,
    extend_tiles,
    merge,
    no_part,
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
    cut: Cut,
) -> None:
    """q and out [tokens, heads, head_dim], float32, bfloat16 or float16; keys and values [slots,
    kv_heads, head_dim] of that dtype or float8_e4m3, contiguous. All on the device. Writes `out` of
    the rows with more than one query, and no other."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    groups = num_heads // num_kv_heads
    tiles = extend_tiles(groups, head_dim, q.dtype, cut)
    queries = tiles.lines // groups
    # A row of n queries has blocks from (its first token) // queries + (its number) on, which are
    # at least as many as it needs.
    num_blocks = num_tokens // queries + len(paged.rows)
    if num_blocks == 0:
        return
    factor, cap = score_factors(scoring)
    _attend_blocks[(num_blocks, num_kv_heads)](
        q, keys, values, out,
        paged.page_table, paged.rows, paged.lens, paged.cu_query_lens,
        len(paged.rows), paged.page_table.stride(0), q.stride(0), q.stride(1),
        factor, cap, scoring.value_scale,
        WINDOW=scoring.window or 0,
        HAS_CAP=scoring.softcap is not None,
        PAGE_SIZE=paged.page_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUPS=groups,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        LINES=tiles.lines,
        WIDTH=padded(head_dim),
        KEYS=tiles.keys,
        SPLIT=cut.fixed_split or 0,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=cut.fixed_split is None,
    )  # fmt: skip


def paged_extend_ref(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    paged: PagedRows,
    scoring: Scoring,
    *,
    out: Tensor,
    cut: Cut,
) -> None:
    """The same in plain torch, row by row, in the dtype of q; it cuts nothing."""
    attend_ref(q, keys, values, paged, scoring, out=out, takes=lambda num: num > 1)


# A kernel of its own for one row would be compiled while it is waited for.
@triton.jit(do_not_specialize=["num_rows"])
def _attend_blocks(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, out: tl.tensor, page_table: tl.tensor,
    rows: tl.tensor, lens: tl.tensor, cu_query_lens: tl.tensor, num_rows: int, table_stride: int,
    q_token_stride: int, q_head_stride: int, factor: float, cap: float, value_scale: float,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """QUERIES queries of a row, for the query heads of one KV head."""
    # The last blocks of a row read the most keys: they begin first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of(block, cu_query_lens, num_rows, QUERIES)
    row_start = tl.load(cu_query_lens + row).to(tl.int32)
    query_len = tl.load(cu_query_lens + row + 1).to(tl.int32) - row_start
    start = (block - (row_start // QUERIES + row)) * QUERIES
    if (query_len == 1) | (start >= query_len):
        return
    stop = tl.minimum(start + QUERIES, query_len)
    prefix_len = tl.load(lens + row).to(tl.int32) - query_len
    pages = page_table + tl.load(rows + row).to(tl.int64) * table_stride
    lines = tl.arange(0, LINES)
    dims = tl.arange(0, WIDTH)
    offsets = start + lines // GROUPS
    is_query = (lines < QUERIES * GROUPS) & (offsets < stop)
    positions = prefix_len + tl.minimum(offsets, stop - 1)
    tokens = (row_start + offsets).to(tl.int64)
    heads = kv_head * GROUPS + lines % GROUPS
    is_there = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    indices = (tokens * q_token_stride + heads * q_head_stride)[:, None] + dims[None, :]
    queries = tl.load(q + indices, mask=is_there, other=0.0)
    first_query = prefix_len + start
    last_query = prefix_len + stop - 1
    first_key = first_query * 0
    if WINDOW > 0:
        first_key = tl.maximum(0, first_query - WINDOW + 1) // KEYS * KEYS
    if SPLIT == 0:
        most, total, mixed = attend_part(
            queries, positions, first_query, last_query, first_key, last_query + 1, pages,
            keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM, factor, cap,
            WINDOW, HAS_CAP, PAGE_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, LINES, WIDTH, KEYS,
        )  # fmt: skip
    else:
        most, total, mixed = no_part(LINES, WIDTH)
        for first in range(first_key // SPLIT * SPLIT, last_query + 1, SPLIT):
            part_most, part_total, part_mixed = attend_part(
                queries, positions, first_query, last_query, first, first + SPLIT, pages,
                keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM, factor, cap,
                WINDOW, HAS_CAP, PAGE_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, LINES, WIDTH, KEYS,
            )  # fmt: skip
            most, total, mixed = merge(most, total, mixed, part_most, part_total, part_mixed)
    result = mixed / total[:, None] * value_scale
    indices = (tokens * (NUM_KV_HEADS * GROUPS) + heads) * HEAD_DIM
    indices = indices[:, None] + dims[None, :]
    tl.store(out + indices, result.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _row_of(
    block: tl.tensor, cu_query_lens: tl.tensor, num_rows: int, QUERIES: tl.constexpr
) -> tl.tensor:
    """The last row whose first block is not behind `block`."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_query_lens + middle).to(tl.int32) // QUERIES + middle <= block:
            low = middle
        else:
            high = middle
    return low
