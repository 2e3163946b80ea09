"""Weights of the softmax in bfloat16, against powers of two in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from aserve_kernels.cpu.processor import HAS_AVX512_BF16
from aserve_kernels.cpu.simd import LANES, reduce_max, reduce_sum
from aserve_kernels.cpu.softmax_weights import MIN_EXPONENT, store_weights


def weigh_all(
    scores: npt.NDArray[np.float32], factor: np.float32, row_max: np.float32
) -> tuple[npt.NDArray[np.uint16], np.float32, np.float32]:
    weights = np.zeros(len(scores), np.uint16)
    total, greatest = np.float32(0), np.float32(0)
    for start in range(0, len(scores), LANES):
        exact = store_weights(scores, start, factor, row_max, weights)
        total += reduce_sum(exact)
        greatest = max(greatest, reduce_max(exact))
    return weights, total, greatest


# Other processors have the plain function alone.
weigh = njit()(weigh_all) if HAS_AVX512_BF16 else weigh_all


def test_weights_are_powers_of_two_next_to_the_exact_ones() -> None:
    scores = np.random.default_rng(0).normal(0, 40, 64 * LANES).astype(np.float32)
    factor = np.float32(0.37)
    row_max = np.float32(factor * scores.max())
    weights, total, greatest = weigh(scores, factor, row_max)
    exact = np.exp2(np.float64(factor) * scores - np.float64(row_max))
    got = torch.from_numpy(weights).view(torch.bfloat16).double().numpy()
    np.testing.assert_allclose(got, exact, rtol=2**-8, atol=2.0**-120)
    np.testing.assert_allclose(total, exact.sum(), rtol=1e-5)
    np.testing.assert_allclose(greatest, 1, rtol=1e-5)


def test_masked_scores_weigh_nothing_and_nan_is_seen() -> None:
    scores = np.full(LANES, -np.inf, np.float32)
    scores[3], scores[4] = 0, 2 * MIN_EXPONENT
    weights, total, _ = weigh(scores, np.float32(1), np.float32(0))
    got = torch.from_numpy(weights).view(torch.bfloat16)
    assert got.tolist() == [0.0] * 3 + [1.0] + [0.0] * 12
    assert total == 1
    scores[9] = np.nan
    weights, total, _ = weigh(scores, np.float32(1), np.float32(0))
    assert torch.from_numpy(weights).view(torch.bfloat16).isnan().nonzero().tolist() == [[9]]
    assert np.isnan(total)
