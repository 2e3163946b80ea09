"""How many pages each row of a forward reads, as one list in which a row's stand behind those of
the row before: the form that kernels without a page table want.

It knows no kernel. Pages that no query of a row sees any more are left out: behind a window the
table may still name pages that have other owners now.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.forward_batch import ForwardBatch
from aserve.messages import ArrayI32


@dataclass(frozen=True, slots=True)
class PageLists:
    """Host arrays, int32. Row r has the pages starts[r] up to starts[r + 1] of the list, one or
    more, and of the last one last_lens[r] tokens."""

    starts: ArrayI32  # [rows + 1]
    last_lens: ArrayI32  # [rows], from 1 to the page size


def list_pages(lens: ArrayI32, spans: ArrayI32, *, window: int | None, page_size: int) -> PageLists:
    """lens [rows], exact, with this forward's tokens; spans [rows] of them are queries."""
    counts = -(-lens // page_size)
    if window is not None:
        counts -= np.maximum(lens - spans - window + 1, 0) // page_size
    starts = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return PageLists(starts, (lens - 1) % page_size + 1)


def first_columns(batch: ForwardBatch, *, window: int | None, page_size: int) -> Tensor:
    """int32 [rows], on the device: where in the page table the pages of `list_pages` begin."""
    if window is None:
        return torch.zeros_like(batch.lens, dtype=torch.int32)
    unseen = (batch.lens - batch.query_starts.diff() - window + 1).clamp_(min=0)
    return torch.div(unseen, page_size, rounding_mode="floor").to(torch.int32)
