"""Kernels are compiled before they are called, and it is said where that takes a while."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit, types

from aserve_kernels.cpu.ahead import compile_ahead

FLOATS = types.Array(types.float32, 1, "C")


@njit(nogil=True)
def _doubled(x: float) -> float:
    return 2 * x


@njit(nogil=True)
def _double(numbers: npt.NDArray[np.float32]) -> None:
    for i in range(numbers.shape[0]):
        numbers[i] = _doubled(numbers[i])


def test_a_kernel_is_compiled_once_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        compile_ahead(_double, FLOATS)
        compile_ahead(_double, FLOATS)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["compiling a kernel for this and all later starts: _double"]
    numbers = np.ones(2, np.float32)
    _double(numbers)
    assert numbers.tolist() == [2, 2]


def test_a_call_compiles_nothing() -> None:
    compile_ahead(_double, FLOATS)
    with pytest.raises(TypeError, match="No matching definition"):
        _double(np.ones(2, np.float64))
