"""The CSR page indices of a step's rows, for rows of all lengths."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.kv_indices import BLOCK, kv_indices, kv_indices_ref

COLUMNS = 2 * BLOCK + 3


@pytest.mark.parametrize(
    ("counts", "firsts"),
    [
        ([], []),
        ([1], [0]),
        ([3, 1, 2], [0, 0, 0]),
        ([2, 5], [7, 3]),
        ([BLOCK - 1, BLOCK, BLOCK + 1], [0, 1, 2]),
        ([COLUMNS, 1, 2 * BLOCK], [0, COLUMNS - 1, 3]),
    ],
)
def test_the_pages_of_each_row_follow_those_of_the_row_before(
    counts: list[int], firsts: list[int]
) -> None:
    table = torch.randperm(6 * COLUMNS).view(6, COLUMNS)
    rows = torch.tensor([4, 0, 2][: len(counts)], dtype=torch.int64)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    total = int(starts[-1])
    expected = [
        table[int(row), first : first + count]
        for row, first, count in zip(rows, firsts, counts, strict=True)
    ]
    for gather in (kv_indices, kv_indices_ref):
        out = torch.full((total + 5,), -1, dtype=torch.int32)
        given = torch.tensor(firsts, dtype=torch.int32)
        gather(table, rows, first_columns=given, indptr=starts, out=out)
        assert out.tolist() == [page for part in expected for page in part.tolist()] + [-1] * 5
