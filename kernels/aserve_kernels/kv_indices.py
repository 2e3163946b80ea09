"""Writes the page indices of a step's rows in CSR form, on the device.

    out[indptr[r] + i] = page_table[rows[r], first_columns[r] + i],   0 <= i < number of pages of r

kv_indptr.py explains the form, and computes `indptr` and `first_columns`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


def kv_indices(
    page_table: Tensor, rows: Tensor, *, first_columns: Tensor, indptr: Tensor, out: Tensor
) -> None:
    """Writes `out`, int32 [indptr[n] or more].

    page_table int64 [max_rows + 1, columns], contiguous; rows int64 [n]; first_columns int32 [n];
    indptr int32 [n + 1], at least one page per row.
    """
    if not len(rows):
        return
    columns = page_table.shape[1]
    grid = (len(rows), triton.cdiv(columns, BLOCK))
    _gather[grid](page_table, rows, first_columns, indptr, out, columns, BLOCK)


def kv_indices_ref(
    page_table: Tensor, rows: Tensor, *, first_columns: Tensor, indptr: Tensor, out: Tensor
) -> None:
    """The same in plain torch. No shape depends on a value, so a graph can capture it: a row with
    fewer pages than the table has columns writes its last page repeatedly."""
    offsets = torch.arange(page_table.shape[1], dtype=torch.int32, device=indptr.device)
    offsets = torch.minimum(offsets, indptr.diff()[:, None] - 1)
    pages = page_table[rows[:, None], first_columns[:, None] + offsets]
    out.index_put_(((indptr[:-1, None] + offsets).long(),), pages.to(torch.int32))


@triton.jit
def _gather(
    page_table: tl.tensor,
    rows: tl.tensor,
    first_columns: tl.tensor,
    indptr: tl.tensor,
    out: tl.tensor,
    columns: int,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(indptr + index)
    in_bounds = offsets < tl.load(indptr + index + 1) - start
    source = tl.load(rows + index) * columns + tl.load(first_columns + index)
    pages = tl.load(page_table + source + offsets, mask=in_bounds)
    tl.store(out + start + offsets, pages.to(tl.int32), mask=in_bounds)
