"""Arrays over memory that is known by its address, plain and compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from aserve_kernels.cpu.memory import array_at


def doubled(address: int, like: np.ndarray) -> float:
    table = array_at(address, (2, 3), like)
    table[1, 2] *= 2
    return table[1, 2]


@pytest.mark.parametrize("function", [doubled, njit(doubled)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int64])
def test_what_stands_there_is_read_and_written(function, dtype: npt.DTypeLike) -> None:
    numbers: npt.NDArray[Any] = np.arange(1, 8, dtype=dtype)
    address = numbers[1:].ctypes.data
    assert function(address, np.empty(0, dtype)) == 14
    assert numbers.tolist() == [1, 2, 3, 4, 5, 6, 14]
