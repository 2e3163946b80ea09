"""The page indices of a forward's rows in FlashInfer's CSR form: indptr, indices, last_page_len.

Row r has the pages `indices[indptr[r] : indptr[r + 1]]`, one or more, and its last page holds
`last_page_lens[r]` tokens. The host computes indptr and last_page_lens for FlashInfer's plans, and
the device computes all three for its kernels. Pages before the window of all of a row's queries are
left out, because the page table may still name pages there that were given to another row.
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
from aserve_kernels.packed_mask import ListedKeys, PackedMask, packed_mask
from aserve_kernels.paged_rows import TreeMask


@dataclass(frozen=True, slots=True)
class PageIndptr:
    """The CSR form on the host, without the indices. All arrays are int32."""

    indptr: ArrayI32  # [rows + 1]
    last_page_lens: ArrayI32  # [rows], from 1 to the page size
    lens: ArrayI32  # [rows], tokens in all listed pages of a row


def page_indptr(
    lens: ArrayI32, query_lens: ArrayI32, *, window: int | None, page_size: int
) -> PageIndptr:
    """lens [rows]: exact KV lengths with this forward's query_lens [rows] tokens."""
    counts = -(-lens // page_size)
    if window is not None:
        counts -= np.maximum(lens - query_lens - window + 1, 0) // page_size
    indptr = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    last_page_lens = (lens - 1) % page_size + 1
    return PageIndptr(indptr, last_page_lens, (counts - 1) * page_size + last_page_lens)


@dataclass(frozen=True, slots=True)
class CsrOps:
    """The kernels that compute the CSR form on the device, and the masks of draft trees."""

    indptr: Callable[..., None] = kv_indptr
    indices: Callable[..., None] = kv_indices
    mask: Callable[..., None] = packed_mask


KERNELS = CsrOps()


@dataclass(frozen=True, slots=True)
class PageIndices:
    """The CSR form on the device, int32."""

    csr: KvIndptr
    indices: Tensor  # [csr.indptr[rows] or more]
    mask: PackedMask | None = None  # of draft trees
    max_mask_bytes: int = 0  # of one row

    @classmethod
    def empty(
        cls, num_rows: int, indices: Tensor, bits: Tensor | None = None, *, max_mask_bytes: int = 0
    ) -> PageIndices:
        """Allocates indptr and last_page_lens beside `indices`, all still to be written. `bits`,
        uint8, are for masks of at most max_mask_bytes for each row."""
        sizes = (num_rows, num_rows + 1, num_rows)
        csr = KvIndptr(*(indices.new_empty(size) for size in sizes))
        mask = None if bits is None else PackedMask(bits, indices.new_empty(num_rows + 1))
        return cls(csr, indices, mask, max_mask_bytes)

    def write(
        self,
        batch: ForwardBatch,
        page_table: Tensor,
        ops: CsrOps,
        *,
        window: int | None,
        page_size: int,
    ) -> None:
        """Computes the form from lengths on the device, so this can be captured in a graph."""
        ops.indptr(
            batch.lens, batch.cu_query_lens, window=window, page_size=page_size, out=self.csr
        )
        ops.indices(
            page_table,
            batch.rows,
            first_columns=self.csr.first_columns,
            indptr=self.csr.indptr,
            out=self.indices,
        )
        if self.mask is None:
            return
        assert batch.tree_mask is not None
        query_lens = batch.query_lens.index_select(0, batch.token_to_row)
        listed = ListedKeys(
            batch.lens, batch.cu_query_lens, self.csr.first_columns, page_size, self.max_mask_bytes
        )
        ops.mask(TreeMask.of(batch.tree_mask, query_lens), listed, window=window, out=self.mask)
