"""Gumbel noise as a function of (seed, position, token id).

The generator is counter-based: it has no state that would have to be kept, replayed after a
failure or moved to another device, and a token's noise is the same in whatever batch it is drawn.

The generator is SplitMix64 (Steele, Lea and Flood, 2014). Its n-th output is
`mix(start + n * GAMMA)`, where the start is derived from seed and position, and n is the token id.
int64 arithmetic wraps as uint64 does; only right shifts need a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15, odd
GAMMA_OF_POSITIONS = -4132994306676758123  # 0xC6A4A7935BD1E995, odd
FACTOR_A = -4658895280553007687  # 0xBF58476D1CE4E5B9
FACTOR_B = -7723592293110705685  # 0x94D049BB133111EB
WORD = (1 << 32) - 1
# In float32 this is the largest value below 1: a u of 1 would give an infinite log.
MAX_U = 1 - 2.0**-24


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """seeds, positions int64 [n], token_ids int64 [vocab] -> [n, vocab] of `dtype`.

    `g = -log(-log1p(-u))` with u = (k + 0.5) / 2^32 and k of 32 random bits. With this form a
    small u makes large noise; floats are dense near 0, so that improbable tokens are drawn at
    their true rate.
    """
    starts = _mix(_mix(seeds.clone()).add_(positions * GAMMA_OF_POSITIONS))
    bits = _mix(starts[:, None] + token_ids * GAMMA)
    k = bits.bitwise_right_shift_(32).bitwise_and_(WORD)
    u = k.to(dtype).add_(0.5).mul_(2.0**-32).clamp_(max=MAX_U)
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place."""
    x ^= _shift_right(x, 30)
    x *= FACTOR_A
    x ^= _shift_right(x, 27)
    x *= FACTOR_B
    x ^= _shift_right(x, 31)
    return x


def _shift_right(x: Tensor, count: int) -> Tensor:
    """A logical shift: zeros come in at the top."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)
