"""Checkpoints: copies of the states of recurrent layers at the ends of some cached pages.

A checkpoint takes a page of its own pool, of megabytes. It is

- pending: a step in flight writes it, or the prefix tree has no node for it yet. It belongs to one
  allocation, and counts when the positions before it are committed.
- cached: a node of the prefix tree has it. It goes with its node, or before it, oldest first, when
  a new one is wanted. Each allocation locks the one at the end of its prefix.

state_cache.py alone writes both classes, but for `RowCheckpoints.branch_len`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from aserve.cache.pools import PagePool
from aserve.cache.windowed_pages import WindowedPages
from aserve.errors import BugError
from aserve.messages.base import ArrayI32


class Pending(NamedTuple):
    """A pending checkpoint of the states after the first `num_pages` pages of a sequence."""

    num_pages: int
    page: int


class RowCheckpoints:
    """The checkpoints of one allocation."""

    __slots__ = ("begin_len", "branch_len", "node", "pending")

    def __init__(self) -> None:
        # the position where another prompt parts with this one, and wants a checkpoint; 0 for none;
        # scheduling/checkpoints.py writes it
        self.branch_len = 0
        self.node = 0  # whose checkpoint it locks, at the end of its prefix
        self.begin_len = 0  # positions up to there: the row begins behind them, now or anew
        self.pending: list[Pending] = []  # in the order of their positions


class Checkpoints:
    """A passing checkpoint is of no use once its sequence has a later one."""

    __slots__ = ("_cached", "_passing", "_pool")

    def __init__(self, num_pages: int, *, num_nodes: int) -> None:
        self._pool = PagePool("states", num_pages)
        self._cached = WindowedPages(num_nodes)  # by node of the prefix tree
        self._passing: set[int] = set()  # pages

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_available(self) -> int:
        """Returns the number of pages that `take` could take now: free and unlocked ones."""
        return self._pool.num_free + len(self._cached.order)

    def take(self, *, is_passing: bool) -> int:
        """Returns a page for a new checkpoint, and gives up the oldest one if needed."""
        if not self._pool.num_free:
            self._pool.give_back(self._cached.evict(1))
        [page] = self._pool.take(1)
        (self._passing.add if is_passing else self._passing.discard)(page)
        return page

    def give_back(self, pending: Iterable[Pending]) -> None:
        self._pool.give_back([each.page for each in pending])

    def page_of(self, node: int) -> int:
        """Returns the page of a node's checkpoint, 0 if it has none."""
        return int(self._cached.pages[node])

    def last_of(self, nodes: ArrayI32) -> int:
        """Returns how many of the nodes stand up to the last one that has a checkpoint."""
        having = np.flatnonzero(self._cached.pages[nodes])
        return int(having[-1]) + 1 if len(having) else 0

    def is_passed(self, pending: Pending, *, last: int) -> bool:
        return pending.num_pages < last and pending.page in self._passing

    def cache(self, node: int, page: int) -> None:
        """Gives the checkpoint to a node, unless the node has one already."""
        if self._cached.pages[node]:
            self._pool.give_back([page])
            return
        self._cached.fill(node, page)
        self._cached.unlock(np.array([node], np.int32))

    def lock(self, node: int) -> None:
        self._cached.lock(np.array([node], np.int32))

    def unlock(self, node: int, *, is_passed: bool) -> None:
        """`is_passed`: a later checkpoint takes its place."""
        self._cached.unlock(np.array([node], np.int32))
        page = self.page_of(node)
        if is_passed and page in self._passing and not self._cached.locks[node]:
            self.drop([node])

    def drop(self, nodes: Sequence[int]) -> None:
        """Gives up the checkpoints of these nodes, which are evicted."""
        dropped = [self._cached.drop(node) for node in nodes if self._cached.pages[node]]
        self._pool.give_back(dropped)

    def evict_all(self) -> None:
        self._pool.give_back(self._cached.evict(len(self._cached.order)))

    def check(self, nodes: Sequence[int], rows: Sequence[RowCheckpoints]) -> None:
        """Raises BugError unless every page is free, of a node, or pending in one allocation, and
        the locks are those of `rows`. `nodes` are all nodes of the tree."""
        pages = self._cached.pages[np.asarray(nodes, np.int32)]
        pending = [each.page for row in rows for each in row.pending]
        owned = [*self._pool.free_pages(), *pages[pages > 0].tolist(), *pending]
        if sorted(owned) != list(range(1, self._pool.num_pages)):
            raise BugError(f"the {self._pool.num_pages} pages of checkpoints are owned: {owned}")
        users = Counter(row.node for row in rows if row.node)
        unlocked = set(self._cached.order.in_order())
        for node, page in zip(nodes, pages.tolist(), strict=True):
            locks = int(self._cached.locks[node]) if page else 0
            if locks != users[node] or (node in unlocked) != (page > 0 and not locks):
                raise BugError(
                    f"the checkpoint {page} of node {node} has {locks} locks, but {users[node]} "
                    f"users, and evictable is {node in unlocked}"
                )
