"""The coupled draw over whole rows of logits: the argmax of logits / temperature plus noise that
belongs to (seed, position, token id). A temperature of 0 has no noise.

It knows no step. The noise is that of `aserve/gpu/sampling/gumbel.py`, SplitMix64 and Gumbel's
distribution, but in float32's last digits.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s
from aserve_kernels.cpu.exp2 import LOG2_E, power_of_two
from aserve_kernels.cpu.precompile import cached_njit, compile_ahead

Int64s: TypeAlias = npt.NDArray[np.int64]

GAMMA = np.uint64(0x9E3779B97F4A7C15)
GAMMA_OF_POSITIONS = np.uint64(0xC6A4A7935BD1E995)
FACTOR_A = np.uint64(0xBF58476D1CE4E5B9)
FACTOR_B = np.uint64(0x94D049BB133111EB)
SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32))
MAX_U = np.float32(1 - 2.0**-24)
PART_OF_WORD = np.float32(2.0**-32)
# Noise is at most -log(u), so a token whose u is above exp(its score - the best sum) can't win.
SLACK = np.float32(0.01)  # of what is rounded on the way
CHUNK = 512
# Bits of a float32 that are ordered like it, as int32.
LEAST = np.int32(-2139095041)  # of minus infinity
MOST = np.int32(0x7F800000)  # of infinity; beyond either is NaN


def draw(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """logits float32 [n, vocab], on the CPU; seeds, positions int64 [n], temperatures float32 [n]
    -> tokens int64 [n], and bool [n]: False where a logit is NaN or infinity, or all are minus
    infinity; then the token is any."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    is_valid = torch.empty(len(logits), dtype=torch.bool)
    of_rows = (seeds.contiguous().numpy(), positions.contiguous().numpy())
    scales = temperatures.contiguous().numpy()
    _draw(logits.contiguous().numpy(), *of_rows, scales, tokens.numpy(), is_valid.numpy())
    return tokens, is_valid


def compile_draw() -> None:
    """Or read from the cache of an earlier process. Calls compile nothing."""
    longs, floats = types.Array(types.int64, 1, "C"), types.Array(types.float32, 1, "C")
    of_rows = (longs, longs, floats, longs, types.Array(types.boolean, 1, "C"))
    compile_ahead(_draw, types.Array(types.float32, 2, "C"), *of_rows)


@cached_njit(nogil=True)
def _draw(
    logits: Float32s, seeds: Int64s, positions: Int64s, temperatures: Float32s,
    tokens: Int64s, is_valid: npt.NDArray[np.bool_],
) -> None:  # fmt: skip
    for row in range(logits.shape[0]):
        tokens[row], is_valid[row] = draw_row(
            logits[row], seeds[row], positions[row], temperatures[row]
        )


@njit(nogil=True)
def draw_row(
    logits: Float32s, seed: int, position: int, temperature: np.float32
) -> tuple[int, bool]:
    token, is_valid = _best(logits)
    if not is_valid or not temperature > 0:
        return token, is_valid
    start = _mixed(_mixed(np.uint64(seed)) + np.uint64(position) * GAMMA_OF_POSITIONS)
    return _noisy_best(logits, temperature, start, token), True


@njit(nogil=True)
def _best(logits: Float32s) -> tuple[int, bool]:
    """The first of the greatest, and whether one can be drawn."""
    least, most = MOST, LEAST
    for i in range(logits.shape[0]):
        key = _key(logits[i])
        least, most = min(least, key), max(most, key)
    if least < LEAST or most >= MOST or most == LEAST:
        return 0, False
    for i in range(logits.shape[0]):
        if _key(logits[i]) == most:
            return i, True
    return 0, False


@njit(inline="always")
def _key(value: np.float32) -> np.int32:
    """PERF: the greatest of floats is found one by one, of integers sixteen at a time."""
    bits = np.float32(value + np.float32(0)).view(np.int32)  # of one zero, not of two
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True, error_model="numpy")
def _noisy_best(logits: Float32s, temperature: np.float32, start: np.uint64, first: int) -> int:
    """`first` is the greatest logit: what it comes to leaves few others to look at."""
    best, best_sum = first, np.float32(logits[first] / temperature + _noise(_part(start, first)))
    parts, bounds = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    for low in range(0, logits.shape[0], CHUNK):
        size = min(CHUNK, logits.shape[0] - low)
        num_near = 0
        for i in range(size):
            behind = logits[low + i] / temperature - best_sum + SLACK
            bounds[i] = power_of_two(min(np.float32(0), behind * np.float32(LOG2_E)))
        for i in range(size):
            parts[i] = _part(start, low + i)
            num_near += parts[i] <= bounds[i]
        if num_near == 0:
            continue
        for i in range(size):
            if parts[i] <= bounds[i]:
                noisy = np.float32(logits[low + i] / temperature + _noise(parts[i]))
                if noisy > best_sum or (noisy == best_sum and low + i < best):
                    best, best_sum = low + i, noisy
    return best


@njit(inline="always")
def _part(start: np.uint64, token_id: int) -> np.float32:
    """u, between 0 and 1."""
    word = _mixed(start + np.uint64(token_id) * GAMMA) >> SHIFTS[3]
    return min(np.float32(np.float32(word) + np.float32(0.5)) * PART_OF_WORD, MAX_U)


@njit(inline="always")
def _noise(part: np.float32) -> np.float32:
    return np.float32(-np.float32(math.log(-np.float32(math.log1p(-part)))))


@njit(inline="always")
def _mixed(x: np.uint64) -> np.uint64:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> SHIFTS[0])) * FACTOR_A
    x = (x ^ (x >> SHIFTS[1])) * FACTOR_B
    return x ^ (x >> SHIFTS[2])
