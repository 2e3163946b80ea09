"""The paged attention kernel of the CPU: heads of every width, over more keys than a tile has."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from aserve_kernels.cpu import paged_attention as op
from aserve_kernels.cpu.host_rows import HostRows, QueryRows
from aserve_kernels.paged_rows import Scoring

PAGE_SIZE = 16
LENS = np.array([1, 64, 65, 150])
QUERY_LENS = np.array([1, 3, 1, 40])


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 16, 24, 32, 40, 128])
def test_heads_of_every_width_equal_the_reference(
    head_dim: int, dtype: torch.dtype, num_workers: int
) -> None:
    query_lens = np.minimum(QUERY_LENS, LENS)
    starts = np.cumsum(query_lens) - query_lens
    columns = -(-int(LENS.max()) // PAGE_SIZE)
    pages = 1 + np.arange(len(LENS) * columns)  # page 0 belongs to no row
    table = pages.reshape(-1, columns)[:, ::-1].copy()
    rows = HostRows(table, PAGE_SIZE, QueryRows(np.arange(len(LENS)), LENS, starts, query_lens))
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_slots = int(query_lens.sum()), (1 + table.size) * PAGE_SIZE
    q = torch.randn(num_tokens, 6, head_dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, num_slots, 2, head_dim, generator=generator).to(dtype)
    for row, length in enumerate(LENS):
        unwritten = torch.arange(length, columns * PAGE_SIZE)
        first_slots = torch.from_numpy(table[row])[unwritten // PAGE_SIZE] * PAGE_SIZE
        slots = first_slots + unwritten % PAGE_SIZE
        keys[slots] = values[slots] = torch.nan
    got, expected = torch.empty_like(q), torch.empty(q.shape)
    scoring = Scoring(0.3, window=90)
    op.compile_paged_attention(dtype, num_workers)
    op.paged_attention(q, keys, values, rows, scoring, out=got, num_workers=num_workers)
    op.paged_attention_ref(q.float(), keys.float(), values.float(), rows, scoring, out=expected)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 30, 90])
@pytest.mark.parametrize("head_dim", [24, 256])
def test_a_query_gets_the_same_bits_in_whatever_step_it_is(
    window: int | None, dtype: torch.dtype, head_dim: int
) -> None:
    """In a whole prefill, in chunks, and in decode steps."""
    generator = torch.Generator().manual_seed(0)
    kv_len = 200
    table = 1 + np.arange(-(-kv_len // PAGE_SIZE))[None, ::-1].copy()
    q = torch.randn(kv_len, 6, head_dim, generator=generator).to(dtype)
    num_slots = (1 + table.size) * PAGE_SIZE
    keys, values = torch.randn(2, num_slots, 2, head_dim, generator=generator).to(dtype)
    op.compile_paged_attention(dtype, 1)

    def attended(ends: list[int]) -> torch.Tensor:
        out = torch.empty_like(q)
        for start, end in itertools.pairwise([0, *ends]):
            own = QueryRows(*(np.array([value]) for value in (0, end, start, end - start)))
            rows = HostRows(table, PAGE_SIZE, own)
            scoring = Scoring(0.3, window)
            op.paged_attention(q, keys, values, rows, scoring, out=out, num_workers=1)
        return out

    assert torch.equal(attended([1, 7, 64, 150, 199, 200]), attended([200]))
