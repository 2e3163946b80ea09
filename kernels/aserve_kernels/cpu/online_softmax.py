"""The online softmax (Milakov and Gimelshein, 2018) in powers of two, for the attention kernels.

The state of a query is row_max = the greatest score s so far, and row_sum = sum of 2^(s - row_max);
its output accumulates sum of 2^(s - row_max) v. A new tile with a greater maximum rescales both.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s
from aserve_kernels.cpu.exp2 import LOG2_E, power_of_two
from aserve_kernels.cpu.simd import LANES, load, maximum, reduce_max


def fold_log2(scale: float, softcap: float | None) -> tuple[float, float]:
    """Returns the factor of the queries and the cap of the scores (0 for none): the score is
    `factor * q k^T`, or `cap * tanh(factor * q k^T)`. log2(e) is folded in, so that weights are
    powers of two.
    """
    if softcap is None:
        return scale * LOG2_E, 0.0
    return scale / softcap, softcap * LOG2_E


@njit(inline="always")
def softmax_update(
    scores: Float32s, low: int, high: int, cap: np.float32,
    softmax: Float32s, query: int,
) -> np.float32:  # fmt: skip
    """Turns scores[low:high] into weights, in place, and updates the query's state.

    Scores outside low..high are masked, up to the next multiple of 16. `softmax[query]` is
    [row_max, row_sum]. Returns the factor that rescales the query's output so far.
    """
    if cap > 0:
        for j in range(low, high):
            scores[j] = cap * np.float32(math.tanh(scores[j]))
    for j in range(low):
        scores[j] = -np.inf
    stop = -(-high // LANES) * LANES
    for j in range(high, stop):
        scores[j] = -np.inf
    row_max = max(softmax[query, 0], greatest(scores[:stop]))
    rescale = power_of_two(softmax[query, 0] - row_max)
    added = np.float32(0)
    for j in range(stop):
        scores[j] = power_of_two(scores[j] - row_max)
        added += scores[j]
    softmax[query, 0] = row_max
    softmax[query, 1] = softmax[query, 1] * rescale + added
    return rescale


@njit(inline="always")
def output_scale(
    row_max: np.float32, row_sum: np.float32, sink: np.float32, value_scale: np.float32
) -> np.float32:
    """Returns the factor of a query's output after the last tile. A sink, which is -inf for none,
    joins the sum like the score of a key with the value zero."""
    if sink == -np.inf:
        return value_scale / row_sum
    excess = sink - row_max
    rescale = power_of_two(-max(np.float32(0), excess))
    return value_scale * rescale / (row_sum * rescale + power_of_two(min(np.float32(0), excess)))


@njit(inline="always")
def greatest(scores: Float32s) -> np.float32:
    """The maximum of a multiple of 16 scores.

    PERF: LLVM does not vectorise a loop of `max`, because of its rule for NaN.
    """
    maxima = load(scores, 0)
    for j in range(LANES, len(scores), LANES):
        maxima = maximum(load(scores, j), maxima)
    return reduce_max(maxima)
