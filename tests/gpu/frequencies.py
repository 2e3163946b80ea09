"""How often tokens are drawn, against how probable they are."""

from __future__ import annotations

import math

import numpy as np

from aserve.messages.step import RowInit
from tests.gpu.naive_sampler import Floats, naive_set

FEW = 10


def naive_probs(processed: Floats, init: RowInit) -> Floats:
    """The probability of each token, from processed logits [vocab]."""
    scaled = processed / init.temperature
    members = sorted(naive_set(scaled, init))
    probs = np.zeros_like(scaled)
    probs[members] = np.exp(scaled[members] - scaled.max())
    return probs / probs.sum()


def assert_frequencies(counts: np.ndarray, probs: np.ndarray) -> None:
    """Each cell was drawn as often as it is probable, and none that has no probability. Rare cells
    count as one, because a sum of squares says little of them."""
    assert counts[probs == 0].sum() == 0
    expected = counts.sum() * probs
    is_rare = expected < FEW
    found, expected = (
        np.append(each[~is_rare], each[is_rare].sum()) for each in (counts, expected)
    )
    is_possible = expected > 0
    difference = ((found - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    assert difference < _bound(int(is_possible.sum()) - 1)


def _bound(freedom: int) -> float:
    """Exceeded once in 30,000 (Wilson and Hilferty, 4 sigma)."""
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + 4 * math.sqrt(part)) ** 3)
