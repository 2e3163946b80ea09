"""Rows of the relay by Triton kernels. For GPUs.

It knows no field.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.future_map import PLAIN_ROWS, RowOps
from aserve_kernels.relay_rows import gather_rows, scatter_rows


def triton_row_ops(dtype: torch.dtype) -> RowOps:
    """A model in float64 is there to be exact, and runs without any kernel of ours."""
    return PLAIN_ROWS if dtype == torch.float64 else RowOps(gather_rows, _scatter)


def _scatter(
    table: Tensor, rows: Tensor, values: Tensor, stamps: Tensor, iteration: Tensor
) -> None:
    scatter_rows(table, rows, values.contiguous(), stamps, iteration)
