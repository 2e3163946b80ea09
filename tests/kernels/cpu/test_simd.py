"""Vectors in compiled code, and the plain functions that stand for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats
from aserve_kernels.cpu.simd import (
    LANES,
    add_product,
    dot_products,
    greater,
    greatest,
    load,
    prefetch,
    splat,
    store,
    zeros,
)


def weighted(source: Floats, weight: np.float32, target: Float32s) -> None:
    """target[1:17] = source[3:19] * weight."""
    prefetch(source, 3)
    lanes = add_product(zeros(), load(source, 3), splat(weight))
    store(lanes, target, 1)


def scored(line: Float32s, lines: Float32s, target: Float32s) -> None:
    """target[2:18] = the products of line[1:33] with 16 lines from lines[3] on."""
    store(dot_products(line, 1, lines, 3, 2 * LANES), target, 2)


@pytest.mark.parametrize("function", [weighted, njit(weighted)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lanes_are_read_multiplied_and_written(function, dtype: torch.dtype) -> None:
    numbers = torch.arange(-4, 16, dtype=dtype)
    source = numbers.view(torch.uint16) if dtype == torch.bfloat16 else numbers
    target = np.zeros(LANES + 2, np.float32)
    function(source.numpy(), np.float32(0.5), target)
    assert target.tolist() == [0, *(numbers[3 : 3 + LANES].float() * 0.5).tolist(), 0]


@pytest.mark.parametrize("function", [scored, njit(scored)])
def test_a_line_is_multiplied_with_each_of_sixteen(function) -> None:
    width = 2 * LANES
    line = np.arange(width + 1, dtype=np.float32)
    lines = np.random.default_rng(0).integers(-8, 9, 3 + LANES * width).astype(np.float32)
    target = np.zeros(LANES + 3, np.float32)
    function(line, lines, target)
    expected = lines[3:].reshape(LANES, width) @ line[1:]
    assert target.tolist() == [0, 0, *expected.tolist(), 0]


def compared(a: Float32s, b: Float32s, target: Float32s) -> None:
    """target[:16] = the greater of a and b, lane by lane; target[16] = the greatest of all."""
    lanes = greater(load(a, 0), load(b, 0))
    store(lanes, target, 0)
    target[LANES] = greatest(lanes)


@pytest.mark.parametrize("function", [compared, njit(compared)])
@pytest.mark.parametrize("most_at", range(LANES))
def test_the_greatest_is_found_in_every_lane(function, most_at: int) -> None:
    a = np.full(LANES, -np.inf, np.float32)
    b = np.linspace(-3, 3, LANES, dtype=np.float32)
    a[most_at] = 4
    target = np.zeros(LANES + 1, np.float32)
    function(a, b, target)
    assert target.tolist() == [*np.maximum(a, b).tolist(), 4]
