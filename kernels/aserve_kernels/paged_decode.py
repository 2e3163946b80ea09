"""Paged decode attention: one query per row, with the row's keys split among programs.

This is Flash-Decoding (Dao et al., 2023): `_attend_splits` computes a softmax state for each split
of a row's keys, `merge_splits` merges them. paged_tiles.py explains both, and states the formula.
The only query of a row is its last position, so it sees the same keys under every mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.paged_rows import PagedRows, Scoring, attend_ref
from aserve_kernels.paged_tiles import (
    CAUSAL,
    LOG2_E,
    KvSplits,
    attend_keys,
    decode_tiles,
    empty_state,
    merge_states,
    normalised,
    padded,
    score_factors,
)

# NOTE: not measured. Several programs per SM, so that some load while others finish.
PROGRAMS_PER_SM = 4
MIN_WORKERS = 4  # programs for one row's KV head, so that a long row among short ones has several
MERGED_AT_ONCE = 8  # splits whose loads are in flight together


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    paged: PagedRows,
    scoring: Scoring,
    *,
    out: Tensor,
    splits: KvSplits,
) -> None:
    """Writes `out` for the rows with exactly one query, and for no other.

    q and out [tokens, heads, head_dim], float32, bfloat16 or float16; keys and values [slots,
    kv_heads, head_dim] of that dtype or float8_e4m3, contiguous. All are on the device.
    """
    num_rows, num_heads, head_dim = len(paged.rows), q.shape[1], q.shape[2]
    num_kv_heads = keys.shape[1]
    max_splits = splits.most(paged.max_len, scoring.window)
    if num_rows == 0:
        return
    tiles = decode_tiles(num_heads // num_kv_heads, head_dim, q.dtype, splits)
    num_needed = -(-PROGRAMS_PER_SM * splits.chip.num_sms // (num_rows * num_kv_heads))
    num_workers = min(max_splits, max(MIN_WORKERS, num_needed))
    split_accs = q.new_empty((num_rows, num_heads, max_splits, head_dim), dtype=torch.float32)
    split_softmax = q.new_empty((num_rows, num_heads, max_splits, 2), dtype=torch.float32)
    factor, cap = score_factors(scoring)
    parts = {
        "WINDOW": scoring.window or 0,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_N": tiles.block_n,
        "MIN_SPLIT": splits.fixed_split or splits.min_split,
        "IS_FIXED": splits.fixed_split is not None,
        "MAX_SPLITS": max_splits,
        "enable_fp_fusion": splits.fixed_split is None,
    }
    # PERF: a slot's KV heads are adjacent in memory, so the programs that read them are adjacent.
    _attend_splits[(num_kv_heads, num_rows, num_workers)](
        q, keys, values, split_accs, split_softmax,
        paged.page_table, paged.rows, paged.lens, paged.cu_query_lens,
        paged.page_table.stride(0), q.stride(0), q.stride(1), factor, cap,
        HAS_CAP=scoring.softcap is not None,
        PAGE_SIZE=paged.page_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=num_heads // num_kv_heads,
        BLOCK_M=tiles.block_m,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **parts,
    )  # fmt: skip
    merge_splits[(num_rows, num_heads)](
        split_accs, split_softmax, out, paged.lens, paged.cu_query_lens, scoring.sinks,
        scoring.value_scale, LOG2E=LOG2_E, NUM_HEADS=num_heads,
        AT_ONCE=min(MERGED_AT_ONCE, max_splits), num_warps=1, **parts,
    )  # fmt: skip


def paged_decode_ref(
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
    attend_ref(q, keys, values, paged, scoring, out=out, takes=lambda num: num == 1)


@triton.jit
def _attend_splits(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, split_accs: tl.tensor,
    split_softmax: tl.tensor, page_table: tl.tensor, rows: tl.tensor, lens: tl.tensor,
    cu_query_lens: tl.tensor, table_stride: int, q_token_stride: int, q_head_stride: int,
    factor: float, cap: float,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr,
    IS_FIXED: tl.constexpr, MAX_SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Attends one row's query heads of one KV head to every num_workers-th split of its keys."""
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    token = tl.load(cu_query_lens + row)
    if tl.load(cu_query_lens + row + 1) - token != 1:
        return
    kv_len = tl.load(lens + row).to(tl.int32)
    first_key, split, num_splits = splits_of(
        kv_len, WINDOW, BLOCK_N, MIN_SPLIT, IS_FIXED, MAX_SPLITS
    )
    pages = page_table + tl.load(rows + row).to(tl.int64) * table_stride
    group = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP_SIZE + group
    in_bounds = (group < GROUP_SIZE)[:, None] & (dims < HEAD_DIM)[None, :]
    indices = token * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    query = tl.load(q + indices, mask=in_bounds, other=0.0)
    positions = tl.full((BLOCK_M,), 0, tl.int32) + (kv_len - 1)
    for split_id in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        first = first_key + split_id * split
        row_max, row_sum, acc = attend_keys(
            query, positions, kv_len - 1, kv_len - 1, kv_len, lens, lens, first, first + split,
            pages, keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM, factor, cap,
            WINDOW, CAUSAL, HAS_CAP, PAGE_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_M, BLOCK_D,
            BLOCK_N,
        )  # fmt: skip
        index = (row * NUM_KV_HEADS * GROUP_SIZE + heads).to(tl.int64) * MAX_SPLITS + split_id
        tl.store(split_softmax + index * 2, row_max, mask=group < GROUP_SIZE)
        tl.store(split_softmax + index * 2 + 1, row_sum, mask=group < GROUP_SIZE)
        acc_addresses = split_accs + index[:, None] * HEAD_DIM + dims[None, :]
        tl.store(acc_addresses, acc, mask=in_bounds)


@triton.jit
def merge_splits(
    split_accs: tl.tensor, split_softmax: tl.tensor, out: tl.tensor, lens: tl.tensor,
    cu_query_lens: tl.tensor, sinks: tl.tensor | None, value_scale: float, LOG2E: tl.constexpr,
    WINDOW: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr, IS_FIXED: tl.constexpr,
    MAX_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Merges the splits of one head of one row, in order, and writes the output."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_query_lens + row)
    if tl.load(cu_query_lens + row + 1) - token != 1:
        return
    kv_len = tl.load(lens + row).to(tl.int32)
    _, _, num_splits = splits_of(kv_len, WINDOW, BLOCK_N, MIN_SPLIT, IS_FIXED, MAX_SPLITS)
    dims = tl.arange(0, BLOCK_D)[None, :]
    zero = tl.arange(0, 1)
    row_max, row_sum, acc = empty_state(1, BLOCK_D)
    for first in range(0, num_splits, AT_ONCE):
        for number in tl.static_range(AT_ONCE):
            split_id = first + number + zero
            is_split = split_id < num_splits
            index = (row * NUM_HEADS + head).to(tl.int64) * MAX_SPLITS + split_id
            split_max = tl.load(split_softmax + index * 2, mask=is_split, other=float("-inf"))
            split_sum = tl.load(split_softmax + index * 2 + 1, mask=is_split, other=0.0)
            split_acc = tl.load(
                split_accs + index[:, None] * HEAD_DIM + dims,
                mask=is_split[:, None] & (dims < HEAD_DIM),
                other=0.0,
            )
            row_max, row_sum, acc = merge_states(
                row_max, row_sum, acc, split_max, split_sum, split_acc
            )
    has_head = zero == 0
    result = normalised(row_max, row_sum, acc, sinks, head + zero, has_head, LOG2E) * value_scale
    index = (token * NUM_HEADS + head).to(tl.int64) * HEAD_DIM
    tl.store(out + index + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def splits_of(
    kv_len: tl.tensor, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr,
    IS_FIXED: tl.constexpr, MAX_SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Returns the first key, the keys of a split, and the number of splits of a decode row."""
    low = kv_len * 0
    if WINDOW > 0:
        low = tl.maximum(0, kv_len - WINDOW)
    if IS_FIXED:
        split = low * 0 + MIN_SPLIT
        first_key = low // MIN_SPLIT * MIN_SPLIT
    else:
        first_key = low // BLOCK_N * BLOCK_N
        split = tl.cdiv(tl.cdiv(kv_len - first_key, MAX_SPLITS), BLOCK_N) * BLOCK_N
        split = tl.maximum(split, MIN_SPLIT)
    return first_key, split, tl.cdiv(kv_len - first_key, split)
