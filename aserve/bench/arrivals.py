"""When the requests of a load begin: a rate, and how far the gaps between them scatter.

Same seed, same times. It does not know what a request is.
"""

from __future__ import annotations

import math

import numpy as np


def begin_times(count: int, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start, ascending. Gaps are drawn from a gamma distribution of mean
    1 / rate and shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is even.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), size=count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times
