"""Rejection sampling and block verification in the compiled steps: the draws of drafts whose
distributions are kept, and the verification of a draft or a window. aserve/gpu/spec/rejection.py
has the theory, and does the same with torch.

    draft  x ~ q = softmax(draft logits / T), with the noise of (window seed, position)
    token  x, if u q(x) < p(x), with p = softmax(logits / T) and u of (window seed, position)
           otherwise a draw from max(p - q, 0), with the noise of (seed, position)
    block  the drafts up to the last node i with u_i < h_i, then a draw from max(r_i p_i - q_i, 0)

A model record without a table of distributions (draft_probs 0) is that of a mode whose draws are
coupled: drafts and tokens are then drawn with the noise of (seed, position).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s
from aserve_kernels.cpu.decoder_layers import NO_IDS
from aserve_kernels.cpu.draw import GAMMA, Int64s, draw_row, first_word
from aserve_kernels.cpu.exp2 import LOG2_E, power_of_two
from aserve_kernels.cpu.memory import FLOAT32_LIKE, FLOAT64_LIKE, array_at
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT

NEVER = np.float32(1e-37)  # a weight with which no token is drawn beside those of a residual
NO_DRAFT = -1


@njit(nogil=True)
def draw_draft(logits: Float32s, row: int, position: int, root: int, model: Any) -> int:
    """Draws the draft for a position behind the root of its window, and keeps its distribution."""
    seed, temperature = _params_of(row, model)
    token_ids = NO_IDS
    if model.token_ids != 0:
        token_ids = array_at(model.token_ids, (model.vocab,), NO_IDS)
    if model.draft_probs == 0 or temperature <= 0:
        return draw_row(logits, seed, position, temperature, token_ids)[0]
    probs = _probs_of(row, position - root - 1, model)
    if token_ids.shape[0] == 0:
        _softmax(logits, temperature, probs)
    else:
        own = np.empty_like(logits)
        _softmax(logits, temperature, own)
        probs[:] = 0
        for i in range(own.shape[0]):
            probs[token_ids[i]] = own[i]
    return draw_row(logits, _window_seed(seed, root), position, temperature, token_ids)[0]


@njit(nogil=True)
def draw_verified(
    logits: Float32s, row: int, position: int, root: int, draft: int, model: Any
) -> tuple[int, bool]:
    """Draws the token of a window's node, which is the draft after it, if that is accepted. `draft`
    is NO_DRAFT behind the last one. Also returns whether the row is valid."""
    seed, temperature = _params_of(row, model)
    place = position - root - 1
    is_plain = model.draft_probs == 0 or temperature <= 0 or draft == NO_DRAFT
    if is_plain or place >= model.probs_drafts:
        return draw_row(logits, seed, position, temperature, NO_IDS)
    q = _probs_of(row, place, model)
    largest, is_valid = draw_row(logits, seed, position, np.float32(0), NO_IDS)
    if not is_valid:
        return largest, False
    if q[draft] <= 0:  # it was proposed with certainty
        return draw_row(logits, seed, position, temperature, NO_IDS)
    p = np.empty_like(logits)
    _softmax(logits, temperature, p)
    if _coin(seed, root, position) * q[draft] < p[draft]:
        return draft, True
    _to_residual(p, q, np.float32(1))
    _to_logits(p, temperature)
    return draw_row(p, seed, position, temperature, NO_IDS)[0], True


@njit(nogil=True)
def is_random_window(row: int, first_draft: int, model: Any) -> bool:
    """Whether the drafts of a window were drawn from distributions that are kept. Drafts that were
    proposed with certainty are so for a whole window."""
    if model.draft_probs == 0 or _params_of(row, model)[1] <= 0:
        return False
    return bool(_probs_of(row, 0, model)[first_draft] > 0)


@njit(nogil=True)
def keep_target_probs(logits: Float32s, row: int, model: Any, p: Float32s) -> None:
    """Writes the target's distribution after a node to p, or zeros where the logits are invalid."""
    p[:] = 0
    if draw_row(logits, 0, 0, np.float32(0), NO_IDS)[1]:
        _softmax(logits, _params_of(row, model)[1], p)


@njit(nogil=True)
def draw_block(
    p: Float32s, drafts: Int64s, row: int, root: int, model: Any
) -> tuple[int, int, bool]:
    """Verifies a window with the distributions p [1 + drafts, vocab]. Returns how many drafts are
    accepted, the token after them, and whether a token is possible there. Changes p."""
    seed, temperature = _params_of(row, model)
    num = drafts.shape[0]
    factor, last, last_factor = np.float32(1), 0, np.float32(1)
    for place in range(num + 1):
        chance, next_factor = factor, np.float32(0)
        if place < num:
            q, draft = _probs_of(row, place, model), drafts[place]
            if q[draft] > 0 and p[place].max() > 0:
                chance = _chance_to_end(p[place], q, factor)
                next_factor = min(np.float32(1), factor * p[place, draft] / q[draft])
        if place > 0 and _coin(seed, root, root + 1 + place) < chance:
            last, last_factor = place, factor
        factor = next_factor
    chosen = p[last]
    is_valid = chosen.max() > 0
    if last < num and _probs_of(row, last, model)[drafts[last]] > 0:
        _to_residual(chosen, _probs_of(row, last, model), last_factor)
    _to_logits(chosen, temperature)
    token = draw_row(chosen, seed, root + 1 + last, temperature, NO_IDS)[0]
    return last, token, is_valid


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", **NO_REFCOUNT)
def _chance_to_end(p: Float32s, q: Float32s, factor: np.float32) -> np.float32:
    """Returns h = s / (s + 1 - r), with r the factor and s the mass of max(r p - q, 0)."""
    if factor >= 1:
        return np.float32(1)
    mass = np.float32(0)
    for i in range(p.shape[0]):
        mass += max(factor * p[i] - q[i], np.float32(0))
    return mass / (mass + np.float32(1) - factor)


@njit(inline="always")
def _coin(seed: int, root: int, position: int) -> float:
    word = first_word(_window_seed(seed, root), position, NO_DRAFT)
    return float((np.float64(word) + 0.5) * 2.0**-32)


@njit(inline="always")
def _params_of(row: int, model: Any) -> tuple[int, np.float32]:
    """Returns the seed and the temperature of a row."""
    seeds = array_at(model.seeds, (model.table_rows, model.seed_columns), NO_IDS)
    scales = array_at(
        model.temperatures, (model.table_rows, model.temperature_columns), FLOAT64_LIKE
    )
    return seeds[row, 0], np.float32(scales[row, 0])


@njit(inline="always")
def _probs_of(row: int, place: int, model: Any) -> Float32s:
    """Returns the distribution of a draft of the row, [vocabulary of the target]."""
    shape = (model.table_rows, model.probs_drafts, model.probs_vocab)
    probs: Float32s = array_at(model.draft_probs, shape, FLOAT32_LIKE)[row, place]
    return probs


@njit(inline="always")
def _window_seed(seed: int, root: int) -> int:
    return int(np.uint64(seed) + np.uint64(root + 1) * GAMMA)


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", **NO_REFCOUNT)
def _softmax(logits: Float32s, temperature: np.float32, out: Float32s) -> None:
    largest, total = np.float32(-np.inf), np.float32(0)
    for i in range(logits.shape[0]):
        largest = max(largest, logits[i])
    factor = np.float32(LOG2_E) / temperature
    for i in range(logits.shape[0]):
        out[i] = power_of_two((logits[i] - largest) * factor)
        total += out[i]
    for i in range(logits.shape[0]):
        out[i] /= total


@njit(nogil=True)
def _to_residual(p: Float32s, q: Float32s, factor: np.float32) -> None:
    """Replaces p by max(factor p - q, 0), if rounding leaves something of it."""
    is_left = False
    for i in range(p.shape[0]):
        is_left |= factor * p[i] > q[i]
    if is_left:
        for i in range(p.shape[0]):
            p[i] = max(factor * p[i] - q[i], np.float32(0))


@njit(nogil=True)
def _to_logits(weights: Float32s, temperature: np.float32) -> None:
    for i in range(weights.shape[0]):
        weights[i] = np.float32(math.log(max(weights[i], NEVER))) * temperature
