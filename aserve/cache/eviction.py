"""The pages of one layer group that may be evicted, in the order in which they became evictable.

Every operation takes an array of pages and costs a few numpy calls. Written by radix.py only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from aserve.messages.base import ArrayI32

NOWHERE = -1


class EvictionOrder:
    """A queue of pages from which any page can be taken out.

    `_entries[_head:_tail]` is the queue; an entry counts if `_places` of its page points at it, so
    that a page is taken out by forgetting its place. Where the entries reach the end of their
    array, those that count move to its start.
    PERF: moving costs about 1 ms for 100,000 pages, once per so many pages that were added.
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
        """Oldest first."""
        return [int(page) for page in self._valid_entries()]

    def add(self, pages: Sequence[int] | ArrayI32) -> None:
        """Puts pages that are not here behind all others."""
        count = len(pages)
        if self._tail + count > len(self._entries):
            self._move_to_start()
        start, self._tail = self._tail, self._tail + count
        added = self._entries[start : self._tail]
        added[:] = pages
        self._places[added] = np.arange(start, self._tail, dtype=np.int32)
        self._num += count

    def remove(self, pages: Sequence[int] | ArrayI32) -> None:
        """Takes out pages that are here."""
        self._places[np.asarray(pages, np.int32)] = NOWHERE
        self._num -= len(pages)

    def take(self, count: int) -> array[int]:
        """Takes out the oldest pages, oldest first; there must be so many."""
        assert count <= self._num
        taken: array[int] = array("i")
        while len(taken) < count:
            window = self._entries[self._head : min(self._head + 2 * count, self._tail)]
            places = np.arange(self._head, self._head + len(window), dtype=np.int32)
            found = np.flatnonzero(self._places[window] == places)[: count - len(taken)]
            taken.frombytes(window[found].tobytes())
            is_done = len(taken) == count
            self._head += int(found[-1]) + 1 if is_done and len(found) else len(window)
        self.remove(taken)
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
