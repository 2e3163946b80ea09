"""What one sequence holds of the KV pool.

Knows nothing of requests, tokens or rows. Written by kv_cache.py only; others read it.
"""

from __future__ import annotations

from array import array

from aserve.cache.radix import Prefix


class Holding:
    """`pages[g][i]` is the page of page index i in group g, 0 where a window has left it behind.

    The first `num_shared` page indices are in the tree, which knows them as `prefix`: their pages
    are shared, and locked by this holding. The others are private. Lists only grow at their end, so
    a row's page table is append-only while the sequence lives.
    """

    __slots__ = ("is_inserting", "num_released", "pages", "prefix")

    def __init__(self, num_groups: int) -> None:
        self.pages: list[array[int]] = [array("i") for _ in range(num_groups)]
        self.prefix = Prefix()
        self.num_released = [0] * num_groups  # page indices below it are behind the group's window
        self.is_inserting = True

    @property
    def num_pages(self) -> int:
        """Page indices covered, those left behind included."""
        return len(self.pages[0])

    @property
    def num_shared(self) -> int:
        return self.prefix.num_pages
