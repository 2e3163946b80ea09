"""Gumbel noise of (seed, position, token id) for Triton kernels; splitmix64.py has the formulas.

The noise is a pure function of its counter: no generator state has to be kept, repeated or moved,
and a token's noise is the same in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels import splitmix64

GAMMA: tl.constexpr = tl.constexpr(splitmix64.GAMMA)
POSITION_FACTOR: tl.constexpr = tl.constexpr(splitmix64.POSITION_FACTOR)
FACTOR_A: tl.constexpr = tl.constexpr(splitmix64.FACTOR_A)
FACTOR_B: tl.constexpr = tl.constexpr(splitmix64.FACTOR_B)
MAX_U: tl.constexpr = tl.constexpr(splitmix64.MAX_U)


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * FACTOR_A
    x = (x ^ (x >> 27)) * FACTOR_B
    return x ^ (x >> 31)


@triton.jit
def gumbel_start(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Returns the start of a row's noise: seed and position int64 -> uint64."""
    seed, position = seed.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True)
    return mix(mix(seed) + position * POSITION_FACTOR)


@triton.jit
def gumbel(start: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Returns the noise of these tokens: token_ids int32 [block] -> float32 [block].

    Triton has no log1p. log1p(x) is log(w) * x / (w - 1) with w = 1 + x: the rounding error of w
    is the same in both factors, and cancels (Kahan; Goldberg 1991, theorem 4).
    """
    bits = mix(start + token_ids.to(tl.uint64) * GAMMA) >> 32
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296), MAX_U)
    w = 1.0 - u
    is_small = w == 1.0
    factor = tl.where(is_small, 1.0, u / tl.where(is_small, 1.0, 1.0 - w))
    minus_log1p = tl.where(is_small, u, -tl.log(w) * factor)
    return -tl.log(minus_log1p)


def gumbel_ref(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """seeds and positions int64 [n] -> float32 [n, vocab]."""
    token_ids = torch.arange(vocab_size, device=seeds.device)
    factor, gamma = (splitmix64.as_int64(word) for word in (POSITION_FACTOR.value, GAMMA.value))
    starts = _mix_ref(_mix_ref(seeds) + positions * factor)
    bits = _shift_right(_mix_ref(starts[:, None] + token_ids * gamma), 32)
    u = ((bits.float() + 0.5) * 2.0**-32).clamp(max=MAX_U.value)
    return -torch.log(-torch.log1p(-u))


def _mix_ref(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * splitmix64.as_int64(FACTOR_A.value)
    x = (x ^ _shift_right(x, 27)) * splitmix64.as_int64(FACTOR_B.value)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """A logical shift of int64: zeros come in at the top."""
    return (x >> count) & ((1 << (64 - count)) - 1)
