"""Draws tokens from processed logits, and edits logits before: sampling's formulas on MLX arrays.

They are those of sampling/{draw,gumbel,top_k_top_p,penalties,token_masks}.py, which explain them. A
draw depends on (seed, position, token id) in the same way, so a request gets the tokens that torch
gives it, except where the last digits of the logits decide.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from aserve.gpu.mlx.arrays import Floats, floats, ints
from aserve.gpu.sampling.plan import LogitBiases
from aserve.gpu.transfer.staging import ArrayI64
from aserve.messages.base import MASK_BITS, ArrayI32
from aserve_kernels import splitmix64


def gumbel_noise(
    seeds: ArrayI64, positions: ArrayI32, vocab_size: int, dtype: mx.Dtype
) -> mx.array:
    """seeds, positions [n] -> [n, vocab]: g = -log(-log1p(-u)), as sampling/gumbel.py has it."""
    starts = _mix(_mix(_bits(seeds)) + _bits(positions) * _word(splitmix64.POSITION_FACTOR))
    counters = mx.arange(vocab_size, dtype=mx.uint64) * _word(splitmix64.GAMMA)
    k = _mix(starts[:, None] + counters) >> _word(32)
    u = mx.minimum((k.astype(dtype) + 0.5) * 2.0**-32, splitmix64.MAX_U)
    return -mx.log(-mx.log1p(-u))


def _mix(x: mx.array) -> mx.array:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> _word(30))) * _word(splitmix64.FACTOR_A)
    x = (x ^ (x >> _word(27))) * _word(splitmix64.FACTOR_B)
    return x ^ (x >> _word(31))


def _word(value: int) -> mx.array:
    """NOTE: a Python integer above 2^63 has no conversion to an MLX array."""
    return mx.array(np.array(value, np.uint64))


def _bits(values: ArrayI64 | ArrayI32) -> mx.array:
    return mx.array(values.astype(np.int64).view(np.uint64))


def choose(
    scaled: mx.array, noisy: mx.array, *, top_k: ArrayI64, top_p: Floats, min_p: Floats
) -> mx.array:
    """scaled, noisy [n, vocab], filters [n] -> token ids [n]: the argmax of `noisy` among the
    tokens that top-k, top-p and min-p leave. One stable sort serves all three.
    """
    vocab_size, dtype = scaled.shape[1], scaled.dtype
    order = mx.argsort(-scaled, axis=1)
    ranked = mx.take_along_axis(mx.softmax(scaled, axis=1), order, axis=1)
    mass = mx.cumsum(ranked, axis=1)
    count = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    kept = mx.take_along_axis(mass, ints(count - 1)[:, None], axis=1)
    kept = mx.where(ints(count)[:, None] < vocab_size, kept, 1.0)
    limit = floats(np.where(top_p < 1, top_p, np.inf), dtype)[:, None] * kept
    is_in = (
        (mx.arange(vocab_size) < ints(count)[:, None])
        & (mass - ranked < limit)
        & (ranked >= floats(min_p, dtype)[:, None] * ranked[:, :1])
    )
    drawn = mx.where(is_in, mx.take_along_axis(noisy, order, axis=1), -mx.inf)
    best = drawn.argmax(axis=1, keepdims=True)
    return mx.take_along_axis(order, best, axis=1)[:, 0]


def add_biases(logits: mx.array, biases: LogitBiases, lens: ArrayI32) -> mx.array:
    """lens [n]: tokens of each logits row before the one to sample."""
    indices, token_ids = np.array(biases.indices), np.array(biases.token_ids)
    is_on = lens[indices] < np.array(biases.until)
    values = floats(np.array(biases.values)[is_on], logits.dtype)
    return logits.at[ints(indices[is_on]), ints(token_ids[is_on])].add(values)


def penalise(
    logits: mx.array, history: mx.array, is_real: mx.array, is_output: mx.array, params: Floats
) -> mx.array:
    """logits [n, vocab]; history int32 [n, len] with two masks of its tokens; params [n, 3]:
    presence, frequency and repetition penalties -> [n, vocab]"""
    rows = mx.broadcast_to(mx.arange(history.shape[0])[:, None], history.shape)
    none = mx.zeros(logits.shape, mx.int32)
    seen = none.at[rows, history].add(is_real.astype(mx.int32))
    outputs = none.at[rows, history].add(is_output.astype(mx.int32))
    presence, frequency, repetition = (
        floats(column, logits.dtype)[:, None] for column in np.ascontiguousarray(params.T)
    )
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    penalised = mx.where(seen > 0, repeated, logits)
    penalised = penalised - outputs.astype(logits.dtype) * frequency
    return penalised - (outputs > 0).astype(logits.dtype) * presence


def allow(logits: mx.array, mask: mx.array) -> mx.array:
    """mask int32 [n, words]: one bit per token, which is set for allowed tokens."""
    token_ids = mx.arange(logits.shape[1])
    bits = mask[:, token_ids // MASK_BITS] >> (token_ids % MASK_BITS)
    return mx.where((bits & 1) == 1, logits, -mx.inf)
