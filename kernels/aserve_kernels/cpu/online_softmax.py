"""An online softmax in powers of two (Milakov and Gimelshein, 2018), for kernels that attend.

It knows no page and no dtype but float32.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s
from aserve_kernels.cpu.exp2 import LOG2_E, power_of_two
from aserve_kernels.cpu.simd import LANES, greater, greatest, load, splat


def folded(scale: float, softcap: float | None) -> tuple[float, float]:
    """What queries are multiplied with and scores are capped by (0: by nothing), so that weights
    are powers of two."""
    if softcap is None:
        return scale * LOG2_E, 0.0
    return scale / softcap, softcap * LOG2_E


@njit(inline="always")
def weigh(
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
    # PERF: a loop of max is taken one by one, since it must answer for NaN.
    lanes = splat(softmax[line, 0])
    for j in range(0, stop, LANES):
        lanes = greater(load(scores, j), lanes)
    most = greatest(lanes)
    shrink = power_of_two(softmax[line, 0] - most)
    added = np.float32(0)
    for j in range(stop):
        scores[j] = power_of_two(scores[j] - most)
        added += scores[j]
    softmax[line, 0] = most
    softmax[line, 1] = softmax[line, 1] * shrink + added
    return shrink
