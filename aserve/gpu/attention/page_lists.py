"""The pages that rows of a forward read, as one list in which each row has its part: the form that
kernels without a page table want.

It knows no kernel. Positions that no query of a row sees any more are left out as whole pages:
the table may still name pages behind a window, which have other owners now.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.messages import ArrayI32


@dataclass(frozen=True, slots=True)
class PageLists:
    """Host arrays, int32. Row r reads starts[r + 1] - starts[r] pages, from the column firsts[r] of
    its page table on, and of the last one last_lens[r] tokens."""

    starts: ArrayI32  # [rows + 1]
    firsts: ArrayI32  # [rows]
    last_lens: ArrayI32  # [rows], from 1 to the page size

    @property
    def num_pages(self) -> int:
        return int(self.starts[-1])


def list_pages(lens: ArrayI32, spans: ArrayI32, *, window: int | None, page_size: int) -> PageLists:
    """lens [rows], exact, with this forward's tokens; spans [rows] of them are queries."""
    if window is None:
        firsts = np.zeros_like(lens)
    else:
        firsts = np.maximum(lens - spans - window + 1, 0) // page_size
    counts = -(-lens // page_size) - firsts
    starts = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return PageLists(starts, firsts, (lens - 1) % page_size + 1)


def gather_pages(
    page_table: Tensor, rows: Tensor, *, starts: Tensor, firsts: Tensor, num_pages: int
) -> Tensor:
    """-> int32 [num_pages], row after row. page_table int64 [rows of it, columns], rows int64 [n],
    starts int32 [n + 1] and firsts int32 [n], all on the device."""
    owners = torch.repeat_interleave(starts.diff(), output_size=num_pages)
    numbers = torch.arange(num_pages, dtype=torch.int32, device=starts.device)
    columns = numbers + (firsts - starts[:-1]).index_select(0, owners)
    return page_table[rows.index_select(0, owners), columns].to(torch.int32)
