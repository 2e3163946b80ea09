"""The forward's inputs that are computed from a packed step, against the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from aserve_kernels.prepare_inputs import (
    BLOCK,
    PackedInputs,
    Tables,
    prepare_inputs,
    prepare_inputs_ref,
)

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
    "decode": [1] * (BLOCK + 1),
    "a block": [BLOCK],
    "mixed": [1, BLOCK - 1, 1, 60, 1, 3],
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
