"""Attention of few queries per row over paged KV, read where it is: decode, verify windows, short
chunks. Grouped queries share one read; the softmax is online (Milakov and Gimelshein, 2018).

It knows no layer and no step. Nothing is kept between calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numba import njit, prange, types
from numba.core.dispatcher import Dispatcher
from torch import Tensor

from aserve_kernels.cpu.half import Float32s, Floats, as_array, narrow, widen

Int64s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

TILE = 16  # keys that are widened and scored together
BLOCK = 16  # query heads of one KV head that share a read
NO_WINDOW = 1 << 62
LOG2_E = 1.4426950408889634
LEAST_EXPONENT = np.float32(-126)  # of a float32 that is not subnormal
# 2^f for |f| <= 1/2 as its Taylor series, ln(2)^k / k!: exact to float32's rounding.
C1, C2, C3, C4, C5, C6 = (
    np.float32(math.log(2) ** power / math.factorial(power)) for power in range(1, 7)
)
# Infinities and NaN keep their meaning.
FAST = {"contract", "reassoc", "nsz", "arcp"}


@dataclass(frozen=True, slots=True)
class RowSpans:
    """int64 [n] each: `rows` of the page table; `lens`, KV lengths with this forward's tokens;
    `starts`, the first query of each row; `spans`, its queries, which are at its last positions."""

    rows: Int64s
    lens: Int64s
    starts: Int64s
    spans: Int64s


@dataclass(frozen=True, slots=True)
class PagedRows:
    """`page_table`: int64 [rows, pages]."""

    page_table: Int64s
    page_size: int
    own: RowSpans


@dataclass(frozen=True, slots=True)
class Scoring:
    """q k^T is multiplied with `scale`, then capped: softcap * tanh(score / softcap). A query sees
    the last `window` positions, itself included."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scoring: Scoring, *, out: Tensor
) -> None:
    """q and out [tokens, heads, head_dim], keys and values [slots, kv_heads, head_dim]; all float32
    or all bfloat16, on the CPU, all but q contiguous. Writes the rows' queries in `out`, no other.
    """
    if scoring.softcap is None:
        factor, cap = scoring.scale * LOG2_E, 0.0
    else:
        factor, cap = scoring.scale / scoring.softcap, scoring.softcap * LOG2_E
    own = rows.own
    _attend(
        as_array(q), as_array(keys), as_array(values), as_array(out),
        rows.page_table, own.rows, own.lens, own.starts, own.spans, rows.page_size,
        NO_WINDOW if scoring.window is None else scoring.window,
        np.float32(factor),
        np.float32(cap),
        torch.get_num_threads(),
    )  # fmt: skip


def paged_attention_ref(
    q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scoring: Scoring, *, out: Tensor
) -> None:
    """The same in plain torch, row by row, in the dtype of q."""
    num_groups = q.shape[1] // keys.shape[1]
    own = rows.own
    for row, kv_len, start, span in zip(own.rows, own.lens, own.starts, own.spans, strict=True):
        positions = torch.arange(int(kv_len))
        distance = torch.arange(int(kv_len - span), int(kv_len))[:, None] - positions
        is_seen = (distance >= 0) & (distance < (scoring.window or NO_WINDOW))
        pages = torch.from_numpy(rows.page_table[row])[positions // rows.page_size]
        slots = pages * rows.page_size + positions % rows.page_size
        slots = slots * is_seen.any(dim=0)  # what no query sees may be anything, also NaN
        part = slice(int(start), int(start + span))
        k = keys[slots].repeat_interleave(num_groups, dim=1)
        v = values[slots].repeat_interleave(num_groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[part], k) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        out[part] = torch.einsum("hqk,khd->qhd", weights, v)


def compile_paged_attention(dtype: torch.dtype) -> None:
    """For this dtype, or read from the cache of an earlier process. Calls compile nothing."""
    if not isinstance(_attend, Dispatcher):  # NUMBA_DISABLE_JIT=1
        return
    floats = types.uint16 if dtype == torch.bfloat16 else types.float32
    heads = types.Array(floats, 3, "C")
    column = types.Array(types.int64, 1, "C")
    _attend.disable_compile(False)
    _attend.compile(
        types.void(
            *(types.Array(floats, 3, "A"), heads, heads, heads),
            *(types.Array(types.int64, 2, "C"), column, column, column, column),
            *(types.int64, types.int64, types.float32, types.float32, types.int64),
        )
    )
    _attend.disable_compile()


@njit(parallel=True, cache=True, nogil=True)
def _attend(
    q: Floats, keys: Floats, values: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, spans: Int64s,
    page_size: int, window: int, factor: np.float32, cap: np.float32, num_workers: int,
) -> None:  # fmt: skip
    num_kv_heads, head_dim = keys.shape[1], keys.shape[2]
    num_groups = q.shape[1] // num_kv_heads
    span = max(1, BLOCK // num_groups)
    num_blocks = 0
    for r in range(rows.shape[0]):
        num_blocks += -(-spans[r] // span)
    block_rows = np.empty(num_blocks, np.int64)
    block_firsts = np.empty(num_blocks, np.int64)
    block = 0
    for r in range(rows.shape[0]):
        for first in range(0, spans[r], span):
            block_rows[block] = r
            block_firsts[block] = first
            block += 1
    # PERF: a token's heads lie side by side, so a worker takes as many of them as it can while two
    # units are left for each.
    heads = min(num_kv_heads, max(1, num_blocks * num_kv_heads // (2 * num_workers)))
    units_per_block = -(-num_kv_heads // heads)
    for worker in prange(num_workers):
        sums = np.empty((3, heads * span * num_groups, head_dim), np.float32)
        for unit in range(worker, num_blocks * units_per_block, num_workers):
            r = block_rows[unit // units_per_block]
            first = block_firsts[unit // units_per_block]
            last = min(first + span, spans[r])
            head = unit % units_per_block * heads
            _attend_block(
                q[starts[r] + first : starts[r] + last],
                keys, values,
                out[starts[r] + first : starts[r] + last],
                page_table[rows[r]], page_size,
                lens[r] - spans[r] + first, head, min(head + heads, num_kv_heads),
                window, factor, cap, sums,
            )  # fmt: skip


@njit(nogil=True, fastmath=FAST)
def _attend_block(
    q: Floats, keys: Floats, values: Floats, out: Floats, pages: Int64s, page_size: int,
    position: int, first_head: int, last_head: int,
    window: int, factor: np.float32, cap: np.float32, sums: Float32s,
) -> None:  # fmt: skip
    """q, out [queries, heads, head_dim] at `position` and on, for KV heads first_head..last_head.

    sums: room for the queries, for their outputs, and for [most, total] of each softmax.
    """
    num_queries, head_dim = q.shape[0], q.shape[2]
    num_groups = q.shape[1] // keys.shape[1]
    queries, outputs, softmax = sums[0], sums[1], sums[2]
    tile_keys = np.empty((TILE, head_dim), np.float32)
    tile_values = np.empty((TILE, head_dim), np.float32)
    scores = np.empty(TILE, np.float32)
    num_lines = (last_head - first_head) * num_queries * num_groups
    for line in range(num_lines):
        query = line // num_groups % num_queries
        head = first_head + line // (num_groups * num_queries)
        widen(q[query, head * num_groups + line % num_groups], queries[line])
        for d in range(head_dim):
            queries[line, d] *= factor
            outputs[line, d] = np.float32(0)
        softmax[line, 0] = -np.inf
        softmax[line, 1] = np.float32(0)
    start = max(0, position - window + 1)
    stop = position + num_queries
    slots = np.empty(TILE, np.int64)
    column = start // page_size
    offset = start % page_size
    for tile in range(start, stop, TILE):
        size = min(TILE, stop - tile)
        for j in range(size):
            slots[j] = pages[column] * page_size + offset
            offset += 1
            if offset == page_size:
                offset = 0
                column += 1
        for head in range(first_head, last_head):
            for j in range(size):
                widen(keys[slots[j], head], tile_keys[j])
                widen(values[slots[j], head], tile_values[j])
            first_line = (head - first_head) * num_queries * num_groups
            for i in range(num_queries * num_groups):
                own = position + i // num_groups
                low = max(0, own - window + 1 - tile)
                high = min(size, own + 1 - tile)
                if low < high:
                    _add_tile(
                        queries[first_line + i], tile_keys[low:high], tile_values[low:high],
                        scores, softmax[first_line + i], outputs[first_line + i], cap,
                    )  # fmt: skip
    for line in range(num_lines):
        query = line // num_groups % num_queries
        head = first_head + line // (num_groups * num_queries)
        share = np.float32(1) / softmax[line, 1]
        for d in range(head_dim):
            outputs[line, d] *= share
        narrow(outputs[line], out[query, head * num_groups + line % num_groups])


@njit(nogil=True, fastmath=FAST)
def _add_tile(
    query: Float32s, keys: Float32s, values: Float32s, scores: Float32s,
    softmax: Float32s, output: Float32s, cap: np.float32,
) -> None:  # fmt: skip
    """One query's online softmax, in powers of two: `softmax` is [most, total], `output` the sum of
    the values, both relative to 2^most."""
    size, head_dim = keys.shape
    most = softmax[0]
    for j in range(size):
        score = np.float32(0)
        for d in range(head_dim):
            score += query[d] * keys[j, d]
        if cap > 0:
            score = cap * np.float32(math.tanh(score))
        scores[j] = score
        most = max(most, score)
    shrink = _power_of_two(softmax[0] - most)
    total = softmax[1] * shrink
    for j in range(size):
        scores[j] = _power_of_two(scores[j] - most)
        total += scores[j]
    softmax[0] = most
    softmax[1] = total
    for d in range(head_dim):
        output[d] *= shrink
    whole = size // 4 * 4
    for j in range(0, whole, 4):
        for d in range(head_dim):
            output[d] += (
                scores[j] * values[j, d]
                + scores[j + 1] * values[j + 1, d]
                + scores[j + 2] * values[j + 2, d]
                + scores[j + 3] * values[j + 3, d]
            )
    for j in range(whole, size):
        for d in range(head_dim):
            output[d] += scores[j] * values[j, d]


@njit(inline="always")
def _power_of_two(exponent: np.float32) -> np.float32:
    """Of an exponent that is not above 0. WHY: libm's exp is a call, and no loop around one is
    vectorised."""
    clamped = max(LEAST_EXPONENT, exponent)
    whole = np.floor(clamped + np.float32(0.5))
    f = clamped - whole
    part = f * (C3 + f * (C4 + f * (C5 + f * C6)))
    fraction = np.float32(1) + f * (C1 + f * (C2 + part))
    power: np.float32 = np.int32(np.int32(np.int32(whole) + 127) << 23).view(np.float32)
    return np.float32(fraction * power)
