"""Rows that are widened and transposed for tiles of twelve. Their products are in test_gemm.py,
which takes them where the processor has AVX-512 and widens weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aserve_kernels.cpu.bf16 import as_array
from aserve_kernels.cpu.simd import LANES
from aserve_kernels.cpu.wide_tiles import WIDE_ROWS, pack_rows


@pytest.mark.parametrize("num_rows", [1, 5, WIDE_ROWS, WIDE_ROWS + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_transposed_and_the_last_stands_for_missing_ones(
    dtype: torch.dtype, num_rows: int
) -> None:
    num_in, padded = 34, 48
    x = torch.randn((num_rows, num_in), generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = np.full(WIDE_ROWS * padded, np.nan, np.float32)
    tile = np.full(padded * LANES, np.nan, np.float32)
    starts = np.minimum(np.arange(LANES), WIDE_ROWS - 1) * 2 * padded
    pack_rows(as_array(x), rows, starts, tile)
    own = x.float()[[min(row, num_rows - 1) for row in range(WIDE_ROWS)]]
    packed = torch.from_numpy(tile.reshape(padded, LANES)[:num_in, :WIDE_ROWS])
    assert torch.equal(packed, own.T)
