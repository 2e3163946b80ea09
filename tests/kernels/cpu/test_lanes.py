"""Vectors in compiled code, and the plain functions that stand for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from aserve_kernels.cpu.half import Float32s, Floats
from aserve_kernels.cpu.lanes import (
    LANES,
    add_product,
    load,
    prefetch,
    splat,
    store,
    total,
    zeros,
)


def weighted(source: Floats, weight: np.float32, target: Float32s) -> np.float32:
    """target[1:17] = source[3:19] * weight; their sum."""
    prefetch(source, 3)
    lanes = add_product(zeros(), load(source, 3), splat(weight))
    store(lanes, target, 1)
    return total(lanes)


@pytest.mark.parametrize("function", [weighted, njit(weighted)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lanes_are_read_multiplied_written_and_summed(function, dtype: torch.dtype) -> None:
    numbers = torch.arange(-4, 16, dtype=dtype)
    source = numbers.view(torch.uint16) if dtype == torch.bfloat16 else numbers
    target = np.zeros(LANES + 2, np.float32)
    sum_ = function(source.numpy(), np.float32(0.5), target)
    expected = [0, *(numbers[3 : 3 + LANES].float() * 0.5).tolist(), 0]
    assert target.tolist() == expected
    assert sum_ == sum(expected)
