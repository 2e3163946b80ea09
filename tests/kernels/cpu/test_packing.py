"""Packed pairs, in compiled code and in the plain functions that stand for it."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.packing import Bf16Bits, interleave, transpose_pairs

SOURCE = np.arange(1000, dtype=np.uint16)


def transposed(source: Bf16Bits, indices: Int64s, target: Bf16Bits) -> None:
    transpose_pairs(source, indices, target, 3, 40)


def interleaved(source: Bf16Bits, target: Bf16Bits) -> None:
    interleave(source, 5, 100, target, 2)


@pytest.mark.parametrize("function", [transposed, njit(transposed)])
def test_pairs_of_sixteen_vectors_are_transposed(function) -> None:
    indices = np.array([7 * (i * 5 % 16) + 400 * (i % 2) for i in range(16)])
    target = np.zeros(3 + 16 * 40, np.uint16)
    function(SOURCE, indices, target)
    pairs = np.stack([SOURCE[first : first + 32].reshape(16, 2) for first in indices], axis=1)
    assert (target[3:].reshape(16, 40)[:, :32] == pairs.reshape(16, 32)).all()
    assert not target[:3].any()
    assert not target[3:].reshape(16, 40)[:, 32:].any()


@pytest.mark.parametrize("function", [interleaved, njit(interleaved)])
def test_two_vectors_are_interleaved(function) -> None:
    target = np.zeros(36, np.uint16)
    function(SOURCE, target)
    expected = [value for i in range(16) for value in (5 + i, 100 + i)]
    assert target.tolist() == [0, 0, *expected, 0, 0]
