"""The free pages of one layer group, and the free rows. kv_cache.py alone writes a PagePool."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np

from aserve.errors import BugError

FEW = 64  # pages up to which a Python loop is faster than numpy


class PagePool:
    """Pages 1..num_pages - 1. Page 0 is padding and is never taken. The page that was freed last is
    taken first.
    """

    __slots__ = ("_flags", "_free", "_is_free", "name", "num_pages")

    def __init__(self, name: str, num_pages: int) -> None:
        self.name = name
        self.num_pages = num_pages
        self._free = array("i", range(num_pages - 1, 0, -1))
        self._is_free = bytearray([0]) + bytearray(b"\x01") * (num_pages - 1)
        self._flags = np.frombuffer(self._is_free, np.uint8)  # a writable view of `_is_free`

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_pages(self) -> Iterable[int]:
        return iter(self._free)

    def take(self, count: int) -> array[int]:
        if not 0 <= count <= len(self._free):
            raise BugError(
                f"group {self.name!r}: {count} pages were asked for, but {len(self._free)} are free"
            )
        if count == 1:
            page = self._free.pop()
            self._is_free[page] = 0
            return array("i", [page])
        rest = len(self._free) - count
        taken = self._free[rest:]
        del self._free[rest:]
        taken.reverse()
        if count <= FEW:
            for page in taken:
                self._is_free[page] = 0
        else:
            self._flags[taken] = 0
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        if len(pages) <= FEW or not self._are_taken(pages):
            is_free, num_pages = self._is_free, self.num_pages
            for page in pages:
                if not 0 < page < num_pages or is_free[page]:
                    self._refuse(page)
                is_free[page] = 1
        else:
            self._flags[pages] = 1
        self._free.extend(pages)

    def _are_taken(self, pages: Sequence[int]) -> bool:
        values = np.asarray(pages, np.int32)
        is_inside = values.min() > 0 and values.max() < self.num_pages
        return bool(is_inside and not self._flags[values].any() and _are_distinct(values))

    def _refuse(self, page: int) -> NoReturn:
        if not 0 < page < self.num_pages:
            raise BugError(
                f"group {self.name!r}: page {page} came back, but pages are 1..{self.num_pages - 1}"
            )
        raise BugError(f"group {self.name!r}: page {page} came back, but it is free already")


def _are_distinct(values: np.ndarray[tuple[int], np.dtype[np.int32]]) -> bool:
    ordered = np.sort(values)
    return not (ordered[1:] == ordered[:-1]).any()


class RowPool:
    """Rows 1..max_rows. Row 0 is padding and is never taken. Data-parallel ranks have rows in turn
    (`rank_of`).

    The lowest free row of a rank is taken first, so the rows in use stay dense, and a recording
    replays exactly.
    """

    __slots__ = ("_free", "_is_free", "max_rows", "num_free")

    def __init__(self, max_rows: int, *, dp_size: int = 1) -> None:
        self.max_rows = self.num_free = max_rows
        # by rank; ascending, so each is a heap
        self._free = [list(range(1 + rank, max_rows + 1, dp_size)) for rank in range(dp_size)]
        self._is_free = bytearray([0]) + bytearray(b"\x01") * max_rows

    def num_free_of(self, rank: int) -> int:
        return len(self._free[rank])

    def num_taken_of(self, rank: int) -> int:
        num_rows = len(range(rank, self.max_rows, len(self._free)))
        return num_rows - len(self._free[rank])

    def take(self, rank: int = 0) -> int:
        if not self._free[rank]:
            taken = self.num_taken_of(rank)
            raise BugError(f"a row was asked for, but all {taken} are taken on rank {rank}")
        row = heapq.heappop(self._free[rank])
        self._is_free[row] = 0
        self.num_free -= 1
        return row

    def give_back(self, row: int) -> None:
        if not 0 < row <= self.max_rows:
            raise BugError(f"row {row} came back, but rows are 1..{self.max_rows}")
        if self._is_free[row]:
            raise BugError(f"row {row} came back, but it is free already")
        self._is_free[row] = 1
        self.num_free += 1
        heapq.heappush(self._free[(row - 1) % len(self._free)], row)
