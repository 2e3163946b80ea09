"""The recurrence of Mamba-2 on the CPU: see `StateSpace` in ../delta_rule.py.

Token after token, as Gated DeltaNet's, a block of columns of a matrix at a time. Often all heads of
values share one head of queries and keys, so conv is computed first, once for all of them, and then
each head of values of a row is a unit of work.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, numba_type
from aserve_kernels.cpu.delta_rule import BLOCK, add_conv, load_block, store_block
from aserve_kernels.cpu.exp2 import LOG2_E, power_of_two
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.memory import FLOAT32_LIKE, scratch
from aserve_kernels.cpu.precompile import FASTMATH, cached_njit, compile_ahead
from aserve_kernels.cpu.simd import LANES, fma, load, splat, store, zeros
from aserve_kernels.cpu.team import worker_of
from aserve_kernels.delta_rule import DeltaRows, DeltaStates, DeltaTokens, StateSpace


def advance_spaces(
    tokens: DeltaTokens, space: StateSpace, rows: DeltaRows, states: DeltaStates, num_workers: int
) -> Tensor:
    """Does what `advance_rows_ref` does for tokens with a state space, under the conditions of
    delta_rule.py's `advance_rows`."""
    num_tokens = len(tokens.channels)
    num_heads, key_dim, value_dim = states.matrices.shape[2:]
    num_keys = (tokens.channels.shape[1] - num_heads * value_dim) // (2 * key_dim)
    out = torch.empty((num_tokens, num_heads, value_dim), dtype=torch.float32)
    values = torch.empty((num_heads, num_tokens, value_dim), dtype=torch.float32)
    keys = torch.empty((2 * num_keys, num_tokens, key_dim), dtype=torch.float32)
    advance = _advance_alone if num_workers == 1 else _advance
    advance(
        as_array(tokens.channels.contiguous()), tokens.conv.float().numpy(), space.bias.numpy(),
        space.skip.numpy(), tokens.log_decay.contiguous().numpy(),
        tokens.rate.float().contiguous().numpy(), states.matrices.numpy(), as_array(states.inputs),
        values.numpy(), keys.numpy(), out.numpy(),
        rows.rows.numpy(), rows.kv_lens.numpy(), rows.cu_query_lens.numpy(), num_workers,
    )  # fmt: skip
    return out


def compile_advance_spaces(dtype: torch.dtype, num_workers: int) -> None:
    """Compiles for channels of this dtype, and either for one worker or for several."""
    floats, wide = numba_type(dtype), types.float32
    vector, matrix, cube = (types.Array(wide, rank, "C") for rank in (1, 2, 3))
    column = types.Array(types.int64, 1, "C")
    compile_ahead(
        _advance_alone if num_workers == 1 else _advance,
        *(types.Array(floats, 2, "C"), matrix, vector, vector, matrix, matrix),
        *(types.Array(wide, 5, "C"), types.Array(floats, 3, "C"), cube, cube, cube),
        *(column, column, column, types.int64),
    )


@cached_njit(parallel=True, nogil=True)
def _advance(
    channels: Floats, conv: Float32s, bias: Float32s, skip: Float32s, log_decay: Float32s,
    rate: Float32s, matrices: Float32s, inputs: Floats, values: Float32s, keys: Float32s,
    out: Float32s, rows: Int64s, kv_lens: Int64s, starts: Int64s, num_workers: int,
) -> None:  # fmt: skip
    for index in prange(num_workers):
        _convolve_share(
            channels, conv, bias, inputs, values, keys, rows, kv_lens, starts,
            worker_of(index), num_workers,
        )  # fmt: skip
    for index in prange(num_workers):
        _advance_share(
            values, keys, skip, log_decay, rate, matrices, out, rows, kv_lens, starts,
            worker_of(index), num_workers,
        )  # fmt: skip


@cached_njit(nogil=True)
def _advance_alone(
    channels: Floats, conv: Float32s, bias: Float32s, skip: Float32s, log_decay: Float32s,
    rate: Float32s, matrices: Float32s, inputs: Floats, values: Float32s, keys: Float32s,
    out: Float32s, rows: Int64s, kv_lens: Int64s, starts: Int64s, num_workers: int,
) -> None:  # fmt: skip
    for worker in range(num_workers):
        _convolve_share(
            channels, conv, bias, inputs, values, keys, rows, kv_lens, starts, worker, num_workers
        )
    for worker in range(num_workers):
        _advance_share(
            values, keys, skip, log_decay, rate, matrices, out, rows, kv_lens, starts,
            worker, num_workers,
        )  # fmt: skip


@njit(inline="always")
def _convolve_share(
    channels: Floats, conv: Float32s, bias: Float32s, inputs: Floats, values: Float32s,
    keys: Float32s, rows: Int64s, kv_lens: Int64s, starts: Int64s, worker: int, num_workers: int,
) -> None:  # fmt: skip
    """The share of one worker: every num_workers-th head of a row."""
    num_heads, value_dim = values.shape[0], values.shape[2]
    num_keys, key_dim = keys.shape[0], keys.shape[2]  # of keys, then of queries
    unit = 0
    for r in range(len(rows)):
        first, last, row = starts[r], starts[r + 1], rows[r]
        for head in range(num_heads + num_keys):
            unit += 1
            if unit % num_workers != worker:
                continue
            if head < num_heads:
                convolve_head(
                    channels[first:last], conv, bias, inputs[row], kv_lens[r], head * value_dim,
                    values[head, first:last],
                )  # fmt: skip
            else:
                key = head - num_heads
                convolve_head(
                    channels[first:last], conv, bias, inputs[row], kv_lens[r],
                    num_heads * value_dim + key * key_dim, keys[key, first:last],
                )  # fmt: skip


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy")
def convolve_head(
    channels: Floats, conv: Float32s, bias: Float32s, inputs: Floats, begin: int, first: int,
    target: Float32s,
) -> None:  # fmt: skip
    """target [tokens, n] = silu(bias + conv) of the n channels from `first` on of one row, as in
    delta_rule.py."""
    num_tokens, size = target.shape
    for token in range(num_tokens):
        for c in range(size):
            target[token, c] = bias[first + c]
    add_conv(channels, conv, inputs, begin, first, target)


@njit(inline="always")
def _advance_share(
    values: Float32s, keys: Float32s, skip: Float32s, log_decay: Float32s, rate: Float32s,
    matrices: Float32s, out: Float32s, rows: Int64s, kv_lens: Int64s, starts: Int64s,
    worker: int, num_workers: int,
) -> None:  # fmt: skip
    num_heads, num_keys = values.shape[0], keys.shape[0] // 2
    unit = 0
    for r in range(len(rows)):
        first, last, row = starts[r], starts[r + 1], rows[r]
        for head in range(num_heads):
            unit += 1
            if unit % num_workers != worker:
                continue
            key = head // (num_heads // num_keys)
            advance_space_head(
                keys[num_keys + key, first:last], keys[key, first:last], values[head, first:last],
                log_decay[first:last], rate[first:last], matrices[row], out[first:last],
                kv_lens[r], head, skip[head],
            )  # fmt: skip


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy")
def advance_space_head(
    q: Float32s, k: Float32s, v: Float32s, log_decay: Float32s, rate: Float32s,
    matrices: Float32s, out: Float32s, begin: int, head: int, skip: np.float32,
) -> None:  # fmt: skip
    """Advances one head of values of one row, of which the first token has the position `begin`."""
    num_tokens, key_dim = k.shape
    num_places, value_dim = matrices.shape[0], matrices.shape[3]
    block = scratch((key_dim * BLOCK,), FLOAT32_LIKE)
    for first in range(0, value_dim, BLOCK):
        if begin == 0:
            block[:] = np.float32(0)
        else:
            load_block(matrices[begin % num_places, head], first, block)
        for token in range(num_tokens):
            decay = power_of_two(np.float32(LOG2_E) * log_decay[token, head])
            _apply_space(
                block, q[token], k[token], v[token, first : first + BLOCK],
                out[token, head, first : first + BLOCK], decay, rate[token, head], skip,
            )  # fmt: skip
            if token >= num_tokens - num_places:
                store_block(block, matrices[(begin + token + 1) % num_places, head], first)


@njit(inline="always")
def _apply_space(
    block: Float32s, q: Float32s, k: Float32s, v: Float32s, out: Float32s,
    decay: np.float32, rate: np.float32, skip: np.float32,
) -> None:  # fmt: skip
    """Applies one token to a block of columns, [d_k, BLOCK], flat."""
    v0, v1, rates, skips = load(v, 0), load(v, LANES), splat(rate), splat(skip)
    change0, change1 = fma(zeros(), v0, rates), fma(zeros(), v1, rates)
    y0, y1, kept = fma(zeros(), v0, skips), fma(zeros(), v1, skips), splat(decay)
    for i in range(len(k)):
        key, query = splat(k[i]), splat(q[i])
        state0 = fma(fma(zeros(), load(block, i * BLOCK), kept), change0, key)
        state1 = fma(fma(zeros(), load(block, i * BLOCK + LANES), kept), change1, key)
        store(state0, block, i * BLOCK)
        store(state1, block, i * BLOCK + LANES)
        y0, y1 = fma(y0, state0, query), fma(y1, state1, query)
    store(y0, out, 0)
    store(y1, out, LANES)
