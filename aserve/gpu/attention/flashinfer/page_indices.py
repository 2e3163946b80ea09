"""How many pages each row of a forward reads, as one list in which a row's stand behind those of
the row before: the form that kernels without a page table want. On the host for their plans, and on
the device for themselves.

It knows no kernel that attends. Pages that no query of a row sees any more are left out: behind a
window the table may still name pages that have other owners now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.base import ArrayI32
from aserve_kernels.kv_indices import kv_indices
from aserve_kernels.kv_indptr import KvIndptr, kv_indptr


@dataclass(frozen=True, slots=True)
class PageLists:
    """Host arrays, int32. Row r has the pages starts[r] up to starts[r + 1] of the list, one or
    more, and of the last one last_lens[r] tokens; lens[r] in all of them."""

    starts: ArrayI32  # [rows + 1]
    last_lens: ArrayI32  # [rows], from 1 to the page size
    lens: ArrayI32  # [rows]


def list_pages(
    lens: ArrayI32, query_lens: ArrayI32, *, window: int | None, page_size: int
) -> PageLists:
    """lens [rows], exact, with this forward's tokens; spans [rows] of them are queries."""
    counts = -(-lens // page_size)
    if window is not None:
        counts -= np.maximum(lens - query_lens - window + 1, 0) // page_size
    starts = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    last_lens = (lens - 1) % page_size + 1
    return PageLists(starts, last_lens, (counts - 1) * page_size + last_lens)


@dataclass(frozen=True, slots=True)
class ListOps:
    """How lists are written on the device."""

    starts: Callable[..., None] = kv_indptr
    gather: Callable[..., None] = kv_indices


KERNELS = ListOps()


@dataclass(frozen=True, slots=True)
class PageList:
    """The same on the device, int32, with the pages."""

    indices: KvIndptr
    pages: Tensor  # [indices.indptr[rows] or more]

    @classmethod
    def new(cls, num_rows: int, pages: Tensor) -> PageList:
        """Nothing is in it yet."""
        sizes = (num_rows, num_rows + 1, num_rows)
        return cls(KvIndptr(*(pages.new_empty(size) for size in sizes)), pages)

    def write(
        self,
        batch: ForwardBatch,
        table: Tensor,
        ops: ListOps,
        *,
        window: int | None,
        page_size: int,
    ) -> None:
        """Of the batch's rows, from lengths that are on the device: so it may be captured."""
        ops.starts(
            batch.lens, batch.cu_query_lens, window=window, page_size=page_size, out=self.indices
        )
        ops.gather(
            table,
            batch.rows,
            first_columns=self.indices.first_columns,
            indptr=self.indices.indptr,
            out=self.pages,
        )
