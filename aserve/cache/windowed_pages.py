"""The pages of the prefix tree's nodes in one layer group with a window.

A sequence locks only the pages that it sees there, so locks are counted per page, and a node
without a page is a tombstone: evicted, or never entered. Written by radix.py and kv_cache.py only.
"""

from __future__ import annotations

import numpy as np

from aserve.cache.eviction import EvictionOrder
from aserve.errors import BugError
from aserve.messages.base import ArrayI32


class WindowedPages:
    """The pages that nodes have in a group with a window; `locks` counts who uses each."""

    __slots__ = ("locks", "order", "pages")

    def __init__(self, num_nodes: int) -> None:
        self.pages: ArrayI32 = np.zeros(num_nodes, np.int32)  # by node, 0 for a tombstone
        self.locks: ArrayI32 = np.zeros(num_nodes, np.int32)
        self.order = EvictionOrder(num_nodes)  # of nodes

    def lock(self, nodes: ArrayI32) -> None:
        if not self.pages[nodes].all():
            raise BugError(
                f"nodes {nodes.tolist()} were locked in a windowed group, a page is gone"
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
        """Puts `page` in place of a tombstone, locked once."""
        if self.pages[node]:
            raise BugError(f"page {page} was to fill node {node}, which has {self.pages[node]}")
        self.pages[node] = page
        self.locks[node] = 1

    def drop(self, node: int) -> int:
        """The page that the node had; 0 for none."""
        page = int(self.pages[node])
        if page and self.locks[node]:
            raise BugError(f"node {node} was evicted, its windowed page {page} is locked")
        if node in self.order:
            self.order.remove([node])
        self.pages[node] = 0
        return page

    def evict(self, count: int) -> list[int]:
        """Gives up the oldest pages, which leaves tombstones."""
        nodes = self.order.take(count)
        pages: list[int] = self.pages[nodes].tolist()
        self.pages[nodes] = 0
        return pages
