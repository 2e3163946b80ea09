"""Tolerances of kernels against their references: float32 rounding, or one 16-bit step."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def assert_close(got: Tensor, expected: Tensor) -> None:
    """A float32 sum may be one step off, which rounding may turn into one step of a 16-bit type."""
    assert got.dtype == expected.dtype
    step = TOLERANCES[got.dtype]
    torch.testing.assert_close(got, expected, rtol=step, atol=4 * step)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
