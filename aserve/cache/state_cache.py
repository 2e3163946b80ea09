"""The KV cache of a model with recurrent layers, whose prefixes end with checkpoints of states.

A state of a recurrent layer cannot be cut back to an earlier token, so a sequence can only begin
behind a page whose checkpoint is there (checkpoints.py). So the pages of a sequence enter the
prefix tree up to its last checkpoint, and a match ends at a node with one. An allocation locks the
checkpoint at the end of its prefix, and its row begins there anew if results of it are dropped:
pages that others share are never computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from aserve.cache.allocation import PageAllocation
from aserve.cache.checkpoints import Checkpoints, Pending, RowCheckpoints
from aserve.cache.kv_cache import KvCache
from aserve.cache.prefix_tree import Prefix
from aserve.errors import BugError
from aserve.messages.executor import GroupSpec


class StateCache(KvCache):
    """Layer groups with windows are not supported."""

    __slots__ = ("checkpoints",)

    def __init__(
        self, groups: tuple[GroupSpec, ...], *, page_size: int, num_checkpoints: int
    ) -> None:
        if len(groups) > 1:
            raise BugError(f"a model with recurrent layers has no windows: {groups}")
        super().__init__(groups, page_size=page_size, prefix_cache=True)
        self.checkpoints = Checkpoints(num_checkpoints, num_nodes=groups[0].num_pages)

    # -------------------------------------------------------- for scheduling/checkpoints.py

    def num_alike(self, keys: Sequence[bytes], *, most: int) -> int:
        """Returns the pages of the longest cached prefix, wherever checkpoints are."""
        return self._tree.find(keys, stop=most).num_pages

    def take(self, allocation: PageAllocation, num_pages: int, *, is_passing: bool) -> int:
        """Returns the page of a new checkpoint behind so many pages, which is pending."""
        page = self.checkpoints.take(is_passing=is_passing)
        states_of(allocation).pending.append(Pending(num_pages, page))
        return page

    def forget_pending(self, allocation: PageAllocation) -> None:
        """The steps that write pending checkpoints were dropped."""
        states = states_of(allocation)
        self.checkpoints.give_back(states.pending)
        states.pending.clear()

    # -------------------------------------------------------- the life of an allocation

    def match(self, keys: Sequence[bytes], *, most: int | None = None) -> Prefix:
        prefix = self._tree.find(keys, stop=most)
        nodes = np.asarray(self._tree.nodes(prefix), np.int32)
        return self._tree.cut(prefix, self.checkpoints.last_of(nodes))

    def open(self, prefix: Prefix, *, skipped_len: int = 0) -> PageAllocation:
        allocation = super().open(prefix, skipped_len=skipped_len)
        allocation.states = RowCheckpoints()
        self._lock_end(allocation)
        return allocation

    def commit(self, allocation: PageAllocation, keys: Sequence[bytes], *, num_pages: int) -> None:
        num_pages = _num_cacheable(allocation, num_pages)
        if num_pages > allocation.num_shared:
            super().commit(allocation, keys, num_pages=num_pages)
            self._land(allocation, keys, num_pages)
            self._lock_end(allocation)

    def close(self, allocation: PageAllocation, keys: Sequence[bytes], *, num_pages: int) -> None:
        num_pages, states = _num_cacheable(allocation, num_pages), states_of(allocation)
        super().close(allocation, keys, num_pages=num_pages)
        self._land(allocation, keys, num_pages)
        self.forget_pending(allocation)
        if states.node:
            is_passed = num_pages * self._page_size > states.begin_len
            self.checkpoints.unlock(states.node, is_passed=is_passed)
            states.node = 0

    def evict_all(self) -> None:
        super().evict_all()
        self.checkpoints.evict_all()

    def check(self, allocations: Iterable[PageAllocation]) -> None:
        held = list(allocations)
        super().check(held)
        nodes = [node for run in self._tree for node in run.pages]
        self.checkpoints.check(nodes, [states_of(allocation) for allocation in held])
        for allocation in held:
            node, num_shared = states_of(allocation).node, allocation.num_shared
            if node != (allocation.pages[0][num_shared - 1] if num_shared else 0):
                raise BugError(f"a prefix of {num_shared} pages has the checkpoint of node {node}")

    # -------------------------------------------------------- helpers

    def _land(self, allocation: PageAllocation, keys: Sequence[bytes], num_pages: int) -> None:
        """Caches the checkpoints behind at most `num_pages` pages, which are committed. Those whose
        nodes the tree lacks stay pending: the allocation has pages of its own for equal tokens."""
        states, kept = states_of(allocation), list[Pending]()
        for each in states.pending:
            if each.num_pages > num_pages:
                kept.append(each)
            elif self.checkpoints.is_passed(each, last=num_pages):
                self.checkpoints.give_back([each])
            elif (run := self._tree.get(keys[each.num_pages - 1])) is None:
                kept.append(each)
            else:
                self.checkpoints.cache(run.pages[each.num_pages - 1 - run.start], each.page)
        states.pending = kept

    def _lock_end(self, allocation: PageAllocation) -> None:
        """Moves the lock of the allocation to the checkpoint at the end of its prefix."""
        states, num_pages = states_of(allocation), allocation.num_shared
        node = allocation.pages[0][num_pages - 1] if num_pages else 0
        if node == states.node:
            return
        self.checkpoints.lock(node)
        if states.node:
            self.checkpoints.unlock(states.node, is_passed=True)
        states.node, states.begin_len = node, num_pages * self._page_size

    def _evict(self, group: int, count: int) -> None:
        for nodes in self._tree.evict(count).values():
            self.checkpoints.drop(nodes)
            self._pools[group].give_back(nodes)


def states_of(allocation: PageAllocation) -> RowCheckpoints:
    assert allocation.states is not None
    return allocation.states


def _num_cacheable(allocation: PageAllocation, num_pages: int) -> int:
    """Returns how many of the first `num_pages` pages, which are committed, may enter the tree."""
    ends = [each.num_pages for each in states_of(allocation).pending]
    return max([end for end in ends if end <= num_pages], default=allocation.num_shared)
