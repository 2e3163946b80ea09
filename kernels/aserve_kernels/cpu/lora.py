"""LoRA on the CPU for few tokens with different adapters: see aserve_kernels.lora.

Tokens are sorted by their slot, so that a row of A or B is read from memory once for all tokens
that need it. Sums are float32. A token's sums have one order, whatever other tokens there are, so
its result is the same in every batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, numba_type, widen, widened
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT, cached_njit, compile_ahead
from aserve_kernels.cpu.team import worker_of
from aserve_kernels.lora import LoraStack

BLOCK = 4  # ranks that are multiplied at a time


def add_lora(y: Tensor, x: Tensor, slots: Tensor, stack: LoraStack) -> None:
    """Adds to y [tokens, out] in place. x [tokens, in] and the stack are float32 or bfloat16 on the
    CPU, slots int64 [tokens]."""
    num_workers = torch.get_num_threads()
    weights = as_array(stack.a), as_array(stack.b), stack.ranks, stack.bounds
    inputs = as_array(x.contiguous()), slots.numpy()
    if num_workers == 1:
        _add_alone(*inputs, *weights, as_array(y))
    else:
        _add_together(*inputs, *weights, as_array(y), num_workers)


def compile_lora(dtype: torch.dtype, num_threads: int) -> None:
    floats = numba_type(dtype)
    rows, slots = types.Array(floats, 2, "C"), types.Array(types.int64, 1, "C")
    a, b = types.Array(floats, 4, "C"), types.Array(floats, 3, "C")
    weights = a, b, types.Array(types.int64, 2, "C"), slots
    if num_threads == 1:
        compile_ahead(_add_alone, rows, slots, *weights, rows)
    else:
        compile_ahead(_add_together, rows, slots, *weights, rows, types.int64)


@cached_njit(nogil=True)
def _add_alone(
    x: Floats, slots: Int64s, a: Floats, b: Floats, ranks: Int64s, bounds: Int64s, y: Floats
) -> None:
    total = np.empty(y.shape, np.float32)
    _widen_used(y, slots, total)
    add_to_wide(x, slots, a, b, ranks, bounds, total)
    _narrow_used(total, slots, y, 0, y.shape[1])


@cached_njit(parallel=True, nogil=True)
def _add_together(
    x: Floats, slots: Int64s, a: Floats, b: Floats, ranks: Int64s, bounds: Int64s, y: Floats,
    num_workers: int,
) -> None:  # fmt: skip
    order, starts = _sort_by_slot(slots, a.shape[0])
    x_float = np.empty(x.shape, np.float32)
    h = _empty_shrunk(x.shape[0], a)
    total = np.empty(y.shape, np.float32)
    _widen_used(x, slots, x_float)
    _widen_used(y, slots, total)
    for index in prange(num_workers):
        _shrink(x_float, order, starts, a, ranks, h, worker_of(index), num_workers)
    num_out = y.shape[1]
    block = -(-num_out // num_workers)
    for worker in prange(num_workers):
        first, last = min(worker * block, num_out), min((worker + 1) * block, num_out)
        _expand(h, order, starts, b, ranks, bounds, total, first, last)
        _narrow_used(total, slots, y, first, last)


@njit(nogil=True)
def add_to_wide(
    x: Floats, slots: Int64s, a: Floats, b: Floats, ranks: Int64s, bounds: Int64s, y: Float32s
) -> None:
    """The same in one thread, for y in float32."""
    order, starts = _sort_by_slot(slots, a.shape[0])
    x_float = np.empty(x.shape, np.float32)
    h = _empty_shrunk(x.shape[0], a)
    _widen_used(x, slots, x_float)
    _shrink(x_float, order, starts, a, ranks, h, 0, 1)
    _expand(h, order, starts, b, ranks, bounds, y, 0, y.shape[1])


@njit(nogil=True)
def _empty_shrunk(num_tokens: int, a: Floats) -> Float32s:
    """[tokens, parts, rank], with room for whole blocks of ranks."""
    return np.empty((num_tokens, a.shape[1], -(-a.shape[2] // BLOCK) * BLOCK), np.float32)


@njit(nogil=True)
def _sort_by_slot(slots: Int64s, num_slots: int) -> tuple[Int64s, Int64s]:
    """Returns the tokens in the order of their slots, and where those of each slot start, [slots +
    1].
    """
    starts = np.zeros(num_slots + 1, np.int64)
    for token in range(slots.shape[0]):
        starts[slots[token] + 1] += 1
    for slot in range(num_slots):
        starts[slot + 1] += starts[slot]
    order, filled = np.empty(slots.shape[0], np.int64), starts.copy()
    for token in range(slots.shape[0]):
        slot = slots[token]
        order[filled[slot]] = token
        filled[slot] += 1
    return order, starts


@njit(nogil=True)
def _widen_used(source: Floats, slots: Int64s, target: Float32s) -> None:
    """Widens the rows [tokens, n] of tokens that have an adapter."""
    for token in range(slots.shape[0]):
        if slots[token] != 0:
            widen(source[token], target[token])


@njit(nogil=True)
def _narrow_used(source: Float32s, slots: Int64s, target: Floats, first: int, last: int) -> None:
    for token in range(slots.shape[0]):
        if slots[token] != 0:
            narrow(source[token, first:last], target[token, first:last])


@njit(nogil=True)
def _shrink(
    x: Float32s, order: Int64s, starts: Int64s, a: Floats, ranks: Int64s, h: Float32s,
    worker: int, num_workers: int,
) -> None:  # fmt: skip
    """h[t, p, r] = x[t] . a[slot of t, p, r], for the worker's share of the blocks of BLOCK ranks.
    Ranks up to the end of a block are written, too; those that no adapter has are zeros."""
    for slot in range(1, a.shape[0]):
        if starts[slot] == starts[slot + 1]:
            continue
        for part in range(a.shape[1]):
            for r in range(worker * BLOCK, ranks[slot, part], num_workers * BLOCK):
                for index in range(starts[slot], starts[slot + 1]):
                    token = order[index]
                    _dot_block(x[token], a[slot, part], r, h[token, part])


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def _dot_block(x: Float32s, a: Floats, r: int, h: Float32s) -> None:
    """PERF: one load of x serves BLOCK products."""
    last = a.shape[0] - 1
    row0, row1, row2, row3 = a[r], a[min(r + 1, last)], a[min(r + 2, last)], a[min(r + 3, last)]
    sum0 = sum1 = sum2 = sum3 = np.float32(0)
    for i in range(x.shape[0]):
        sum0 += x[i] * widened(row0[i])
        sum1 += x[i] * widened(row1[i])
        sum2 += x[i] * widened(row2[i])
        sum3 += x[i] * widened(row3[i])
    h[r], h[r + 1], h[r + 2], h[r + 3] = sum0, sum1, sum2, sum3
    h[last + 1 :] = np.float32(0)


@njit(nogil=True)
def _expand(
    h: Float32s, order: Int64s, starts: Int64s, b: Floats, ranks: Int64s, bounds: Int64s,
    y: Float32s, first: int, last: int,
) -> None:  # fmt: skip
    """y[t, o] += sum_r h[t, part of o, r] * b[slot of t, r, o] for first <= o < last."""
    for slot in range(1, b.shape[0]):
        if starts[slot] == starts[slot + 1]:
            continue
        for part in range(bounds.shape[0] - 1):
            start, stop = max(first, bounds[part]), min(last, bounds[part + 1])
            if start >= stop:
                continue
            for r in range(0, ranks[slot, part], BLOCK):
                for index in range(starts[slot], starts[slot + 1]):
                    token = order[index]
                    _add_block(h[token, part], b[slot], r, y[token, start:stop], start)


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def _add_block(h: Float32s, b: Floats, r: int, y: Float32s, start: int) -> None:
    """PERF: one load and store of y serve BLOCK products."""
    last, stop = b.shape[0] - 1, start + y.shape[0]
    row0, row1 = b[r, start:stop], b[min(r + 1, last), start:stop]
    row2, row3 = b[min(r + 2, last), start:stop], b[min(r + 3, last), start:stop]
    h0, h1, h2, h3 = h[r], h[r + 1], h[r + 2], h[r + 3]
    for i in range(y.shape[0]):
        y[i] += (
            h0 * widened(row0[i]) + h1 * widened(row1[i])
            + (h2 * widened(row2[i]) + h3 * widened(row3[i]))
        )  # fmt: skip
