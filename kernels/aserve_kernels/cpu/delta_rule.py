"""Gated DeltaNet's recurrence on the CPU: see ../delta_rule.py.

Token after token, without chunks: the delta rule treats the columns of a matrix apart, so a block
of columns stays in the L1 cache while all tokens of a row pass. A unit of work is one head of
queries and keys of one row, with the heads of values that it serves.

PERF: a layer of Qwen3.5-0.8B's shape, ms of two threads of an EPYC with AVX2, in torch and here:
one row of 2,048 tokens 291 and 72; 1 and 8 rows of one token 1.12 and 0.16, 4.7 and 1.1.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, numba_type, widened
from aserve_kernels.cpu.exp2 import LOG2_E, power_of_two
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.memory import FLOAT32_LIKE, scratch
from aserve_kernels.cpu.precompile import FASTMATH, cached_njit, compile_ahead
from aserve_kernels.cpu.simd import LANES, fma, load, splat, store, zeros
from aserve_kernels.cpu.team import worker_of
from aserve_kernels.delta_rule import LENGTH_EPS, DeltaRows, DeltaStates, DeltaTokens

BLOCK = 2 * LANES  # columns of a matrix


def fits_blocks(states: DeltaStates) -> bool:
    """Whether the kernel can advance these states."""
    return states.matrices.dtype == torch.float32 and states.matrices.shape[-1] % BLOCK == 0


def advance_rows(
    tokens: DeltaTokens, rows: DeltaRows, states: DeltaStates, *, num_workers: int
) -> Tensor:
    """Does what `advance_rows_ref` does, for channels of float32 or bfloat16 and states that
    `fits_blocks` accepts. `num_workers` threads share the work: one if it was compiled for one,
    else any number above."""
    num_heads, value_dim = states.matrices.shape[2], states.matrices.shape[4]
    out = torch.empty((len(tokens.channels), num_heads, value_dim), dtype=torch.float32)
    advance = _advance_alone if num_workers == 1 else _advance
    advance(
        as_array(tokens.channels.contiguous()), tokens.conv.float().numpy(),
        tokens.log_decay.float().contiguous().numpy(), tokens.rate.float().contiguous().numpy(),
        states.matrices.numpy(), as_array(states.inputs), out.numpy(),
        rows.rows.numpy(), rows.kv_lens.numpy(), rows.cu_query_lens.numpy(), num_workers,
    )  # fmt: skip
    return out


def compile_advance_rows(dtype: torch.dtype, num_workers: int) -> None:
    """Compiles for channels of this dtype, and either for one worker or for several."""
    floats, wide = numba_type(dtype), types.float32
    matrix, column = types.Array(wide, 2, "C"), types.Array(types.int64, 1, "C")
    compile_ahead(
        _advance_alone if num_workers == 1 else _advance,
        *(types.Array(floats, 2, "C"), matrix, matrix, matrix, types.Array(wide, 5, "C")),
        *(types.Array(floats, 3, "C"), types.Array(wide, 3, "C"), column, column, column),
        types.int64,
    )


@cached_njit(parallel=True, nogil=True)
def _advance(
    channels: Floats, conv: Float32s, log_decay: Float32s, rate: Float32s, matrices: Float32s,
    inputs: Floats, out: Float32s, rows: Int64s, kv_lens: Int64s, starts: Int64s, num_workers: int,
) -> None:  # fmt: skip
    for index in prange(num_workers):
        _advance_share(
            channels, conv, log_decay, rate, matrices, inputs, out, rows, kv_lens, starts,
            worker_of(index), num_workers,
        )  # fmt: skip


@cached_njit(nogil=True)
def _advance_alone(
    channels: Floats, conv: Float32s, log_decay: Float32s, rate: Float32s, matrices: Float32s,
    inputs: Floats, out: Float32s, rows: Int64s, kv_lens: Int64s, starts: Int64s, num_workers: int,
) -> None:  # fmt: skip
    for worker in range(num_workers):
        _advance_share(
            channels, conv, log_decay, rate, matrices, inputs, out, rows, kv_lens, starts,
            worker, num_workers,
        )  # fmt: skip


@njit(inline="always")
def _advance_share(
    channels: Floats, conv: Float32s, log_decay: Float32s, rate: Float32s, matrices: Float32s,
    inputs: Floats, out: Float32s, rows: Int64s, kv_lens: Int64s, starts: Int64s,
    worker: int, num_workers: int,
) -> None:  # fmt: skip
    """The share of one worker: every num_workers-th unit of work."""
    num_heads, key_dim, value_dim = matrices.shape[2], matrices.shape[3], matrices.shape[4]
    num_keys = (channels.shape[1] - num_heads * value_dim) // (2 * key_dim)
    unit = 0
    for r in range(len(rows)):
        first, last, row = starts[r], starts[r + 1], rows[r]
        for head in range(num_keys):
            unit += 1
            if unit % num_workers != worker:
                continue
            advance_head(
                channels[first:last], conv, log_decay[first:last], rate[first:last],
                matrices[row], inputs[row], out[first:last], kv_lens[r], head, num_keys,
            )  # fmt: skip


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy")
def advance_head(
    channels: Floats, conv: Float32s, log_decay: Float32s, rate: Float32s, matrices: Float32s,
    inputs: Floats, out: Float32s, begin: int, head: int, num_keys: int,
) -> None:  # fmt: skip
    """Advances one head of queries and keys of one row by channels [tokens, channels], of which the
    first has the position `begin`."""
    num_tokens, num_heads = out.shape[0], out.shape[1]
    num_places, key_dim, value_dim = matrices.shape[0], matrices.shape[2], matrices.shape[3]
    per_key = num_heads // num_keys
    q = scratch((num_tokens, key_dim), FLOAT32_LIKE)
    k = scratch((num_tokens, key_dim), FLOAT32_LIKE)
    v = scratch((num_tokens, value_dim), FLOAT32_LIKE)
    block = scratch((key_dim * BLOCK,), FLOAT32_LIKE)
    _convolve(channels, conv, inputs, begin, head * key_dim, q)
    _convolve(channels, conv, inputs, begin, (num_keys + head) * key_dim, k)
    _normalise(q, np.float32(key_dim) ** np.float32(-0.5))
    _normalise(k, np.float32(1))
    for own in range(head * per_key, (head + 1) * per_key):
        _convolve(channels, conv, inputs, begin, 2 * num_keys * key_dim + own * value_dim, v)
        for first in range(0, value_dim, BLOCK):
            if begin == 0:
                block[:] = np.float32(0)
            else:
                load_block(matrices[begin % num_places, own], first, block)
            for token in range(num_tokens):
                decay = power_of_two(np.float32(LOG2_E) * log_decay[token, own])
                _apply_rule(
                    block, q[token], k[token], v[token, first : first + BLOCK],
                    out[token, own, first : first + BLOCK], decay, rate[token, own],
                )  # fmt: skip
                if token >= num_tokens - num_places:
                    place = (begin + token + 1) % num_places
                    store_block(block, matrices[place, own], first)


@njit(inline="always")
def load_block(matrix: Float32s, first: int, block: Float32s) -> None:
    for i in range(matrix.shape[0]):
        for j in range(BLOCK):
            block[i * BLOCK + j] = matrix[i, first + j]


@njit(inline="always")
def store_block(block: Float32s, matrix: Float32s, first: int) -> None:
    for i in range(matrix.shape[0]):
        for j in range(BLOCK):
            matrix[i, first + j] = block[i * BLOCK + j]


@njit(inline="always")
def _convolve(
    channels: Floats, conv: Float32s, inputs: Floats, begin: int, first: int, target: Float32s
) -> None:
    """target [tokens, n] = silu(conv) of the n channels from `first` on. Their last inputs are kept
    in `inputs` [places, channels]."""
    num_tokens, size = target.shape
    for token in range(num_tokens):
        for c in range(size):
            target[token, c] = np.float32(0)
    add_conv(channels, conv, inputs, begin, first, target)


@njit(inline="always")
def add_conv(
    channels: Floats, conv: Float32s, inputs: Floats, begin: int, first: int, target: Float32s
) -> None:
    """target = silu(target + conv), and the rest as there."""
    num_tokens, size = target.shape
    width, num_places = conv.shape[1] - 1, inputs.shape[0]
    for token in range(num_tokens):
        for tap in range(width + 1):
            source = token + tap - width
            if begin + source < 0:
                continue
            if source < 0:
                place = (begin + source) % num_places
                for c in range(size):
                    value = widened(inputs[place, first + c])
                    target[token, c] += value * conv[first + c, tap]
            else:
                for c in range(size):
                    value = widened(channels[source, first + c])
                    target[token, c] += value * conv[first + c, tap]
        for c in range(size):
            x = target[token, c]
            power = power_of_two(-abs(x) * np.float32(LOG2_E))
            part = np.float32(1) / (np.float32(1) + power)
            target[token, c] = x * (part if x >= 0 else power * part)
    for token in range(max(num_tokens - num_places, 0), num_tokens):
        place = (begin + token) % num_places
        for c in range(first, first + size):
            inputs[place, c] = channels[token, c]


@njit(inline="always")
def _normalise(heads: Float32s, factor: np.float32) -> None:
    """heads [tokens, n] = factor * heads / |heads|"""
    num_tokens, size = heads.shape
    for token in range(num_tokens):
        total = np.float32(LENGTH_EPS)
        for i in range(size):
            total += heads[token, i] * heads[token, i]
        scale = factor / np.sqrt(total)
        for i in range(size):
            heads[token, i] *= scale


@njit(inline="always")
def _apply_rule(
    block: Float32s, q: Float32s, k: Float32s, v: Float32s, out: Float32s,
    decay: np.float32, rate: np.float32,
) -> None:  # fmt: skip
    """Applies one token to a block of columns, [d_k, BLOCK], flat."""
    known0, known1 = zeros(), zeros()
    for i in range(len(k)):
        factor = splat(k[i])
        known0 = fma(known0, load(block, i * BLOCK), factor)
        known1 = fma(known1, load(block, i * BLOCK + LANES), factor)
    # rate (v - decay k^T S)
    rates, forgotten = splat(rate), splat(-decay * rate)
    change0 = fma(fma(zeros(), load(v, 0), rates), known0, forgotten)
    change1 = fma(fma(zeros(), load(v, LANES), rates), known1, forgotten)
    y0, y1, kept = zeros(), zeros(), splat(decay)
    for i in range(len(k)):
        key, query = splat(k[i]), splat(q[i])
        state0 = fma(fma(zeros(), load(block, i * BLOCK), kept), change0, key)
        state1 = fma(fma(zeros(), load(block, i * BLOCK + LANES), kept), change1, key)
        store(state0, block, i * BLOCK)
        store(state1, block, i * BLOCK + LANES)
        y0, y1 = fma(y0, state0, query), fma(y1, state1, query)
    store(y0, out, 0)
    store(y1, out, LANES)
