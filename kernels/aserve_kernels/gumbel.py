"""Gumbel noise by counter: it belongs to (seed, position, token id), whoever asks for it and when.

SplitMix64: its n-th output is `mix(start + n * GAMMA)`; the start comes from seed and position, n
is the token id. The upper 32 bits k of an output make u = (k + 0.5) / 2^32, at most 1 - 2^-24,
and the noise is -log(-log1p(-u)).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
GAMMA_OF_POSITIONS: tl.constexpr = tl.constexpr(0xC6A4A7935BD1E995)
FACTOR_A: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
FACTOR_B: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
MAX_U: tl.constexpr = tl.constexpr(1 - 2.0**-24)


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * FACTOR_A
    x = (x ^ (x >> 27)) * FACTOR_B
    return x ^ (x >> 31)


@triton.jit
def gumbel_start(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """int64 each -> uint64, where a row's noise begins."""
    seed, position = seed.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True)
    return mix(mix(seed) + position * GAMMA_OF_POSITIONS)


@triton.jit
def gumbel(start: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """token_ids int32 [block] -> float32 [block].

    log1p(x) is log(w) * x / (w - 1) with w = 1 + x: what rounding takes from w, it takes from both
    factors (Kahan).
    """
    bits = mix(start + token_ids.to(tl.uint64) * GAMMA) >> 32
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296), MAX_U)
    w = 1.0 - u
    is_small = w == 1.0
    factor = tl.where(is_small, 1.0, u / tl.where(is_small, 1.0, 1.0 - w))
    minus_log1p = tl.where(is_small, u, -tl.log(w) * factor)
    return -tl.log(minus_log1p)


def gumbel_ref(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """seeds, positions int64 [n] -> float32 [n, vocab]. int64 wraps as uint64 does."""
    token_ids = torch.arange(vocab_size, device=seeds.device)
    starts = _mix_ref(_mix_ref(seeds) + positions * _signed(GAMMA_OF_POSITIONS.value))
    bits = _shift(_mix_ref(starts[:, None] + token_ids * _signed(GAMMA.value)), 32)
    u = ((bits.float() + 0.5) * 2.0**-32).clamp(max=MAX_U.value)
    return -torch.log(-torch.log1p(-u))


def _mix_ref(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(FACTOR_A.value)
    x = (x ^ _shift(x, 27)) * _signed(FACTOR_B.value)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, count: int) -> Tensor:
    """The bits that come in at the top are zeros."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64)
