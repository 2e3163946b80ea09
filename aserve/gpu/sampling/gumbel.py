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

from aserve_kernels import splitmix64

GAMMA, POSITION_FACTOR, FACTOR_A, FACTOR_B = (
    splitmix64.as_int64(word)
    for word in (
        splitmix64.GAMMA,
        splitmix64.POSITION_FACTOR,
        splitmix64.FACTOR_A,
        splitmix64.FACTOR_B,
    )
)
WORD = (1 << 32) - 1


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """seeds, positions int64 [n], token_ids int64 [vocab] -> [n, vocab] of `dtype`.

    `g = -log(-log1p(-u))` with u = (k + 0.5) / 2^32 and k of 32 random bits. With this form a
    small u makes large noise; floats are dense near 0, so that improbable tokens are drawn at
    their true rate.
    """
    starts = _mix(_mix(seeds.clone()).add_(positions * POSITION_FACTOR))
    bits = _mix(starts[:, None] + token_ids * GAMMA)
    k = bits.bitwise_right_shift_(32).bitwise_and_(WORD)
    u = k.to(dtype).add_(0.5).mul_(2.0**-32).clamp_(max=splitmix64.MAX_U)
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
