"""2^x in float32 that LLVM can vectorise.

WHY: libm's exp is a function call, and LLVM vectorises no loop around one.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

LOG2_E = 1.4426950408889634
MIN_EXPONENT = np.float32(-126)  # of a normal float32
# The Taylor coefficients ln(2)^k / k! of 2^f: for |f| <= 1/2, exact to float32's rounding.
C1, C2, C3, C4, C5, C6 = (
    np.float32(math.log(2) ** power / math.factorial(power)) for power in range(1, 7)
)


@njit(inline="always")
def power_of_two(exponent: np.float32) -> np.float32:
    """2^exponent, for an exponent of at most 0: 2^floor(x + 1/2) from the bits, times 2^f."""
    clamped = max(MIN_EXPONENT, exponent)
    whole = np.floor(clamped + np.float32(0.5))
    f = clamped - whole
    tail = f * (C3 + f * (C4 + f * (C5 + f * C6)))
    fraction = np.float32(1) + f * (C1 + f * (C2 + tail))
    power: np.float32 = np.int32(np.int32(np.int32(whole) + 127) << 23).view(np.float32)
    return np.float32(fraction * power)
