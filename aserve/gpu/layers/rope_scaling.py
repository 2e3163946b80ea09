"""Rotary frequencies: one record for each way to stretch them, and the mathematics of each.

It knows no configuration file and no cache. A frequency depends on the record and on the engine's
max_model_len alone, never on a request: two requests that share a page of KV must have rotated it
alike. `rotary_dim` is how much of a head turns.
"""

from __future__ import annotations

import math
from typing import TypeAlias, assert_never

import msgspec
import torch
from torch import Tensor


class DefaultRope(msgspec.Struct, frozen=True):
    theta: float


class LinearRope(msgspec.Struct, frozen=True):
    """All positions are divided by `factor`."""

    theta: float
    factor: float


class DynamicRope(msgspec.Struct, frozen=True):
    """NTK-aware: theta grows with max_model_len beyond `original_len`."""

    theta: float
    factor: float
    original_len: int


class YarnRope(msgspec.Struct, frozen=True):
    """Fast frequencies stay, slow ones are divided by `factor`, with a ramp between `beta_fast` and
    `beta_slow` rotations.
    """

    theta: float
    factor: float
    original_len: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class Llama3Rope(msgspec.Struct, frozen=True):
    """Long wavelengths are divided by `factor`, short ones stay, with a smooth passage between
    them.
    """

    theta: float
    factor: float
    original_len: int
    low_freq_factor: float
    high_freq_factor: float


class LongRope(msgspec.Struct, frozen=True):
    """One divisor for each frequency; the long set if max_model_len exceeds `original_len`."""

    theta: float
    original_len: int
    attention_factor: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]


Rope: TypeAlias = DefaultRope | LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope


def inverse_frequencies(
    rope: Rope, rotary_dim: int, *, max_model_len: int, dtype: torch.dtype
) -> Tensor:
    """[rotary_dim / 2] radians per position, on the CPU; `dtype` is float32 or float64."""
    match rope:
        case DefaultRope():
            return _powers(rope.theta, rotary_dim, dtype=dtype)
        case LinearRope():
            return _powers(rope.theta, rotary_dim, dtype=dtype) / rope.factor
        case DynamicRope():
            return _powers(_grown_theta(rope, rotary_dim, max_model_len), rotary_dim, dtype=dtype)
        case YarnRope():
            return _yarn(rope, rotary_dim, dtype=dtype)
        case Llama3Rope():
            return _llama3(rope, rotary_dim, dtype=dtype)
        case LongRope():
            is_long = max_model_len > rope.original_len
            divisors = torch.tensor(rope.long_factor if is_long else rope.short_factor, dtype=dtype)
            return 1.0 / (divisors * rope.theta ** _exponents(rotary_dim, dtype=dtype))
        case _:
            assert_never(rope)


def attention_factor(rope: Rope) -> float:
    """What cosines and sines are multiplied with: the softmax temperature of stretched contexts."""
    match rope:
        case YarnRope() | LongRope():
            return rope.attention_factor
        case DefaultRope() | LinearRope() | DynamicRope() | Llama3Rope():
            return 1.0
        case _:
            assert_never(rope)


def _exponents(rotary_dim: int, *, dtype: torch.dtype) -> Tensor:
    return torch.arange(0, rotary_dim, 2).to(dtype) / rotary_dim


def _powers(theta: float, rotary_dim: int, *, dtype: torch.dtype) -> Tensor:
    return 1.0 / theta ** _exponents(rotary_dim, dtype=dtype)


def _grown_theta(rope: DynamicRope, rotary_dim: int, max_model_len: int) -> float:
    stretch = max(max_model_len, rope.original_len) / rope.original_len
    growth = rope.factor * stretch - (rope.factor - 1.0)
    return float(rope.theta * growth ** (rotary_dim / (rotary_dim - 2)))


def _yarn(rope: YarnRope, rotary_dim: int, *, dtype: torch.dtype) -> Tensor:
    def index_of(num_rotations: float) -> float:
        """Which frequency turns that often within the original length."""
        wavelength = rope.original_len / (num_rotations * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(rotary_dim // 2).to(dtype) - low) / width).clamp(0, 1)
    fast = _powers(rope.theta, rotary_dim, dtype=dtype)
    return fast / rope.factor * slowed + fast * (1 - slowed)


def _llama3(rope: Llama3Rope, rotary_dim: int, *, dtype: torch.dtype) -> Tensor:
    fast = _powers(rope.theta, rotary_dim, dtype=dtype)
    rotations = rope.original_len * fast / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return fast / rope.factor * (1 - kept) + fast * kept
