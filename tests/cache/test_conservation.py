"""Each test breaks one thing and wants the check to tell its story."""

from array import array

import numpy as np
import pytest

from aserve.cache.allocation import PageAllocation
from aserve.cache.conservation import check_conservation
from aserve.cache.pools import PagePool
from aserve.cache.prefix_tree import Prefix, PrefixTree, Run
from aserve.errors import BugError


class Parts:
    """Two groups of 6 pages; a holding with two nodes and a private page, and an evictable node
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


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_what_is_right_passes(parts: Parts) -> None:
    parts.check()
    parts.pools[1].give_back(parts.tree.windowed[1].evict(1))
    parts.check()


def test_a_lost_page_is_named(parts: Parts) -> None:
    parts.pools[1].take(1)
    with pytest.raises(BugError, match=r"'window': page 5 of 7 is owned by \[\]"):
        parts.check()


def test_a_page_that_is_held_and_free_is_named_with_both_owners(parts: Parts) -> None:
    parts.pools[0].give_back([3])
    with pytest.raises(BugError, match=r"page 3 .*'free', 'holding 0, page index 2'"):
        parts.check()


def test_a_page_that_is_in_the_tree_and_private_is_named(parts: Parts) -> None:
    parts.allocation.pages[0][2] = 4
    parts.pools[0].give_back([3])
    with pytest.raises(BugError, match=r"page 4 .*prefix 63.*page index 2"):
        parts.check()


def test_a_page_that_does_not_exist_is_named(parts: Parts) -> None:
    parts.allocation.pages[1][2] = 7
    parts.pools[1].give_back([3])
    with pytest.raises(BugError, match="page 7 of 7"):
        parts.check()


@pytest.mark.parametrize("group", [0, 1])
def test_a_shared_page_that_is_not_the_trees_is_named(parts: Parts, group: int) -> None:
    parts.allocation.pages[group][1] = 3
    with pytest.raises(BugError, match=f"page index 1: page 3 in group {group}, the tree has 2"):
        parts.check()


def test_a_gap_in_the_full_group_is_seen(parts: Parts) -> None:
    parts.allocation.pages[0][2] = 0
    parts.pools[0].give_back([3])
    with pytest.raises(BugError, match="lacks a page in group 0"):
        parts.check()


def test_groups_of_unequal_length_are_seen(parts: Parts) -> None:
    parts.pools[1].give_back([parts.allocation.pages[1].pop()])
    with pytest.raises(BugError, match=r"covers \[3, 2\] pages"):
        parts.check()


def test_nodes_beyond_the_pages_are_seen(parts: Parts) -> None:
    parts.allocation.num_pages = 1
    for pages in parts.allocation.pages:
        del pages[1:]
    with pytest.raises(BugError, match="2 nodes for 1 pages"):
        parts.check()


def test_a_holding_of_an_evicted_node_is_seen(parts: Parts) -> None:
    parts.run.pages.pop()
    with pytest.raises(BugError, match="its page is gone"):
        parts.check()


def test_a_key_of_another_run_is_seen(parts: Parts) -> None:
    parts.run.keys[1] = b"c"
    with pytest.raises(BugError, match="the run of 61 has a key of another run"):
        parts.check()


def test_a_lock_without_a_holding_is_seen(parts: Parts) -> None:
    parts.tree.lock(parts.leaf)
    with pytest.raises(BugError, match=r"the run of .* has the users"):
        parts.check()
    parts = Parts()
    parts.tree.windowed[1].lock(np.array([4], np.int32))
    with pytest.raises(BugError, match="page 4 of group 1: 1 locks, but 0 holdings"):
        parts.check()


def test_a_holding_without_a_lock_is_seen(parts: Parts) -> None:
    parts.tree.unlock(parts.allocation.prefix)
    with pytest.raises(BugError, match="the run of 61 has the users"):
        parts.check()


def test_a_locked_length_that_is_no_users_is_seen(parts: Parts) -> None:
    parts.run.locked_end = 1
    with pytest.raises(BugError, match=r"is locked up to 1, its users are \{2: 1\}"):
        parts.check()


def test_a_locked_node_that_is_evictable_is_seen(parts: Parts) -> None:
    parts.tree.order.add([2])
    with pytest.raises(BugError, match="node 2: locked is True, but evictable is True"):
        parts.check()


def test_a_tombstone_that_waits_for_eviction_is_seen(parts: Parts) -> None:
    parts.tree.windowed[1].pages[4] = 0
    parts.pools[1].give_back([4])
    with pytest.raises(BugError, match="page 0 of group 1: 0 locks, but evictable is True"):
        parts.check()


def test_a_parent_that_would_be_evicted_first_is_seen(parts: Parts) -> None:
    parts.tree.unlock(parts.allocation.prefix)
    parts.allocation.prefix = Prefix()
    parts.tree.order.remove([4])
    parts.tree.order.add([4])
    with pytest.raises(BugError, match="the run of 63 would be evicted after its parent"):
        parts.check()


def test_a_run_whose_parents_end_was_evicted_is_seen(parts: Parts) -> None:
    assert parts.leaf.run is not None
    parts.leaf.run.start = parts.leaf.run.locked_end = 3
    with pytest.raises(BugError, match="begins at 3: the node before it was evicted"):
        parts.check()
