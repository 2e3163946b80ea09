"""fp8 for numba, which has no such type: arrays of uint8 hold its bits.

The format is E4M3 of the OCP 8-bit Floating Point Specification (2023), torch.float8_e4m3fn: a
sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa, no infinity, and one NaN.
"""

from __future__ import annotations

import numpy as np
from numba import njit

MAGNITUDE = np.uint32(0x7F)  # of an element; this very value is NaN
GREATEST = 448.0
MANTISSA_SHIFT = np.uint32(20)  # bits of float32's mantissa beyond those of fp8
BIAS = np.uint32((127 - 7) << 3)  # between the exponents of float32 and fp8, in last bits of fp8
LEAST_NORMAL = np.float32(2**-6)
SUBNORMAL_STEP = np.float32(2**-9)


@njit(inline="always")
def from_fp8(bits: np.uint8) -> np.float32:
    magnitude = np.uint32(bits) & MAGNITUDE
    normal = np.uint32((magnitude + BIAS) << MANTISSA_SHIFT).view(np.float32)
    value = normal if magnitude >= np.uint32(8) else np.float32(magnitude) * SUBNORMAL_STEP
    value = np.float32(np.nan) if magnitude == MAGNITUDE else value
    return np.float32(-value) if np.uint32(bits) > MAGNITUDE else np.float32(value)


@njit(inline="always")
def fp8_bits(value: np.float32) -> np.uint8:
    """Rounds to the nearest, ties to even. What is beyond the greatest element becomes that."""
    word = np.float32(value).view(np.uint32)
    sign = np.uint32(word >> np.uint32(24)) & np.uint32(0x80)
    size = np.float32(min(np.abs(np.float32(value)), np.float32(GREATEST)))
    bits = size.view(np.uint32)
    to_even = (bits >> MANTISSA_SHIFT) & np.uint32(1)
    rounded = np.uint32(bits + np.uint32(0x7FFFF) + to_even) >> MANTISSA_SHIFT
    small = np.uint32(np.rint(size / SUBNORMAL_STEP))
    magnitude = rounded - BIAS if size >= LEAST_NORMAL else small
    is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint8(sign | (MAGNITUDE if is_nan else magnitude))
