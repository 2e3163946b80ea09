"""The pages of some rows, one row's behind the other's: for kernels that know no page table.

It knows no window: whoever calls says where a row's pages begin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


def kv_indices(
    page_table: Tensor, rows: Tensor, *, firsts: Tensor, starts: Tensor, out: Tensor
) -> None:
    """out[starts[r] + i] = page_table[rows[r], firsts[r] + i], up to starts[r + 1].

    page_table int64 [table's rows, columns], contiguous; rows int64 [n]; firsts int32 [n]; starts
    int32 [n + 1], each row with one page or more; out int32 [starts[n] or more].
    """
    if not len(rows):
        return
    columns = page_table.shape[1]
    grid = (len(rows), triton.cdiv(columns, BLOCK))
    _gather[grid](page_table, rows, firsts, starts, out, columns, BLOCK)


def gather_pages_ref(
    page_table: Tensor, rows: Tensor, *, firsts: Tensor, starts: Tensor, out: Tensor
) -> None:
    """Shapes depend on no value, so it may be captured: a row's last page is written again where
    another row has more."""
    numbers = torch.arange(page_table.shape[1], dtype=torch.int32, device=starts.device)
    numbers = torch.minimum(numbers, starts.diff()[:, None] - 1)
    pages = page_table[rows[:, None], firsts[:, None] + numbers]
    out.index_put_(((starts[:-1, None] + numbers).long(),), pages.to(torch.int32))


@triton.jit
def _gather(
    page_table: tl.tensor,
    rows: tl.tensor,
    firsts: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    columns: int,
    BLOCK: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    indices = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + number)
    is_in = indices < tl.load(starts + number + 1) - start
    source = tl.load(rows + number) * columns + tl.load(firsts + number)
    pages = tl.load(page_table + source + indices, mask=is_in)
    tl.store(out + start + indices, pages.to(tl.int32), mask=is_in)
