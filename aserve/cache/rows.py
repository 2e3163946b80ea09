"""The free rows: a request's place in every table of the device.

Knows nothing of requests. Written by the scheduler's admission and leaving only.
"""

from __future__ import annotations

import heapq

from aserve.errors import BugError


class RowPool:
    """Rows 1..max_rows; row 0 is padding and is never given out.

    The lowest free row is taken first: the rows in use stay dense, and a trace replays exactly.
    """

    __slots__ = ("_free", "_is_free", "max_rows")

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._free = list(range(1, max_rows + 1))  # ascending, so it is a heap
        self._is_free = bytearray([0]) + bytearray(b"\x01") * max_rows

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise BugError(f"a row was asked for, but all {self.max_rows} are taken")
        row = heapq.heappop(self._free)
        self._is_free[row] = 0
        return row

    def give_back(self, row: int) -> None:
        if not 0 < row <= self.max_rows:
            raise BugError(f"row {row} came back, but rows are 1..{self.max_rows}")
        if self._is_free[row]:
            raise BugError(f"row {row} came back, but it is free already")
        self._is_free[row] = 1
        heapq.heappush(self._free, row)
