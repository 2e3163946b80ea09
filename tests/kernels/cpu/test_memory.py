"""Scratch memory of compiled code: it holds what is written, and asks no allocator while small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit
from numba.core.runtime import _nrt_python, rtsys

from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, LINE_BYTES, STACK_BYTES, scratch
from aserve_kernels.cpu.quant_codes import KINDS, CodeKind
from tests.kernels.cpu.test_product import SHAPE, coded_fields, inputs, product
from tests.kernels.cpu.test_quant_linear import drawn


@njit(nogil=True)
def _sum_of_both(size: int, num_passes: int) -> float:
    """Fills two arrays in each pass, and adds the first and last elements of both."""
    total = 0.0
    for number in range(num_passes):
        rows, column = scratch((size, 3), FLOAT32_LIKE), scratch((size,), INT64_LIKE)
        rows[:] = np.float32(number)
        column[:] = 10
        total += rows[0, 0] + rows[size - 1, 2] + column[0] + column[size - 1]
    return total


LARGEST = STACK_BYTES // 12  # rows of three float32 that the stack holds


@pytest.mark.parametrize("size", [1, LARGEST, LARGEST + 1, 1 << 20])
def test_scratch_of_any_size_keeps_what_is_written(size: int) -> None:
    assert _sum_of_both(size, 3) == 3 * 20 + 2 * (0 + 1 + 2)


@njit(nogil=True)
def _address(size: int) -> int:
    return scratch((size,), FLOAT32_LIKE).ctypes.data


@pytest.mark.parametrize("size", [1, 3 * LARGEST + 3, 100_003])
def test_scratch_begins_with_a_cache_line(size: int) -> None:
    assert [_address(size) % LINE_BYTES for _ in range(5)] == [0] * 5


def num_allocations() -> int:
    _nrt_python.memsys_enable_stats()
    number: int = rtsys.get_allocation_stats().alloc
    return number


def test_only_large_scratch_is_allocated() -> None:
    _sum_of_both(1, 1)  # compiled
    before = num_allocations()
    _sum_of_both(STACK_BYTES // 24, 50)
    assert num_allocations() == before
    _sum_of_both(LARGEST + 1, 50)
    assert num_allocations() >= before + 50


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_product_of_few_rows_allocates_nothing(kind: CodeKind) -> None:
    """WHY: all threads of a team would ask for memory at the same moment, and wait for a lock. What
    a call itself allocates does not depend on the number of workers, which run in turn here."""
    packed, _ = drawn(kind, SHAPE, has_offsets=True)
    fields, x = coded_fields(packed, torch.bfloat16), inputs(8, torch.bfloat16)
    numbers = []
    for num_workers in (1, 1, 5):
        before = num_allocations()
        product(fields, x, num_workers)
        numbers.append(num_allocations() - before)
    assert numbers[1] == numbers[2]
