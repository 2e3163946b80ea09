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
from aserve_kernels.cpu.lanes import LANES, add_product, load, prefetch, splat, store, total, zeros

Int64s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

TILE = 64  # keys that are widened and scored together
WIDTH = 2 * LANES  # a head is padded to a multiple of it
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
    num_kv_heads = keys.shape[1]
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
    # PERF: a parallel region wakes every thread of numba's pool, however few have work.
    if num_workers == 1:
        _attend_units(
            q, keys, values, out, page_table, rows, lens, starts, spans, page_size,
            window, factor, cap, block_rows, block_firsts, span, heads, 0, 1,
        )  # fmt: skip
        return
    for worker in prange(num_workers):
        _attend_units(
            q, keys, values, out, page_table, rows, lens, starts, spans, page_size,
            window, factor, cap, block_rows, block_firsts, span, heads, worker, num_workers,
        )  # fmt: skip


@njit(nogil=True)
def _attend_units(
    q: Floats, keys: Floats, values: Floats, out: Floats,
    page_table: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, spans: Int64s, page_size: int,
    window: int, factor: np.float32, cap: np.float32,
    block_rows: Int64s, block_firsts: Int64s, span: int, heads: int, worker: int, num_workers: int,
) -> None:  # fmt: skip
    """Every num_workers-th unit: `heads` KV heads of a block, which is `span` queries of a row."""
    num_kv_heads = keys.shape[1]
    units_per_block = -(-num_kv_heads // heads)
    width = -(-keys.shape[2] // WIDTH) * WIDTH
    # Padded to `width` with zeros, which add nothing to a score.
    lines = np.zeros((2, heads * span * (q.shape[1] // num_kv_heads) * width), np.float32)
    softmax = np.empty((heads * span * (q.shape[1] // num_kv_heads), 2), np.float32)
    tiles = np.zeros((2, TILE * width), np.float32)
    for unit in range(worker, len(block_rows) * units_per_block, num_workers):
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
            window, factor, cap, lines, softmax, tiles,
        )  # fmt: skip


@njit(nogil=True, fastmath=FAST)
def _attend_block(
    q: Floats, keys: Floats, values: Floats, out: Floats, pages: Int64s, page_size: int,
    position: int, first_head: int, last_head: int,
    window: int, factor: np.float32, cap: np.float32,
    lines: Float32s, softmax: Float32s, tiles: Float32s,
) -> None:  # fmt: skip
    """q, out [queries, heads, head_dim] at `position` and on, for KV heads first_head..last_head.

    Room: `lines` for the queries and their outputs; `softmax` for [most, total] of each; `tiles`
    for keys and values.
    """
    num_queries, head_dim = q.shape[0], q.shape[2]
    num_groups = q.shape[1] // keys.shape[1]
    queries, outputs = lines[0], lines[1]
    tile_keys, tile_values = tiles[0], tiles[1]
    width = tile_keys.shape[0] // TILE
    scores = np.empty(TILE, np.float32)
    num_lines = (last_head - first_head) * num_queries * num_groups
    for line in range(num_lines):
        query = line // num_groups % num_queries
        head = first_head + line // (num_groups * num_queries)
        widen(
            q[query, head * num_groups + line % num_groups],
            queries[line * width : line * width + head_dim],
        )
        for d in range(line * width, line * width + width):
            queries[d] *= factor
            outputs[d] = np.float32(0)
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
            _widen_tile(keys, slots, size, head, tile_keys)
            _widen_tile(values, slots, size, head, tile_values)
            first_line = (head - first_head) * num_queries * num_groups
            for i in range(num_queries * num_groups):
                own = position + i // num_groups
                low = max(0, own - window + 1 - tile)
                high = min(size, own + 1 - tile)
                if low < high:
                    line = first_line + i
                    _score(queries, line * width, width, tile_keys, low, high, scores)
                    shrink = _weigh(scores, low, high, cap, softmax, line)
                    _add_values(
                        scores, low, high, tile_values, shrink, outputs, line * width, width
                    )
    for line in range(num_lines):
        query = line // num_groups % num_queries
        head = first_head + line // (num_groups * num_queries)
        share = np.float32(1) / softmax[line, 1]
        for d in range(line * width, line * width + width):
            outputs[d] *= share
        narrow(
            outputs[line * width : line * width + head_dim],
            out[query, head * num_groups + line % num_groups],
        )


@njit(nogil=True)
def _widen_tile(source: Floats, slots: Int64s, size: int, head: int, tile: Float32s) -> None:
    """tile [TILE * width]: what the slots hold of a head, one after the other."""
    num_heads, head_dim = source.shape[1], source.shape[2]
    width = tile.shape[0] // TILE
    whole = head_dim // LANES * LANES
    flat = source.reshape(-1)
    for j in range(size):
        start = (slots[j] * num_heads + head) * head_dim
        # PERF: no machine foresees that the next head's part is read soon. 32 rows of 1,000 tokens,
        # 8 heads of 128 in bfloat16: 14 ms against 34 without.
        for d in range(0, whole, LANES):
            prefetch(flat, start + head_dim + d)
            store(load(flat, start + d), tile, j * width + d)
    if whole < head_dim:
        for j in range(size):
            widen(source[slots[j], head, whole:], tile[j * width + whole : j * width + head_dim])


@njit(nogil=True)
def _score(
    queries: Float32s, start: int, width: int, keys: Float32s, low: int, high: int, scores: Float32s
) -> None:
    """Four keys at a time, so some that are not asked for: `scores` has room for them."""
    for j in range(low // 4 * 4, high, 4):
        a, b, c, d = zeros(), zeros(), zeros(), zeros()
        key = j * width
        for i in range(0, width, LANES):
            part = load(queries, start + i)
            a = add_product(a, part, load(keys, key + i))
            b = add_product(b, part, load(keys, key + width + i))
            c = add_product(c, part, load(keys, key + 2 * width + i))
            d = add_product(d, part, load(keys, key + 3 * width + i))
        scores[j] = total(a)
        scores[j + 1] = total(b)
        scores[j + 2] = total(c)
        scores[j + 3] = total(d)


@njit(nogil=True, fastmath=FAST)
def _weigh(
    scores: Float32s, low: int, high: int, cap: np.float32,
    softmax: Float32s, line: int,
) -> np.float32:  # fmt: skip
    """Scores low..high become weights, of an online softmax in powers of two: a line's `softmax` is
    [most, total]; total and the output are relative to 2^most. Returns what the output shrinks by.
    """
    if cap > 0:
        for j in range(low, high):
            scores[j] = cap * np.float32(math.tanh(scores[j]))
    for j in range(low):
        scores[j] = -np.inf
    stop = -(-high // LANES) * LANES
    for j in range(high, stop):
        scores[j] = -np.inf
    most = softmax[line, 0]
    for j in range(stop):
        most = max(most, scores[j])
    shrink = _power_of_two(softmax[line, 0] - most)
    added = np.float32(0)
    for j in range(stop):
        scores[j] = _power_of_two(scores[j] - most)
        added += scores[j]
    softmax[line, 0] = most
    softmax[line, 1] = softmax[line, 1] * shrink + added
    return shrink


@njit(nogil=True)
def _add_values(
    weights: Float32s, low: int, high: int, values: Float32s,
    shrink: np.float32, outputs: Float32s, start: int, width: int,
) -> None:  # fmt: skip
    """output = output * shrink + the weighted sum of values low..high."""
    for i in range(0, width, 2 * LANES):
        a = add_product(zeros(), load(outputs, start + i), splat(shrink))
        b = add_product(zeros(), load(outputs, start + i + LANES), splat(shrink))
        for j in range(low, high):
            weight = splat(weights[j])
            a = add_product(a, weight, load(values, j * width + i))
            b = add_product(b, weight, load(values, j * width + i + LANES))
        store(a, outputs, start + i)
        store(b, outputs, start + i + LANES)


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
