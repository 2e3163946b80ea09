"""Rows of queries over paged keys and values, as arrays of the host: what kernels for the CPU read.

It knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Int64s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

NO_WINDOW = 1 << 62


@dataclass(frozen=True, slots=True)
class QueryRows:
    """int64 [n] each: `rows` of the page table; `lens`, KV lengths with this forward's tokens;
    `starts`, the first query of each row; `query_lens`, its queries, which are at its last
    positions."""

    rows: Int64s
    lens: Int64s
    starts: Int64s
    query_lens: Int64s


@dataclass(frozen=True, slots=True)
class HostRows:
    """`page_table`: int64 [rows, pages]."""

    page_table: Int64s
    page_size: int
    own: QueryRows
