"""Each test breaks one thing and wants the check to tell its story."""

from array import array
from collections.abc import Callable

import numpy as np
import pytest

from aserve.cache.allocation import PageAllocation
from aserve.cache.conservation import check_conservation
from aserve.cache.pools import PagePool
from aserve.cache.prefix_tree import Prefix, PrefixTree, Run
from aserve.errors import BugError


class Parts:
    """Two groups of 6 pages; an allocation with two nodes and a private page, and an evictable node
    that branches off behind the first.
    """

    def __init__(self) -> None:
        self.pools = (PagePool("full", 7), PagePool("window", 7))
        self.tree = PrefixTree(7, windowed_groups=(1,))
        self.allocation = PageAllocation(2)
        for pool, pages in zip(self.pools, self.allocation.pages, strict=True):
            pages.extend(pool.take(3))
        self.allocation.num_pages = 3
        self.allocation.prefix = self.insert(Prefix(), [b"a", b"b"], pages=[1, 2])
        assert self.allocation.prefix.run is not None
        self.run: Run = self.allocation.prefix.run
        for pool in self.pools:
            pool.take(1)
        branch = self.tree.cut(self.allocation.prefix, 1)
        self.tree.lock(branch)
        self.leaf = self.insert(branch, [b"c"], pages=[4])
        self.tree.unlock(self.leaf)
        self.tree.windowed[1].unlock(np.array([4], np.int32))

    def insert(self, prefix: Prefix, keys: list[bytes], *, pages: list[int]) -> Prefix:
        return self.tree.insert(prefix, keys, pages=[array("i", pages)] * 2)

    def check(self) -> None:
        check_conservation(self.pools, self.tree, allocations=[self.allocation])


def test_what_is_right_passes() -> None:
    parts = Parts()
    parts.check()
    parts.pools[1].give_back(parts.tree.windowed[1].evict(1))
    parts.check()


def private_page_in_the_tree(parts: Parts) -> None:
    parts.allocation.pages[0][2] = 4
    parts.pools[0].give_back([3])


def page_that_does_not_exist(parts: Parts) -> None:
    parts.allocation.pages[1][2] = 7
    parts.pools[1].give_back([3])


def shared_page_that_is_not_the_trees(parts: Parts) -> None:
    parts.allocation.pages[0][1] = 3


def windowed_page_that_is_not_the_trees(parts: Parts) -> None:
    parts.allocation.pages[1][1] = 3


def gap_in_the_full_group(parts: Parts) -> None:
    parts.allocation.pages[0][2] = 0
    parts.pools[0].give_back([3])


def groups_of_unequal_length(parts: Parts) -> None:
    parts.pools[1].give_back([parts.allocation.pages[1].pop()])


def nodes_beyond_the_pages(parts: Parts) -> None:
    parts.allocation.num_pages = 1
    for pages in parts.allocation.pages:
        del pages[1:]


def key_of_another_run(parts: Parts) -> None:
    parts.run.keys[1] = b"c"


def windowed_lock_without_an_allocation(parts: Parts) -> None:
    parts.tree.windowed[1].lock(np.array([4], np.int32))


def locked_length_that_is_no_users(parts: Parts) -> None:
    parts.run.locked_end = 1


def tombstone_that_waits_for_eviction(parts: Parts) -> None:
    parts.tree.windowed[1].pages[4] = 0
    parts.pools[1].give_back([4])


def parent_that_would_be_evicted_first(parts: Parts) -> None:
    parts.tree.unlock(parts.allocation.prefix)
    parts.allocation.prefix = Prefix()
    parts.tree.order.remove([4])
    parts.tree.order.add([4])


def run_whose_parents_end_was_evicted(parts: Parts) -> None:
    assert parts.leaf.run is not None
    parts.leaf.run.start = parts.leaf.run.locked_end = 3


@pytest.mark.parametrize(
    ("spoil", "story"),
    [
        (lambda parts: parts.pools[1].take(1), r"'window': page 5 of 7 is owned by \[\]"),
        (
            lambda parts: parts.pools[0].give_back([3]),
            r"page 3 .*'free', 'allocation 0, page index 2'",
        ),
        (private_page_in_the_tree, r"page 4 .*prefix 63.*page index 2"),
        (page_that_does_not_exist, "page 7 of 7"),
        (shared_page_that_is_not_the_trees, "index 1: page 3 in group 0, the tree has 2"),
        (windowed_page_that_is_not_the_trees, "index 1: page 3 in group 1, the tree has 2"),
        (gap_in_the_full_group, "lacks a page in group 0"),
        (groups_of_unequal_length, r"covers \[3, 2\] pages"),
        (nodes_beyond_the_pages, "2 nodes for 1 pages"),
        (lambda parts: parts.run.pages.pop(), "its last page was evicted"),
        (key_of_another_run, "the run of 61 has a key of another run"),
        (lambda parts: parts.tree.lock(parts.leaf), "the run of .* has the users"),
        (windowed_lock_without_an_allocation, "page 4 of group 1: 1 locks, but 0 allocations"),
        (
            lambda parts: parts.tree.unlock(parts.allocation.prefix),
            "the run of 61 has the users",
        ),
        (locked_length_that_is_no_users, r"is locked up to 1, its users are \{2: 1\}"),
        (
            lambda parts: parts.tree.order.add([2]),
            "node 2: locked is True, but evictable is True",
        ),
        (tombstone_that_waits_for_eviction, "page 0 of group 1: 0 locks, but evictable is True"),
        (parent_that_would_be_evicted_first, "the run of 63 would be evicted after its parent"),
        (run_whose_parents_end_was_evicted, "begins at 3: the node before it was evicted"),
    ],
)
def test_what_is_spoilt_is_told(spoil: Callable[[Parts], object], story: str) -> None:
    parts = Parts()
    spoil(parts)
    with pytest.raises(BugError, match=story):
        parts.check()
