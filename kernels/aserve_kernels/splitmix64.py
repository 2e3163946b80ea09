"""The constants of the counter-based noise that every sampler shares, so that all of them draw the
same token for the same (seed, position, token id).

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) computes
its n-th output as `mix(start + n * GAMMA)`, modulo 2^64. Here `start` comes from the request's seed
and the token's position, and n is the token id:

    mix(x):  x ^= x >> 30;  x *= FACTOR_A;  x ^= x >> 27;  x *= FACTOR_B;  x ^= x >> 31
    start  = mix(mix(seed) + position * POSITION_FACTOR)
    k      = mix(start + token_id * GAMMA) >> 32                        32 random bits
    u      = min((k + 0.5) / 2^32, MAX_U)                               uniform in (0, 1)
    noise  = -log(-log1p(-u))                                           standard Gumbel

Small u, where floats are dense, make large noise, so rare winners are drawn at their true rate.
"""

from __future__ import annotations

GAMMA = 0x9E3779B97F4A7C15
POSITION_FACTOR = 0xC6A4A7935BD1E995
FACTOR_A = 0xBF58476D1CE4E5B9
FACTOR_B = 0x94D049BB133111EB
# The largest float32 below 1: a u of 1 would give an infinite log.
MAX_U = 1 - 2.0**-24


def as_int64(word: int) -> int:
    """Returns the int64 with the bits of this uint64, as torch needs it; int64 arithmetic wraps
    alike.
    """
    return word - (1 << 64) if word >> 63 else word
