"""Each test breaks one thing and wants the check to tell its story."""

import pytest

from aserve.cache.conservation import check_conservation
from aserve.cache.holding import Holding
from aserve.cache.pages import PagePool
from aserve.cache.radix import Node, PrefixTree
from aserve.errors import BugError


class Parts:
    """Two groups of 6 pages; a holding with two nodes and a private page, and an evictable node."""

    def __init__(self) -> None:
        self.pools = (PagePool("full", 7), PagePool("window", 7))
        self.tree = PrefixTree(2)
        self.holding = Holding(2)
        for pool, pages in zip(self.pools, self.holding.pages, strict=True):
            pages.extend(pool.take(3))
        self.first = self.insert(b"a", parent=None, page=1)
        self.second = self.insert(b"b", parent=self.first, page=2)
        self.holding.nodes.extend([self.first, self.second])
        for pool in self.pools:
            pool.take(1)
        self.leaf = self.insert(b"c", parent=self.first, page=4)
        for group in (0, 1):
            self.tree.unlock(self.leaf, group)

    def insert(self, key: bytes, *, parent: Node | None, page: int) -> Node:
        return self.tree.insert(key, parent=parent, pages=[page, page])

    def check(self) -> None:
        check_conservation(self.pools, self.tree, holdings=[self.holding])


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_what_is_right_passes(parts: Parts) -> None:
    parts.check()
    parts.tree.evict_oldest(1)
    parts.pools[1].give_back([4])
    parts.check()


def test_a_lost_page_is_named(parts: Parts) -> None:
    parts.pools[1].take(1)
    with pytest.raises(BugError, match=r"'window': page 5 of 7 has the owners \[\]"):
        parts.check()


def test_a_page_that_is_held_and_free_is_named_with_both_owners(parts: Parts) -> None:
    parts.pools[0].give_back([3])
    with pytest.raises(BugError, match=r"page 3 .*'free', 'holding 0, page index 2'"):
        parts.check()


def test_a_page_that_is_in_the_tree_and_private_is_named(parts: Parts) -> None:
    parts.holding.pages[0][2] = 4
    parts.pools[0].give_back([3])
    with pytest.raises(BugError, match=r"page 4 .*prefix 63.*page index 2"):
        parts.check()


def test_a_page_that_does_not_exist_is_named(parts: Parts) -> None:
    parts.holding.pages[1][2] = 7
    parts.pools[1].give_back([3])
    with pytest.raises(BugError, match="page 7 of 7"):
        parts.check()


def test_a_shared_page_that_is_not_the_trees_is_named(parts: Parts) -> None:
    parts.holding.pages[0][1] = 3
    with pytest.raises(
        BugError, match="page index 1, prefix 62: page 3 in group 0, the tree has 2"
    ):
        parts.check()


def test_a_gap_in_the_full_group_is_seen(parts: Parts) -> None:
    parts.holding.pages[0][2] = 0
    parts.pools[0].give_back([3])
    with pytest.raises(BugError, match="lacks a page in group 0"):
        parts.check()


def test_groups_of_unequal_length_are_seen(parts: Parts) -> None:
    parts.pools[1].give_back([parts.holding.pages[1].pop()])
    with pytest.raises(BugError, match=r"covers \[3, 2\] pages"):
        parts.check()


def test_nodes_beyond_the_pages_are_seen(parts: Parts) -> None:
    for pages in parts.holding.pages:
        del pages[1:]
    with pytest.raises(BugError, match="2 nodes for 1 pages"):
        parts.check()


def test_nodes_that_are_no_path_are_seen(parts: Parts) -> None:
    parts.holding.nodes.reverse()
    with pytest.raises(BugError, match="its parent is not the node before it"):
        parts.check()


def test_a_holding_of_an_evicted_node_is_seen(parts: Parts) -> None:
    parts.holding.nodes[1] = parts.leaf
    parts.tree.evict_oldest(0)
    with pytest.raises(BugError, match="not in the tree"):
        parts.check()


def test_a_lock_without_a_holding_is_seen(parts: Parts) -> None:
    parts.tree.lock(parts.leaf, 1)
    with pytest.raises(BugError, match="page 4 of group 1: 1 locks, but 0 holdings"):
        parts.check()


def test_a_holding_without_a_lock_is_seen(parts: Parts) -> None:
    parts.tree.unlock(parts.second, 0)
    with pytest.raises(BugError, match="page 2 of group 0: 0 locks, but 1 holdings"):
        parts.check()


def test_a_locked_node_below_an_unlocked_one_is_seen(parts: Parts) -> None:
    parts.tree.unlock(parts.first, 0)
    with pytest.raises(BugError, match="prefix 62 is locked, its parent is not"):
        parts.check()


def test_a_tombstone_that_waits_for_eviction_is_seen(parts: Parts) -> None:
    parts.leaf.pages[1] = 0
    parts.pools[1].give_back([4])
    with pytest.raises(BugError, match="page 0 of group 1: 0 locks, but evictable is True"):
        parts.check()


def test_a_parent_that_would_be_evicted_first_is_seen(parts: Parts) -> None:
    for node in (parts.first, parts.second):
        parts.tree.unlock(node, 0)
    with pytest.raises(BugError, match="prefix 62 would be evicted after its parent"):
        parts.check()


def test_a_wrong_number_of_children_is_seen(parts: Parts) -> None:
    parts.first.num_children += 1
    with pytest.raises(BugError, match="prefix 61 counts 3 children of 2"):
        parts.check()
