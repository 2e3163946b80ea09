"""What is computed from a packed step: its inputs, and the CSR form of its pages."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from aserve_kernels.kv_indices import BLOCK as INDEX_BLOCK
from aserve_kernels.kv_indices import kv_indices, kv_indices_ref
from aserve_kernels.kv_indptr import BLOCK, KvIndptr, kv_indptr, kv_indptr_ref
from aserve_kernels.prepare_inputs import BLOCK as ROW_BLOCK
from aserve_kernels.prepare_inputs import PackedInputs, Tables, prepare_inputs, prepare_inputs_ref

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


MAX_ROWS, MAX_PAGES = 300, 6


def pack_step(query_lens: list[int]) -> PackedInputs:
    generator = torch.Generator().manual_seed(len(query_lens))
    num = len(query_lens)
    token_to_row = torch.arange(num).repeat_interleave(torch.tensor(query_lens, dtype=torch.int64))
    starts = torch.tensor(query_lens).cumsum(0) - torch.tensor(query_lens)
    rows = 1 + torch.randperm(MAX_ROWS, generator=generator)[:num]
    ids = torch.randint(0, 1 << 31, (len(token_to_row),), generator=generator)
    is_known = torch.rand(len(token_to_row), generator=generator) < 0.5
    return PackedInputs(
        rows=rows.int(),
        kv_lens=torch.randint(0, 40, (num,), generator=generator).int(),
        query_lens=torch.tensor(query_lens).int(),
        is_bound=torch.randint(0, 2, (num,), generator=generator).int(),
        token_to_row=token_to_row.int(),
        offsets=(torch.arange(len(token_to_row)) - starts[token_to_row]).int()
        if num
        else token_to_row.int(),
        input_ids=torch.where(is_known, ids, -rows[token_to_row]).int(),
    )


def make_tables(*, page_size: int, num_groups: int, is_bounded: bool) -> Tables:
    generator = torch.Generator().manual_seed(page_size)
    shape = (MAX_ROWS + 1, MAX_PAGES * (1 + 64 // page_size))
    pages = [
        1 + torch.randperm(shape[0] * shape[1], generator=generator).view(shape)
        for _ in range(num_groups)
    ]
    seq_lens = torch.randint(0, 50, (MAX_ROWS + 1,), generator=generator)
    return Tables(
        last_tokens=torch.randint(0, 1 << 31, (MAX_ROWS + 1,), generator=generator),
        seq_lens=seq_lens if is_bounded else None,
        page_tables=tuple(pages),
        token_pool=torch.full(((shape[0] * shape[1] + 1) * page_size,), -1, dtype=torch.int32),
        page_size=page_size,
    )


def tensors(made: object) -> list[Tensor]:
    values = [getattr(made, field.name) for field in dataclasses.fields(made)]  # type: ignore[arg-type] # a record of ours
    return [each for value in values for each in (value if isinstance(value, tuple) else (value,))]


QUERY_LENS = {
    "idle": [],
    "one": [1],
    "decode": [1] * (ROW_BLOCK + 1),
    "a block": [ROW_BLOCK],
    "mixed": [1, ROW_BLOCK - 1, 1, 60, 1, 3],
}


@pytest.mark.parametrize("kind", QUERY_LENS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("num_groups", "is_bounded"), [(1, False), (2, True)])
def test_every_step_has_the_inputs_of_the_reference(
    num_groups: int, page_size: int, kind: str, *, is_bounded: bool
) -> None:
    packed = pack_step(QUERY_LENS[kind])
    tables = make_tables(page_size=page_size, num_groups=num_groups, is_bounded=is_bounded)
    other = dataclasses.replace(tables, token_pool=tables.token_pool.clone())
    got, expected = prepare_inputs(packed, tables), prepare_inputs_ref(packed, other)
    for mine, theirs in zip(tensors(got), tensors(expected), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(tables.token_pool, other.token_pool)
