"""Rows of tables by number, and masks over logits, against the references."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.sampling.token_masks import allow
from aserve_kernels.bitmask import apply_bitmask, apply_bitmask_ref
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


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 2048, 4133])
@pytest.mark.parametrize("num", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_mask_leaves_out_becomes_minus_infinity(
    dtype: torch.dtype, num: int, vocab_size: int
) -> None:
    joined = draw(num, vocab_size + 5, dtype=dtype)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (num, -(-vocab_size // 32) + 1)).int()
    got, expected, of_sampler = (joined.clone() for _ in range(3))
    apply_bitmask(got[:, :vocab_size], words)
    apply_bitmask_ref(expected[:, :vocab_size], words)
    allow(of_sampler[:, :vocab_size], words)
    assert torch.equal(got, expected)
    assert torch.equal(got, of_sampler)
    assert not got[:, vocab_size:].isinf().any()
