"""Penalised logits against the reference."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.penalties import BLOCK, penalise, penalise_ref
from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS
from tests.kernels.tolerance import assert_close, draw

MAX_ROWS, PAGE_SIZE = 6, 16


def tables_of_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ints = torch.full((MAX_ROWS, 4), -1)
    ints[:, INT_COLUMNS.index("prompt_len")] = torch.tensor([0, 3, 16, 17, 0, 900])
    floats = 0.5 + torch.rand((MAX_ROWS, len(FLOAT_COLUMNS)), generator=generator).double()
    return ints, floats


@pytest.mark.parametrize("lens", [(0, 1, 16), (17, 33, 5), (BLOCK, BLOCK + 1, 0)], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 50, BLOCK + 7])
def test_every_history_is_counted_through_its_pages(
    vocab_size: int, lens: tuple[int, int, int]
) -> None:
    generator = torch.Generator().manual_seed(4)
    num_pages = max(lens) // PAGE_SIZE + 1
    pages = 1 + torch.randperm(MAX_ROWS * num_pages, generator=generator)
    page_table = pages.view(MAX_ROWS, num_pages)
    num_slots = (len(pages) + 1) * PAGE_SIZE
    pool = torch.randint(0, vocab_size, (num_slots,), generator=generator).int()
    logits = draw(4, vocab_size + 2)[:, :vocab_size]
    places = torch.tensor([3, 0, 2])
    rows = torch.tensor([2, 1, 3, 5])
    of_rows = torch.tensor([lens[0], 7, lens[1], lens[2]])
    expected = logits.clone()
    arguments = (places, rows, of_rows, tables_of_rows(), (page_table, pool, PAGE_SIZE), max(lens))
    untouched = logits[1].clone()
    penalise(logits, *arguments)
    penalise_ref(expected, *arguments)
    assert_close(logits, expected)
    assert torch.equal(logits[1], untouched)
