"""fp8 in compiled code, against torch's: each element, and float32 between and beyond them."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, widen
from aserve_kernels.cpu.simd import LANES, load, store

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@njit()
def widened(source: Floats, target: Float32s) -> None:
    widen(source, target)


@njit()
def loaded(source: Floats, target: Float32s) -> None:
    for i in range(0, len(source), LANES):
        store(load(source, i), target, i)


@njit()
def narrowed(source: Float32s, target: Floats) -> None:
    narrow(source, target)


def test_each_element_becomes_its_value() -> None:
    expected, got = CODES.float(), torch.empty(256)
    widened(as_array(CODES), got.numpy())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert torch.equal(got.isnan(), expected.isnan())
    loaded(as_array(CODES), got.numpy())
    is_number = ~expected.isnan()
    assert torch.equal(got[is_number], expected[is_number])


def test_values_are_rounded_to_the_nearest_element_and_ties_to_even() -> None:
    elements = CODES.float()[~CODES.float().isnan()].sort().values
    ties = (elements[1:] + elements[:-1]) / 2
    near = torch.cat([ties * (1 + 2**-22), ties * (1 - 2**-22)])
    beyond = torch.tensor([448.5, 1e9, -1e9, torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-30])
    values = torch.cat([elements, ties, near, beyond])
    got = torch.empty(len(values), dtype=torch.float8_e4m3fn)
    narrowed(values.numpy(), as_array(got))
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert np.array_equal(as_array(got), as_array(expected))
