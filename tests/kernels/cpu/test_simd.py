"""SIMD intrinsics in compiled code, and the plain functions that stand for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats
from aserve_kernels.cpu.simd import (
    LANES,
    dot_products,
    fma,
    load,
    maximum,
    prefetch,
    reduce_max,
    splat,
    store,
    zeros,
)


def weighted(source: Floats, weight: np.float32, target: Float32s) -> None:
    """target[1:17] = source[3:19] * weight."""
    prefetch(source, 3)
    lanes = fma(zeros(), load(source, 3), splat(weight))
    store(lanes, target, 1)


def scored(x: Float32s, rows: Float32s, target: Float32s) -> None:
    """target[2:18] = the dot products of x[1:33] with 16 rows from rows[3] on."""
    store(dot_products(x, 1, rows, 3, 2 * LANES), target, 2)


@pytest.mark.parametrize("function", [weighted, njit(weighted)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lanes_are_read_multiplied_and_written(function, dtype: torch.dtype) -> None:
    numbers = torch.arange(-4, 16, dtype=dtype)
    source = numbers.view(torch.uint16) if dtype == torch.bfloat16 else numbers
    target = np.zeros(LANES + 2, np.float32)
    function(source.numpy(), np.float32(0.5), target)
    assert target.tolist() == [0, *(numbers[3 : 3 + LANES].float() * 0.5).tolist(), 0]


@pytest.mark.parametrize("function", [scored, njit(scored)])
def test_a_vector_is_multiplied_with_each_of_sixteen_rows(function) -> None:
    width = 2 * LANES
    x = np.arange(width + 1, dtype=np.float32)
    rows = np.random.default_rng(0).integers(-8, 9, 3 + LANES * width).astype(np.float32)
    target = np.zeros(LANES + 3, np.float32)
    function(x, rows, target)
    expected = rows[3:].reshape(LANES, width) @ x[1:]
    assert target.tolist() == [0, 0, *expected.tolist(), 0]


def compared(a: Float32s, b: Float32s, target: Float32s) -> None:
    """target[:16] = the greater of a and b, lane by lane; target[16] = the greatest of all."""
    lanes = maximum(load(a, 0), load(b, 0))
    store(lanes, target, 0)
    target[LANES] = reduce_max(lanes)


@pytest.mark.parametrize("function", [compared, njit(compared)])
@pytest.mark.parametrize("largest_at", range(LANES))
def test_the_maximum_is_found_in_every_lane(function, largest_at: int) -> None:
    a = np.full(LANES, -np.inf, np.float32)
    b = np.linspace(-3, 3, LANES, dtype=np.float32)
    a[largest_at] = 4
    target = np.zeros(LANES + 1, np.float32)
    function(a, b, target)
    assert target.tolist() == [*np.maximum(a, b).tolist(), 4]
