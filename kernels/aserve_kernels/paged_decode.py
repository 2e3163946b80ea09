"""Attention of one query per row over paged KV, read where it is: the keys of a row in parts that
run beside each other (Flash-Decoding, 2023), then merged.

It knows no layer and no step. Parts depend on a row's own length alone; the grid depends on the
number of rows, and lengths are read on the device, so that a captured launch fits every step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.paged_rows import PagedRows, Scoring, attend_ref
from aserve_kernels.paged_tiles import (
    Cut,
    attend_part,
    decode_tiles,
    merge,
    no_part,
    padded,
    score_factors,
)

# Programs for each processor, so that loads of some hide the ends of others. Not measured.
PROGRAMS = 4
LEAST_LANES = 4  # programs for a row's KV head, so that a long row among short ones has some
MERGED_AT_ONCE = 8  # parts whose loads are in flight together


def paged_decode(
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
    the rows with one query, and no other."""
    num_rows, num_heads, head_dim = len(paged.rows), q.shape[1], q.shape[2]
    num_kv_heads = keys.shape[1]
    num_splits = cut.max_splits(paged.max_len, scoring.window)
    if num_rows == 0:
        return
    tiles = decode_tiles(num_heads // num_kv_heads, head_dim, q.dtype, cut)
    wanted = -(-PROGRAMS * cut.chip.num_processors // (num_rows * num_kv_heads))
    num_lanes = min(num_splits, max(LEAST_LANES, wanted))
    mixed = q.new_empty((num_rows, num_heads, num_splits, head_dim), dtype=torch.float32)
    peaks = q.new_empty((num_rows, num_heads, num_splits, 2), dtype=torch.float32)
    factor, cap = score_factors(scoring)
    parts = {
        "WINDOW": scoring.window or 0,
        "HEAD_DIM": head_dim,
        "WIDTH": padded(head_dim),
        "KEYS": tiles.keys,
        "LEAST_SPLIT": cut.fixed_split or cut.least_split,
        "IS_FIXED": cut.fixed_split is not None,
        "NUM_SPLITS": num_splits,
        "enable_fp_fusion": cut.fixed_split is None,
    }
    # The KV heads of a slot lie side by side, and so do the programs that read them.
    _attend_splits[(num_kv_heads, num_rows, num_lanes)](
        q, keys, values, mixed, peaks,
        paged.page_table, paged.rows, paged.lens, paged.cu_query_lens,
        paged.page_table.stride(0), q.stride(0), q.stride(1), factor, cap,
        HAS_CAP=scoring.softcap is not None,
        PAGE_SIZE=paged.page_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUPS=num_heads // num_kv_heads,
        LINES=tiles.lines,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **parts,
    )  # fmt: skip
    _merge_splits[(num_rows, num_heads)](
        mixed, peaks, out, paged.lens, paged.cu_query_lens, scoring.value_scale,
        NUM_HEADS=num_heads, AT_ONCE=min(MERGED_AT_ONCE, num_splits), num_warps=1, **parts,
    )  # fmt: skip


def paged_decode_ref(
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
    attend_ref(q, keys, values, paged, scoring, out=out, takes=lambda num: num == 1)


@triton.jit
def _attend_splits(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, mixed_parts: tl.tensor, peaks: tl.tensor,
    page_table: tl.tensor, rows: tl.tensor, lens: tl.tensor, cu_query_lens: tl.tensor,
    table_stride: int, q_token_stride: int, q_head_stride: int, factor: float, cap: float,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    LINES: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, LEAST_SPLIT: tl.constexpr,
    IS_FIXED: tl.constexpr, NUM_SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Every lane-th part of a row's keys, for the query heads of one KV head."""
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    token = tl.load(cu_query_lens + row)
    if tl.load(cu_query_lens + row + 1) - token != 1:
        return
    kv_len = tl.load(lens + row).to(tl.int32)
    first_key, split, num_splits = _splits(kv_len, WINDOW, KEYS, LEAST_SPLIT, IS_FIXED, NUM_SPLITS)
    pages = page_table + tl.load(rows + row).to(tl.int64) * table_stride
    groups = tl.arange(0, LINES)
    dims = tl.arange(0, WIDTH)
    heads = kv_head * GROUPS + groups
    is_there = (groups < GROUPS)[:, None] & (dims < HEAD_DIM)[None, :]
    indices = token * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    lines = tl.load(q + indices, mask=is_there, other=0.0)
    positions = tl.full((LINES,), 0, tl.int32) + (kv_len - 1)
    for part in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        first = first_key + part * split
        most, total, mixed = attend_part(
            lines, positions, kv_len - 1, kv_len - 1, first, first + split, pages,
            keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM, factor, cap,
            WINDOW, HAS_CAP, PAGE_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, LINES, WIDTH, KEYS,
        )  # fmt: skip
        place = (row * NUM_KV_HEADS * GROUPS + heads).to(tl.int64) * NUM_SPLITS + part
        tl.store(peaks + place * 2, most, mask=groups < GROUPS)
        tl.store(peaks + place * 2 + 1, total, mask=groups < GROUPS)
        lines_of_part = mixed_parts + place[:, None] * HEAD_DIM + dims[None, :]
        tl.store(lines_of_part, mixed, mask=is_there)


@triton.jit
def _merge_splits(
    mixed_parts: tl.tensor, peaks: tl.tensor, out: tl.tensor, lens: tl.tensor,
    cu_query_lens: tl.tensor, value_scale: float, WINDOW: tl.constexpr, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, LEAST_SPLIT: tl.constexpr,
    IS_FIXED: tl.constexpr, NUM_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """A head's parts, in order."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_query_lens + row)
    if tl.load(cu_query_lens + row + 1) - token != 1:
        return
    kv_len = tl.load(lens + row).to(tl.int32)
    _, _, num_splits = _splits(kv_len, WINDOW, KEYS, LEAST_SPLIT, IS_FIXED, NUM_SPLITS)
    dims = tl.arange(0, WIDTH)[None, :]
    line = tl.arange(0, 1)
    most, total, mixed = no_part(1, WIDTH)
    for first in range(0, num_splits, AT_ONCE):
        for number in tl.static_range(AT_ONCE):
            part = first + number + line
            is_part = part < num_splits
            place = (row * NUM_HEADS + head).to(tl.int64) * NUM_SPLITS + part
            part_most = tl.load(peaks + place * 2, mask=is_part, other=float("-inf"))
            part_total = tl.load(peaks + place * 2 + 1, mask=is_part, other=0.0)
            part_mixed = tl.load(
                mixed_parts + place[:, None] * HEAD_DIM + dims,
                mask=is_part[:, None] & (dims < HEAD_DIM),
                other=0.0,
            )
            most, total, mixed = merge(most, total, mixed, part_most, part_total, part_mixed)
    result = mixed / total[:, None] * value_scale
    place = (token * NUM_HEADS + head).to(tl.int64) * HEAD_DIM
    tl.store(out + place + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _splits(
    kv_len: tl.tensor, WINDOW: tl.constexpr, KEYS: tl.constexpr, LEAST_SPLIT: tl.constexpr,
    IS_FIXED: tl.constexpr, NUM_SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """-> first key, keys of a part, number of parts, of a row whose query is its last position."""
    low = kv_len * 0
    if WINDOW > 0:
        low = tl.maximum(0, kv_len - WINDOW)
    if IS_FIXED:
        split = low * 0 + LEAST_SPLIT
        first_key = low // LEAST_SPLIT * LEAST_SPLIT
    else:
        first_key = low // KEYS * KEYS
        split = tl.cdiv(tl.cdiv(kv_len - first_key, NUM_SPLITS), KEYS) * KEYS
        split = tl.maximum(split, LEAST_SPLIT)
    return first_key, split, tl.cdiv(kv_len - first_key, split)
