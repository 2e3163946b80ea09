"""What one sequence holds of the KV pool.

Knows nothing of requests, tokens or rows. Written by kv_cache.py only; others read it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from aserve.cache.prefix_tree import Prefix


class PageAllocation:
    """`pages[g][i]` is the page of page index i in group g, 0 where a window has left it behind.

    The first `num_shared` page indices are in the tree, which knows them as `prefix`: their pages
    are shared, and locked by this holding. The others are private. Lists only grow at their end, so
    a row's page table is append-only while the sequence lives.
    """

    __slots__ = ("is_inserting", "num_holds", "num_pages", "num_released", "pages", "prefix")

    def __init__(self, num_groups: int) -> None:
        self.pages: list[array[int]] = [array("i") for _ in range(num_groups)]
        self.num_pages = 0  # page indices covered, those left behind included
        self.prefix = Prefix()
        self.num_released = [0] * num_groups  # page indices below it are behind the group's window
        self.is_inserting = True
        self.num_holds = 0  # transfers that use its pages: these outlive the sequence

    @property
    def num_shared(self) -> int:
        return self.prefix.num_pages


def num_shared_pages(allocations: Sequence[PageAllocation]) -> int:
    """The leading page indices at which all of them have one page in group 0; 0 for one alone.

    Such a page is in the tree: whole, committed, and written by nobody any more. A page names its
    whole prefix, so where two holdings have the same one, all before it are the same.
    """
    if len(allocations) < 2:
        return 0
    first = allocations[0]
    num_shared = first.num_shared
    for allocation in allocations[1:]:
        num_shared = _num_alike(first, allocation, most=num_shared)
        if not num_shared:
            break
    return num_shared


def _num_alike(one: PageAllocation, other: PageAllocation, *, most: int) -> int:
    """PERF: mostly there is nothing in common, or as much as with the row before."""
    most = min(most, other.num_shared)
    left, right = one.pages[0], other.pages[0]
    if not most or left[0] != right[0]:
        return 0
    if left[most - 1] == right[most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda index: left[index] != right[index])
