"""When requests begin: the mean is the rate, and burstiness moves the scatter alone."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from aserve.bench.load import arrival_times


def gaps(*, burstiness: float) -> list[float]:
    times = arrival_times(20_000, rate=50.0, burstiness=burstiness, seed=3)
    return [float(gap) for gap in np.diff([0.0, *times])]


def test_without_a_rate_everything_begins_at_once() -> None:
    assert arrival_times(3, rate=math.inf, burstiness=1.0, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_gaps_have_the_mean_of_the_rate_and_the_scatter_of_the_shape(burstiness: float) -> None:
    drawn = gaps(burstiness=burstiness)
    assert min(drawn) >= 0
    assert statistics.fmean(drawn) == pytest.approx(1 / 50, rel=0.05)
    variation = statistics.stdev(drawn) / statistics.fmean(drawn)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_the_same_seed_gives_the_same_times() -> None:
    first, same, other = (
        arrival_times(5, rate=1.0, burstiness=1.0, seed=seed) for seed in (1, 1, 2)
    )
    assert first == same
    assert first != other
