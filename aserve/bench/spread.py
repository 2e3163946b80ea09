"""The numbers that stand for many: median, percentile, and how far the repeats lie apart.

It does not know what was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median: 0.1 says that the repeats agree within a tenth."""
    return (max(values) - min(values)) / statistics.median(values)
