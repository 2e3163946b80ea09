"""Rows of tables, read and written by number, against the reference."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.relay_rows import (
    BLOCK,
    gather_rows,
    gather_rows_ref,
    scatter_rows,
    scatter_rows_ref,
)
from tests.kernels.tolerance import draw

MAX_ROWS = 9
DTYPES = [torch.int64, torch.int32, torch.float32, torch.bfloat16]
SHAPES = [(), (1,), (2, 3), (BLOCK,), (BLOCK + 5,)]


@pytest.mark.parametrize("rows", [[], [4], [9, 1, 5, 0]], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_read_and_written_and_no_others(
    dtype: torch.dtype, shape: tuple[int, ...], rows: list[int]
) -> None:
    table = (100 * draw(MAX_ROWS + 1, *shape)).to(dtype)
    numbers = torch.tensor(rows, dtype=torch.int64)
    assert torch.equal(gather_rows(table, numbers), gather_rows_ref(table, numbers))
    values = (100 * draw(len(rows), *shape, seed=1)).to(dtype)
    stamps, iteration = torch.arange(MAX_ROWS + 1), torch.tensor([77])
    expected, expected_stamps = table.clone(), stamps.clone()
    scatter_rows(table, numbers, values, stamps, iteration)
    scatter_rows_ref(expected, numbers, values, expected_stamps, iteration)
    assert torch.equal(table, expected)
    assert torch.equal(stamps, expected_stamps)
