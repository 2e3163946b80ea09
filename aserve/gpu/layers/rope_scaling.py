"""RoPE frequencies: one record per scaling method, and its formula.

Without scaling, `f_i = theta ** (-2 i / rotary_dim)` for i in 0 .. rotary_dim / 2 - 1. Each method
stretches these for contexts longer than `original_len`, the length of pre-training.

NOTE: a frequency depends on the record and the engine's max_model_len only, never on the length of
a request, because requests that share a page of KV must have rotated its keys alike.
Source of all methods: transformers, modeling_rope_utils.py
"""

from __future__ import annotations

import math
from typing import TypeAlias, assert_never

import msgspec
import torch
from torch import Tensor


class DefaultRope(msgspec.Struct, frozen=True):
    """No scaling."""

    theta: float


class NoRope(msgspec.Struct, frozen=True):
    """No positions: all frequencies are 0, so that cosines are 1 and sines 0, and the kernels that
    rotate heads change nothing."""


class LinearRope(msgspec.Struct, frozen=True):
    """Position interpolation: `f_i / factor`, which is the same as positions / factor."""

    theta: float
    factor: float


class DynamicRope(msgspec.Struct, frozen=True):
    """NTK-aware scaling. With d = rotary_dim and s = max(max_model_len / original_len, 1):
    `theta' = theta * (factor * s - (factor - 1)) ** (d / (d - 2))`."""

    theta: float
    factor: float
    original_len: int


class YarnRope(msgspec.Struct, frozen=True):
    """YaRN: `f_i' = f_i / factor * r_i + f_i * (1 - r_i)`.

    The ramp r_i goes from 0, at frequencies that make `beta_fast` rotations within original_len,
    to 1, at those that make `beta_slow` rotations. Source: https://arxiv.org/abs/2309.00071
    """

    theta: float
    factor: float
    original_len: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class Llama3Rope(msgspec.Struct, frozen=True):
    """Llama 3.1: `f_i' = f_i / factor * (1 - k_i) + f_i * k_i`.

    With n_i the rotations of frequency i within original_len,
    `k_i = clamp((n_i - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)`.
    """

    theta: float
    factor: float
    original_len: int
    low_freq_factor: float
    high_freq_factor: float


class LongRope(msgspec.Struct, frozen=True):
    """LongRoPE: `f_i / divisor_i`. The divisors are long_factor if max_model_len exceeds
    original_len, else short_factor. Source: https://arxiv.org/abs/2402.13753"""

    theta: float
    original_len: int
    attention_factor: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]


class QueryScale(msgspec.Struct, frozen=True):
    """The factor of a query at position p, `1 + beta * ln(1 + floor(p / original_len))`, which
    Llama 4 and Ministral 3 have beside their rope."""

    beta: float
    original_len: int

    def table(self, max_model_len: int, *, dtype: torch.dtype) -> Tensor:
        """Returns the factors of all positions, [max_model_len, 1]."""
        num_lengths = torch.arange(max_model_len) // self.original_len
        return (1.0 + self.beta * torch.log1p(num_lengths.double()))[:, None].to(dtype)


Rope: TypeAlias = NoRope | DefaultRope | LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope


def inverse_frequencies(
    rope: Rope, rotary_dim: int, *, max_model_len: int, dtype: torch.dtype
) -> Tensor:
    """Returns the frequencies [rotary_dim / 2] in radians per position, on the CPU. `dtype` is
    float32 or float64; `rotary_dim` is the number of elements of a head that are rotated.
    """
    match rope:
        case NoRope():
            return torch.zeros(rotary_dim // 2, dtype=dtype)
        case DefaultRope():
            return _base_frequencies(rope.theta, rotary_dim, dtype=dtype)
        case LinearRope():
            return _base_frequencies(rope.theta, rotary_dim, dtype=dtype) / rope.factor
        case DynamicRope():
            return _base_frequencies(
                _ntk_theta(rope, rotary_dim, max_model_len), rotary_dim, dtype=dtype
            )
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
    """Returns the factor of cosines and sines, by which YaRN and LongRoPE scale the attention
    scores.
    """
    match rope:
        case YarnRope() | LongRope():
            return rope.attention_factor
        case NoRope() | DefaultRope() | LinearRope() | DynamicRope() | Llama3Rope():
            return 1.0
        case _:
            assert_never(rope)


def _exponents(rotary_dim: int, *, dtype: torch.dtype) -> Tensor:
    return torch.arange(0, rotary_dim, 2).to(dtype) / rotary_dim


def _base_frequencies(theta: float, rotary_dim: int, *, dtype: torch.dtype) -> Tensor:
    return 1.0 / theta ** _exponents(rotary_dim, dtype=dtype)


def _ntk_theta(rope: DynamicRope, rotary_dim: int, max_model_len: int) -> float:
    stretch = max(max_model_len, rope.original_len) / rope.original_len
    growth = rope.factor * stretch - (rope.factor - 1.0)
    return float(rope.theta * growth ** (rotary_dim / (rotary_dim - 2)))


def _yarn(rope: YarnRope, rotary_dim: int, *, dtype: torch.dtype) -> Tensor:
    def index_of(num_rotations: float) -> float:
        """Returns the (fractional) index i whose frequency makes that many rotations in
        original_len.
        """
        wavelength = rope.original_len / (num_rotations * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rotary_dim // 2).to(dtype) - low) / width).clamp(0, 1)
    base = _base_frequencies(rope.theta, rotary_dim, dtype=dtype)
    return base / rope.factor * ramp + base * (1 - ramp)


def _llama3(rope: Llama3Rope, rotary_dim: int, *, dtype: torch.dtype) -> Tensor:
    base = _base_frequencies(rope.theta, rotary_dim, dtype=dtype)
    rotations = rope.original_len * base / (2 * math.pi)
    keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return base / rope.factor * (1 - keep) + base * keep
