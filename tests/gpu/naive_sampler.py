"""Sampling as one would explain it: one row, its whole history as a list, numpy and a sort.

It shares no code with aserve.gpu.sampling, the noise included.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from aserve.messages.step import RowInit

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]


def naive_logits(
    logits: Floats, history: Sequence[int], init: RowInit, allowed: Collection[int] | None = None
) -> Floats:
    """logits [vocab] after penalties, bias, mask and bans. `history` is prompt and outputs."""
    result = logits.copy()
    outputs = history[init.prompt_len :]
    for token in set(history):
        factor = 1 / init.repetition_penalty if result[token] > 0 else init.repetition_penalty
        result[token] *= factor
    for token in set(outputs):
        result[token] -= outputs.count(token) * init.frequency_penalty + init.presence_penalty
    for token, bias in init.logit_bias:
        result[token] += bias
    if len(history) < init.min_len:
        result[list(init.end_ids)] = -np.inf
    if allowed is not None:
        result[[token for token in range(len(result)) if token not in allowed]] = -np.inf
    banned = [
        last
        for *before, last in init.bad_word_ids
        if not before or outputs[-len(before) :] == before
    ]
    if init.allowed_ids:
        banned += [token for token in range(len(result)) if token not in init.allowed_ids]
    left = result.copy()
    left[banned] = -np.inf
    return left if np.isfinite(left).any() else result


def naive_token(processed: Floats, position: int, init: RowInit) -> int:
    if init.temperature == 0:
        return int(processed.argmax())
    scaled = processed / init.temperature
    noisy = scaled + naive_noise(init.seed, position, len(scaled))
    return max(sorted(naive_set(scaled, init)), key=lambda token: float(noisy[token]))


def naive_set(scaled: Floats, init: RowInit) -> set[int]:
    """Which tokens may be drawn: top_k first, top_p of what is left, then min_p. The most probable
    one always may.
    """
    ranked = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    kept = ranked[: init.top_k] if init.top_k else ranked
    weights = np.exp(scaled[kept] - scaled[kept[0]])
    probs = weights / weights.sum()
    before = np.cumsum(probs) - probs
    members = (before < init.top_p) if init.top_p < 1 else np.full(len(kept), True)
    members &= probs >= init.min_p * probs[0]
    members[0] = True
    return {token for token, is_in in zip(kept, members, strict=True) if is_in}


def naive_noise(seed: int, position: int, vocab_size: int) -> Floats:
    """Gumbel noise [vocab] of SplitMix64, in unsigned arithmetic."""
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed % 2**64], np.uint64))
        start = _mix(start + np.uint64(position) * np.uint64(0xC6A4A7935BD1E995))
        bits = _mix(start + np.arange(vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    u = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
    noise: Floats = -np.log(-np.log1p(-np.minimum(u, 1 - 2**-24)))
    return noise


def _mix(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
