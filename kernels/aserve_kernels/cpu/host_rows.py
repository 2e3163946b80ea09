"""The inputs of the CPU attention kernels as numpy arrays: the counterpart of `PagedRows`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numba import njit

Int64s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

NO_WINDOW = 1 << 62  # the window of a layer without one


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The rows of a step, int64 [n] each. A row's queries are its last positions."""

    rows: Int64s  # each row's row of the page table
    lens: Int64s  # KV lengths with this step's queries
    starts: Int64s  # the token index of each row's first query
    query_lens: Int64s


@dataclass(frozen=True, slots=True)
class HostRows:
    page_table: Int64s  # [max_rows + 1, pages]
    page_size: int
    queries: QueryRows


@njit(inline="always")
def find_slots(pages: Int64s, page_size: int, first: int, size: int, slots: Int64s) -> None:
    """Writes the slots of `size` tokens of a row, from number `first` on."""
    column = first // page_size
    offset = first % page_size
    for j in range(size):
        slots[j] = pages[column] * page_size + offset
        offset += 1
        if offset == page_size:
            offset = 0
            column += 1
