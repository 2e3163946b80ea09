"""The prefill kernels of the CPU against an explicit softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aserve.gpu.attention.chunked_prefill import TILE, sdpa_tiles
from aserve_kernels.cpu.host_rows import HostRows, QueryRows
from aserve_kernels.cpu.paged_attention import paged_attention_ref
from aserve_kernels.paged_rows import Scoring

PAGE_SIZE = 16
CHUNKS = {
    "a fresh prompt": (40, 0),
    "one token": (1, 0),
    "behind one token": (5, 1),
    "behind less than a page": (20, 15),
    "behind a page": (20, 16),
    "behind a page and one": (20, 17),
    "behind less than a tile": (9, TILE - 1),
    "behind a tile": (9, TILE),
    "behind a tile and one": (9, TILE + 1),
    "behind several tiles": (3, 2 * TILE + 100),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
@pytest.mark.parametrize(("query_len", "num_before"), CHUNKS.values(), ids=CHUNKS)
def test_every_token_sees_itself_and_what_came_before(
    query_len: int, num_before: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    kv_len = query_len + num_before
    num_pages = -(-kv_len // PAGE_SIZE)
    table = 1 + np.arange(num_pages)[None, ::-1].copy()
    own = QueryRows(*(np.array([value]) for value in (0, kv_len, 2, query_len)))  # two other tokens
    rows = HostRows(table, PAGE_SIZE, own)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(query_len + 3, heads[0], 16, generator=generator).to(dtype)
    slots = ((1 + num_pages) * PAGE_SIZE, heads[1], 16)
    keys, values = torch.randn(2, *slots, generator=generator).to(dtype)
    unused = num_pages * PAGE_SIZE - kv_len  # in the row's last page, the pool's first
    for pool in (keys, values):
        pool[:PAGE_SIZE] = pool[2 * PAGE_SIZE - unused : 2 * PAGE_SIZE] = torch.nan
    got, expected = torch.zeros(q.shape, dtype=dtype), torch.zeros(q.shape)
    sdpa_tiles(q, keys, values, rows, Scoring(0.4), out=got)
    wide_q, wide_keys, wide_values = (tensor.float() for tensor in (q, keys, values))
    paged_attention_ref(wide_q, wide_keys, wide_values, rows, Scoring(0.4), out=expected)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)
