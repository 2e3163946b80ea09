"""The CSR form of a step's pages, row pointers and page indices, for rows of all lengths."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.kv_indices import BLOCK as INDEX_BLOCK
from aserve_kernels.kv_indices import kv_indices, kv_indices_ref
from aserve_kernels.kv_indptr import BLOCK, KvIndptr, kv_indptr, kv_indptr_ref

SHAPES = {
    "no row": ([], []),
    "one token": ([1], [1]),
    "a page's last slot and the next one's first": ([16, 17], [1, 1]),
    "chunks beside decodes": ([40, 300, 7], [16, 1, 7]),
    "just behind a window": ([5, 6, 20, 21, 22], [1, 1, 1, 1, 2]),
    "a block": ([*range(1, BLOCK + 1)], [1] * BLOCK),
    "two blocks and one": ([3 * i + 1 for i in range(2 * BLOCK + 1)], [1] * (2 * BLOCK + 1)),
}
COLUMNS = 2 * INDEX_BLOCK + 3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_row_has_the_pages_that_its_queries_see(
    page_size: int, window: int | None, shape: str
) -> None:
    lens, query_lens = SHAPES[shape]
    starts = [0]
    cu_query_lens = [0]
    firsts = []
    for kv_len, query_len in zip(lens, query_lens, strict=True):
        seen_from = 0 if window is None else max(0, kv_len - query_len - window + 1)
        firsts.append(seen_from // page_size)
        starts.append(starts[-1] + (kv_len - 1) // page_size - firsts[-1] + 1)
        cu_query_lens.append(cu_query_lens[-1] + query_len)
    for op in (kv_indptr, kv_indptr_ref):
        num = len(lens)
        out = KvIndptr(*(torch.full((n,), -1, dtype=torch.int32) for n in (num, num + 1, num)))
        given = (torch.tensor(values, dtype=torch.int64) for values in (lens, cu_query_lens))
        op(*given, window=window, page_size=page_size, out=out)
        assert out.indptr.tolist() == starts
        assert out.first_columns.tolist() == firsts
        assert out.last_page_lens.tolist() == [(kv_len - 1) % page_size + 1 for kv_len in lens]


@pytest.mark.parametrize(
    ("counts", "firsts"),
    [
        ([], []),
        ([1], [0]),
        ([3, 1, 2], [0, 0, 0]),
        ([2, 5], [7, 3]),
        ([INDEX_BLOCK - 1, INDEX_BLOCK, INDEX_BLOCK + 1], [0, 1, 2]),
        ([COLUMNS, 1, 2 * INDEX_BLOCK], [0, COLUMNS - 1, 3]),
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
