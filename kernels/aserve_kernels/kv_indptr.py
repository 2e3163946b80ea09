"""Where each row's pages begin in one list of all rows' pages, and how full the last one is: for
kernels that know no page table. Pages that no query of a row sees any more are not in the list.

It knows no page: `kv_indices` writes the list itself.
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
    """int32. Row r has the pages starts[r] up to starts[r + 1] of the list, which are those from
    column firsts[r] of its page table on, and of the last one last_lens[r] tokens."""

    firsts: Tensor  # [rows]
    starts: Tensor  # [rows + 1]
    last_lens: Tensor  # [rows], from 1 to the page size


def kv_indptr(
    lens: Tensor, cu_query_lens: Tensor, *, window: int | None, page_size: int, out: KvIndptr
) -> None:
    """lens int64 [rows], one or more, with the tokens of this forward; query_starts int64
    [rows + 1], where those begin. A query sees `window` tokens, itself among them; None: all."""
    _page_starts[(1,)](
        lens, cu_query_lens, out.firsts, out.starts, out.last_lens, len(lens),
        0 if window is None else window, page_size, window is not None, BLOCK,
    )  # fmt: skip


def page_starts_ref(
    lens: Tensor, cu_query_lens: Tensor, *, window: int | None, page_size: int, out: KvIndptr
) -> None:
    firsts = torch.zeros_like(lens)
    if window is not None:
        firsts = (lens - cu_query_lens.diff() - window + 1).clamp(min=0) // page_size
    counts = (lens + page_size - 1) // page_size - firsts
    out.firsts.copy_(firsts)
    out.starts.copy_(torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
    out.last_lens.copy_((lens - 1) % page_size + 1)


# One program, which goes through all rows in order: there are a few hundred of them.
@triton.jit(do_not_specialize=["num_rows"])
def _page_starts(
    lens: tl.tensor,
    cu_query_lens: tl.tensor,
    firsts: tl.tensor,
    starts: tl.tensor,
    last_lens: tl.tensor,
    num_rows: int,
    window: int,
    page_size: int,
    HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    total = tl.zeros((), tl.int32)
    tl.store(starts, total)
    for begin in range(0, num_rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        is_in = row < num_rows
        kv_len = tl.load(lens + row, mask=is_in, other=0)
        first = tl.zeros((BLOCK,), tl.int64)
        if HAS_WINDOW:
            query_start = tl.load(cu_query_lens + row, mask=is_in, other=0)
            query_len = tl.load(cu_query_lens + row + 1, mask=is_in, other=0) - query_start
            first = tl.maximum(kv_len - query_len - window + 1, 0) // page_size
        count = tl.where(is_in, (kv_len + page_size - 1) // page_size - first, 0).to(tl.int32)
        tl.store(firsts + row, first.to(tl.int32), mask=is_in)
        tl.store(starts + row + 1, total + tl.cumsum(count, 0), mask=is_in)
        tl.store(last_lens + row, ((kv_len - 1) % page_size + 1).to(tl.int32), mask=is_in)
        total += tl.sum(count, 0)
