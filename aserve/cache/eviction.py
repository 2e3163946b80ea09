"""The evictable pages of one layer group, in the order in which they became evictable (LRU).

Each operation takes an array of pages and costs a few numpy calls. prefix_tree.py and
windowed_pages.py write it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from aserve.messages.base import ArrayI32

FEW = 16  # pages up to which a Python loop is faster than numpy
NOWHERE = -1  # the place of a page that is not in the queue


class EvictionOrder:
    """A queue of pages from which any page can be removed.

    `_entries[_head:_tail]` is the queue. An entry is valid if `_places` of its page points at it,
    so a page is removed by resetting its place. When the queue reaches the end of the array, the
    valid entries move to its start.
    PERF: the move takes about 1 ms for 100,000 pages, and occurs once per 100,000 added pages.
    """

    __slots__ = ("_entries", "_head", "_num", "_places", "_tail")

    def __init__(self, num_pages: int) -> None:
        self._entries: ArrayI32 = np.zeros(2 * num_pages, np.int32)
        self._places: ArrayI32 = np.full(num_pages, NOWHERE, np.int32)
        self._head = 0
        self._tail = 0
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, page: int) -> bool:
        return bool(self._places[page] != NOWHERE)

    def in_order(self) -> list[int]:
        """Returns the pages, oldest first."""
        return [int(page) for page in self._valid_entries()]

    def add(self, pages: Sequence[int] | ArrayI32) -> None:
        """Appends pages that are not in the queue."""
        count = len(pages)
        if self._tail + count > len(self._entries):
            self._move_to_start()
        start, self._tail = self._tail, self._tail + count
        self._num += count
        if count <= FEW:
            entries, places = self._entries.data, self._places.data
            for place, page in enumerate(pages, start):
                entries[place] = page
                places[page] = place
            return
        added = self._entries[start : self._tail]
        added[:] = pages
        self._places[added] = np.arange(start, self._tail, dtype=np.int32)

    def remove(self, pages: Sequence[int] | ArrayI32) -> None:
        """Removes pages that are in the queue."""
        self._places[np.asarray(pages, np.int32)] = NOWHERE
        self._num -= len(pages)

    def take(self, count: int) -> array[int]:
        """Removes and returns the `count` oldest pages. There must be that many."""
        assert count <= self._num
        taken: array[int] = array("i")
        entries, places, head = self._entries.data, self._places.data, self._head
        while len(taken) < count:
            page = entries[head]
            if places[page] == head:
                places[page] = NOWHERE
                taken.append(page)
            head += 1
        self._head = head
        self._num -= count
        return taken

    def _valid_entries(self) -> ArrayI32:
        entries = self._entries[self._head : self._tail]
        places = np.arange(self._head, self._tail, dtype=np.int32)
        valid: ArrayI32 = entries[self._places[entries] == places]
        return valid

    def _move_to_start(self) -> None:
        valid = self._valid_entries()
        self._head, self._tail = 0, len(valid)
        self._entries[: self._tail] = valid
        self._places[valid] = np.arange(self._tail, dtype=np.int32)
