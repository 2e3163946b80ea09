"""The pages of the KV cache that one sequence holds.

kv_cache.py alone writes a PageAllocation; others read it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from aserve.cache.checkpoints import RowCheckpoints
from aserve.cache.prefix_tree import NO_PREFIX


class PageAllocation:
    """`pages[g][i]` is the page of group g at page index i, or 0 if it has left the group's window.

    The first `num_shared` pages are the nodes of `prefix` in the prefix tree. They are shared, and
    this allocation locks them. The others are private. The lists only grow at their end, so the
    page table of a row is append-only while its sequence runs.
    """

    __slots__ = (
        *("is_inserting", "num_holds", "num_pages", "num_released", "pages", "prefix", "rank"),
        "states",
    )

    def __init__(self, num_groups: int, *, rank: int = 0) -> None:
        self.rank = rank  # the data-parallel rank that has the pages
        self.pages: list[array[int]] = [array("i") for _ in range(num_groups)]
        self.num_pages = 0  # page indices, with those that have left a window
        self.prefix = NO_PREFIX
        self.num_released = [0] * num_groups  # page indices below it have left the group's window
        self.is_inserting = True  # its committed pages enter the tree
        self.states: RowCheckpoints | None = None  # of a model with recurrent layers
        self.num_holds = 0  # transfers that use its pages: these outlive the sequence

    @property
    def num_shared(self) -> int:
        return self.prefix.num_pages

    def packed(self) -> tuple[bytes, ...]:
        """Returns the pages of each group as bytes of int32."""
        return tuple(pages.tobytes() for pages in self.pages)


def num_shared_pages(allocations: Sequence[PageAllocation]) -> int:
    """Returns how many leading pages of group 0 all allocations share, 0 for a single one.

    A shared page is in the tree: it is full and committed, and is not written any more. Each node
    has one prefix, so if two allocations share a page, they share all pages before it.
    """
    if len(allocations) < 2:
        return 0
    first = allocations[0]
    num_shared = first.num_shared
    for allocation in allocations[1:]:
        num_shared = _num_common(first, allocation, most=num_shared)
        if not num_shared:
            break
    return num_shared


def _num_common(one: PageAllocation, other: PageAllocation, *, most: int) -> int:
    """PERF: most pairs share nothing, or `most` pages, which is checked before the bisection."""
    most = min(most, other.num_shared)
    left, right = one.pages[0], other.pages[0]
    if not most or left[0] != right[0]:
        return 0
    if left[most - 1] == right[most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda index: left[index] != right[index])
