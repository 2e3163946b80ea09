"""Gumbel-max sampling of whole rows of logits on the CPU, without filters.

    token = argmax_t  logits[t] / temperature + noise(seed, position, t)

splitmix64.py has the formulas of the noise; it equals that of aserve/gpu/sampling/gumbel.py but for
float32's last digits. A temperature of 0 is greedy.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, types
from torch import Tensor

from aserve_kernels import splitmix64
from aserve_kernels.cpu.bf16 import Float32s
from aserve_kernels.cpu.exp2 import LOG2_E, power_of_two
from aserve_kernels.cpu.precompile import cached_njit, compile_ahead

Int64s: TypeAlias = npt.NDArray[np.int64]

GAMMA = np.uint64(splitmix64.GAMMA)
POSITION_FACTOR = np.uint64(splitmix64.POSITION_FACTOR)
FACTOR_A = np.uint64(splitmix64.FACTOR_A)
FACTOR_B = np.uint64(splitmix64.FACTOR_B)
SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32))
MAX_U = np.float32(splitmix64.MAX_U)
TWO_TO_MINUS_32 = np.float32(2.0**-32)
# Noise is at max_key -log(u), so a token whose u is above exp(score - best noisy score) cannot win.
SLACK = np.float32(0.01)  # added to that bound for rounding
CHUNK = 512
SAME_IDS = np.empty(0, np.int64)
# Keys of `_key`: int32 that compare like the floats. Keys beyond these two are NaN.
MINUS_INFINITY_KEY = np.int32(-2139095041)
INFINITY_KEY = np.int32(0x7F800000)


def draw(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the tokens, int64 [n], and whether each is valid, bool [n].

    logits float32 [n, vocab] on the CPU; seeds and positions int64 [n]; temperatures float32 [n]. A
    row is invalid if a logit is NaN or plus infinity, or if all are minus infinity.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64)
    is_valid = torch.empty(len(logits), dtype=torch.bool)
    of_rows = (seeds.contiguous().numpy(), positions.contiguous().numpy())
    scales = temperatures.contiguous().numpy()
    _draw(logits.contiguous().numpy(), *of_rows, scales, tokens.numpy(), is_valid.numpy())
    return tokens, is_valid


def compile_draw() -> None:
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
            logits[row], seeds[row], positions[row], temperatures[row], SAME_IDS
        )


@njit(nogil=True)
def draw_row(
    logits: Float32s, seed: int, position: int, temperature: np.float32, token_ids: Int64s
) -> tuple[int, bool]:
    """logits [n] of the tokens `token_ids` [n], or, if there are no such ids, of tokens 0 to n."""
    index, is_valid = _argmax(logits)
    if is_valid and temperature > 0:
        start = _mix(_mix(np.uint64(seed)) + np.uint64(position) * POSITION_FACTOR)
        index = _noisy_argmax(logits, temperature, start, index, token_ids)
    return index if token_ids.shape[0] == 0 else token_ids[index], is_valid


@njit(nogil=True)
def _argmax(logits: Float32s) -> tuple[int, bool]:
    """Returns the token id of the first largest logit, and whether the row is valid."""
    min_key, max_key = INFINITY_KEY, MINUS_INFINITY_KEY
    for i in range(logits.shape[0]):
        key = _key(logits[i])
        min_key, max_key = min(min_key, key), max(max_key, key)
    if min_key < MINUS_INFINITY_KEY or max_key >= INFINITY_KEY or max_key == MINUS_INFINITY_KEY:
        return 0, False
    for i in range(logits.shape[0]):
        if _key(logits[i]) == max_key:
            return i, True
    return 0, False


@njit(inline="always")
def _key(value: np.float32) -> np.int32:
    """PERF: LLVM vectorises the maximum of integers, but not that of floats."""
    bits = np.float32(value + np.float32(0)).view(np.int32)  # -0 as 0, so that they compare equal
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True, error_model="numpy")
def _noisy_argmax(
    logits: Float32s, temperature: np.float32, start: np.uint64, first: int, token_ids: Int64s
) -> int:
    """PERF: `first` has the largest logit. Its noisy score bounds u of all tokens that can still
    win, so the logarithms of the noise are computed for few tokens."""
    is_mapped = token_ids.shape[0] > 0
    first_id = token_ids[first] if is_mapped else first
    noise = _noise(_uniform(start, first_id))
    best, best_score = first, np.float32(logits[first] / temperature + noise)
    uniforms, bounds = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    for low in range(0, logits.shape[0], CHUNK):
        size = min(CHUNK, logits.shape[0] - low)
        num_possible = 0
        for i in range(size):
            exponent = logits[low + i] / temperature - best_score + SLACK
            bounds[i] = power_of_two(min(np.float32(0), exponent * np.float32(LOG2_E)))
        for i in range(size):
            uniforms[i] = _uniform(start, token_ids[low + i] if is_mapped else low + i)
            num_possible += uniforms[i] <= bounds[i]
        if num_possible == 0:
            continue
        for i in range(size):
            if uniforms[i] <= bounds[i]:
                noisy = np.float32(logits[low + i] / temperature + _noise(uniforms[i]))
                if noisy > best_score or (noisy == best_score and low + i < best):
                    best, best_score = low + i, noisy
    return best


@njit(inline="always")
def _uniform(start: np.uint64, token_id: int) -> np.float32:
    """u of this token, in (0, 1)."""
    word = _word(start, token_id)
    return min(np.float32(np.float32(word) + np.float32(0.5)) * TWO_TO_MINUS_32, MAX_U)


@njit(nogil=True)
def first_word(seed: int, position: int, token_id: int) -> np.uint64:
    """Returns the 32 random bits of which the noise of this token is made."""
    return _word(_mix(_mix(np.uint64(seed)) + np.uint64(position) * POSITION_FACTOR), token_id)


@njit(inline="always")
def _word(start: np.uint64, token_id: int) -> np.uint64:
    return _mix(start + np.uint64(token_id) * GAMMA) >> SHIFTS[3]


@njit(inline="always")
def _noise(u: np.float32) -> np.float32:
    return np.float32(-np.float32(math.log(-np.float32(math.log1p(-u)))))


@njit(inline="always")
def _mix(x: np.uint64) -> np.uint64:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> SHIFTS[0])) * FACTOR_A
    x = (x ^ (x >> SHIFTS[1])) * FACTOR_B
    return x ^ (x >> SHIFTS[2])
