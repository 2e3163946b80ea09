"""Computes the CSR form of a step's paged KV, on the device: indptr and last page lengths.

FlashInfer's kernels read no page table, but one list of all rows' pages in CSR form: row r has the
pages `indices[indptr[r] : indptr[r + 1]]`, and its last page holds `last_page_lens[r]` tokens. This
kernel computes indptr and last_page_lens; kv_indices.py writes the indices. With a sliding window,
pages that no query of the row sees are left out:

    first_column[r] = max(0, lens[r] - query_len[r] - window + 1) // page_size
    indptr[r + 1] - indptr[r] = ceil(lens[r] / page_size) - first_column[r]
    last_page_lens[r] = (lens[r] - 1) mod page_size + 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@dataclass(frozen=True, slots=True)
class KvIndptr:
    """int32, on the device."""

    first_columns: Tensor  # [rows], the page table's column of a row's first listed page
    indptr: Tensor  # [rows + 1]
    last_page_lens: Tensor  # [rows], from 1 to the page size


def kv_indptr(
    lens: Tensor, cu_query_lens: Tensor, *, window: int | None, page_size: int, out: KvIndptr
) -> None:
    """Writes `out`.

    lens int64 [rows]: KV lengths with this step's tokens, at least 1. cu_query_lens int64
    [rows + 1]. A query sees the last `window` tokens, its own included; None means all.
    """
    _kv_indptr[(1,)](
        lens, cu_query_lens, out.first_columns, out.indptr, out.last_page_lens, len(lens),
        0 if window is None else window, page_size, window is not None, BLOCK,
    )  # fmt: skip


def kv_indptr_ref(
    lens: Tensor, cu_query_lens: Tensor, *, window: int | None, page_size: int, out: KvIndptr
) -> None:
    first_columns = torch.zeros_like(lens)
    if window is not None:
        first_columns = (lens - cu_query_lens.diff() - window + 1).clamp(min=0) // page_size
    counts = (lens + page_size - 1) // page_size - first_columns
    out.first_columns.copy_(first_columns)
    out.indptr.copy_(torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
    out.last_page_lens.copy_((lens - 1) % page_size + 1)


# One program runs through all rows in order; there are a few hundred of them.
@triton.jit(do_not_specialize=["num_rows"])
def _kv_indptr(
    lens: tl.tensor,
    cu_query_lens: tl.tensor,
    first_columns: tl.tensor,
    indptr: tl.tensor,
    last_page_lens: tl.tensor,
    num_rows: int,
    window: int,
    page_size: int,
    HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    total = tl.zeros((), tl.int32)
    tl.store(indptr, total)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        in_bounds = row < num_rows
        kv_len = tl.load(lens + row, mask=in_bounds, other=0)
        first_column = tl.zeros((BLOCK,), tl.int64)
        if HAS_WINDOW:
            query_start = tl.load(cu_query_lens + row, mask=in_bounds, other=0)
            query_len = tl.load(cu_query_lens + row + 1, mask=in_bounds, other=0) - query_start
            first_column = tl.maximum(kv_len - query_len - window + 1, 0) // page_size
        count = tl.where(in_bounds, (kv_len + page_size - 1) // page_size - first_column, 0).to(
            tl.int32
        )
        tl.store(first_columns + row, first_column.to(tl.int32), mask=in_bounds)
        tl.store(indptr + row + 1, total + tl.cumsum(count, 0), mask=in_bounds)
        tl.store(last_page_lens + row, ((kv_len - 1) % page_size + 1).to(tl.int32), mask=in_bounds)
        total += tl.sum(count, 0)
