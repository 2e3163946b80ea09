"""The pages of the prefix tree's nodes in one layer group with a window.

A sequence locks only the pages that it sees, so locks are counted per page. A node without a page
is a tombstone: the page was evicted, or the node never had one. prefix_tree.py and kv_cache.py
write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from aserve.cache.eviction import EvictionOrder
from aserve.errors import BugError
from aserve.messages.base import ArrayI32


class WindowedPages:
    """`pages[node]` is the page of a node, and `locks[node]` is the number of its users."""

    __slots__ = ("locks", "order", "pages")

    def __init__(self, num_nodes: int) -> None:
        self.pages: ArrayI32 = np.zeros(num_nodes, np.int32)  # by node, 0 for a tombstone
        self.locks: ArrayI32 = np.zeros(num_nodes, np.int32)
        self.order = EvictionOrder(num_nodes)  # of nodes

    def lock(self, nodes: ArrayI32) -> None:
        if not self.pages[nodes].all():
            raise BugError(
                f"nodes {nodes.tolist()} were locked in a windowed group, but one has no page"
            )
        fresh = nodes[self.locks[nodes] == 0]
        self.locks[nodes] += 1
        self.order.remove(fresh)

    def unlock(self, nodes: ArrayI32) -> None:
        left = self.locks[nodes] - 1
        if (left < 0).any():
            raise BugError(f"nodes {nodes.tolist()} were unlocked in a windowed group twice")
        self.locks[nodes] = left
        self.order.add(nodes[left == 0])

    def fill(self, node: int, page: int) -> None:
        """Replaces a tombstone by `page`, which is locked once."""
        if self.pages[node]:
            raise BugError(f"page {page} was to fill node {node}, which has {self.pages[node]}")
        self.pages[node] = page
        self.locks[node] = 1

    def drop(self, node: int) -> int:
        """Removes the node and returns its page, or 0 if it had none."""
        page = int(self.pages[node])
        if page and self.locks[node]:
            raise BugError(f"node {node} was evicted, but its windowed page {page} is locked")
        if node in self.order:
            self.order.remove([node])
        self.pages[node] = 0
        return page

    def evict(self, count: int) -> list[int]:
        """Evicts the oldest pages and returns them. Their nodes become tombstones."""
        nodes = self.order.take(count)
        pages: list[int] = self.pages[nodes].tolist()
        self.pages[nodes] = 0
        return pages


def usable_len(
    nodes: ArrayI32,
    windowed: Mapping[int, WindowedPages],
    first_visible: Callable[[int, int], int],
    *,
    page_size: int,
) -> int:
    """Returns to how many of its nodes a prefix must be shortened, so that its end sees no
    tombstone. `first_visible` returns the first page of a group that a position sees.
    """
    usable = len(nodes)

    def last_gap() -> int | None:
        """Returns the last tombstone that the position after these pages sees."""
        for group, pages in windowed.items():
            first = first_visible(group, usable * page_size)
            gaps = np.flatnonzero(pages.pages[nodes[first:usable]] == 0)
            if len(gaps):
                return first + int(gaps[-1])
        return None

    while (gap := last_gap()) is not None:
        usable = gap
    return usable
