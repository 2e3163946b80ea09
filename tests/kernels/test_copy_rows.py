"""Copies of rows: the kernel against its reference, for rows of all widths and lists with holes."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.copy_rows import copy_rows, copy_rows_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("row_size", [1, 7, 64, 1500])
def test_it_copies_the_rows_that_have_a_target(row_size: int, dtype: torch.dtype) -> None:
    source = torch.arange(9 * row_size).remainder(251).to(dtype).view(9, 1, row_size)
    sources, targets = torch.tensor([3, 0, 8, 8, 5]), torch.tensor([2, -1, 0, 5, -1])
    made = [torch.full((6, 1, row_size), 99).to(dtype) for _ in range(2)]
    copy_rows(source, sources, made[0], targets)
    copy_rows_ref(source, sources, made[1], targets)
    assert torch.equal(*made)
    assert made[0][1].eq(99).all()
    copy_rows(source, sources[:0], made[0], targets[:0])
    assert torch.equal(*made)
