"""Powers that loops of compiled code can take in vectors: libm's exp is a call, and no loop around
one is vectorised.

It knows no operation.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

LOG2_E = 1.4426950408889634
LEAST_EXPONENT = np.float32(-126)  # of a float32 that is not subnormal
# 2^f for |f| <= 1/2 as its Taylor series, ln(2)^k / k!: exact to float32's rounding.
C1, C2, C3, C4, C5, C6 = (
    np.float32(math.log(2) ** power / math.factorial(power)) for power in range(1, 7)
)


@njit(inline="always")
def power_of_two(exponent: np.float32) -> np.float32:
    """Of an exponent that is not above 0."""
    clamped = max(LEAST_EXPONENT, exponent)
    whole = np.floor(clamped + np.float32(0.5))
    f = clamped - whole
    part = f * (C3 + f * (C4 + f * (C5 + f * C6)))
    fraction = np.float32(1) + f * (C1 + f * (C2 + part))
    power: np.float32 = np.int32(np.int32(np.int32(whole) + 127) << 23).view(np.float32)
    return np.float32(fraction * power)
