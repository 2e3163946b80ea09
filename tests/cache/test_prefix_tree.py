from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aserve.cache.eviction import EvictionOrder
from aserve.cache.prefix_tree import Prefix, PrefixTree
from aserve.errors import BugError
from aserve.messages.base import ArrayI32

EMPTY = Prefix()


def tree_of(*, num_nodes: int = 32) -> PrefixTree:
    """Group 1 has a window."""
    return PrefixTree(num_nodes, windowed_groups=(1,))


def insert(tree: PrefixTree, prefix: Prefix, keys: str, *, first: int) -> Prefix:
    """One node per letter, with the pages first, first + 1, ... in both groups."""
    pages = array("i", range(first, first + len(keys)))
    return tree.insert(prefix, [key.encode() for key in keys], pages=[pages, pages])


def unlock_windowed(tree: PrefixTree, prefix: Prefix) -> None:
    tree.windowed[1].unlock(np.asarray(tree.nodes(prefix))[::-1])


def keys(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("abc", 3), ("abcdefgh", 8), ("abcx", 3), ("x", 0), ("", 0), ("abcdXY", 6), ("abcdXYZ", 6)],
)
def test_the_longest_prefix_is_found_across_runs(wanted: str, found: int) -> None:
    tree = tree_of()
    long = insert(tree, EMPTY, "abcdefgh", first=1)
    branch = tree.cut(long, 4)
    tree.lock(branch)
    insert(tree, branch, "XY", first=20)
    prefix = tree.find(keys(wanted))
    assert prefix.num_pages == found
    nodes = {**dict(zip("abcdefgh", range(1, 9), strict=True)), "X": 20, "Y": 21}
    assert tree.nodes(prefix).tolist() == [nodes[key] for key in wanted[:found]]


def test_a_sequence_at_the_end_of_a_run_makes_it_longer_and_another_one_branches() -> None:
    tree = tree_of()
    first = insert(tree, EMPTY, "ab", first=1)
    second = tree.find(keys("ab"))
    tree.lock(second)
    longer = insert(tree, first, "cd", first=3)
    assert longer.run is first.run
    branch = insert(tree, second, "xy", first=5)
    assert branch.run is not first.run
    assert tree.nodes(branch).tolist() == [1, 2, 5, 6]


def test_only_what_no_lock_covers_is_evictable_deepest_first() -> None:
    tree = tree_of()
    long = insert(tree, EMPTY, "abcd", first=1)
    short = tree.cut(long, 2)
    tree.lock(short)
    assert len(tree.order) == 0
    tree.unlock(long)
    assert tree.order.in_order() == [4, 3]
    tree.unlock(short)
    assert tree.order.in_order() == [4, 3, 2, 1]
    tree.lock(tree.cut(long, 3))
    assert tree.order.in_order() == [4]


def test_a_branch_locks_its_parent_up_to_where_it_begins() -> None:
    tree = tree_of()
    long = insert(tree, EMPTY, "abcd", first=1)
    branch = tree.cut(long, 2)
    tree.lock(branch)
    branch = insert(tree, branch, "xy", first=5)
    tree.unlock(long)
    assert tree.order.in_order() == [4, 3]
    tree.unlock(branch)
    assert tree.order.in_order() == [4, 3, 6, 5, 2, 1]


def test_evicting_nodes_frees_their_pages_in_all_groups() -> None:
    tree = tree_of()
    prefix = insert(tree, EMPTY, "abc", first=1)
    unlock_windowed(tree, prefix)
    tree.unlock(prefix)
    freed = tree.evict(2)
    assert (freed[0].tolist(), freed[1].tolist()) == ([3, 2], [3, 2])
    assert (len(tree.order), len(tree.windowed[1].order)) == (1, 1)
    assert tree.get(b"b") is None
    assert tree.get(b"a") is prefix.run


def test_evicting_a_windowed_page_leaves_a_tombstone_that_a_newcomer_fills() -> None:
    tree = tree_of()
    prefix = insert(tree, EMPTY, "a", first=1)
    unlock_windowed(tree, prefix)
    assert tree.windowed[1].evict(1) == [1]
    assert tree.get(b"a") is prefix.run
    windowed = tree.windowed[1]
    with pytest.raises(BugError, match="a page is gone"):
        windowed.lock(_one(1))
    windowed.fill(1, 9)
    windowed.unlock(_one(1))
    tree.unlock(prefix)
    assert tree.evict(1)[1].tolist() == [9]
    assert len(windowed.order) == 0


def test_mistakes_in_locking_and_inserting_raise() -> None:
    tree = tree_of()
    prefix = insert(tree, EMPTY, "ab", first=1)
    with pytest.raises(BugError, match="there already"):
        insert(tree, tree.cut(prefix, 1), "b", first=8)
    with pytest.raises(BugError, match="to fill node 1, which has 1"):
        tree.windowed[1].fill(1, 8)
    with pytest.raises(BugError, match="nobody locked it"):
        tree.unlock(tree.cut(prefix, 1))
    unlock_windowed(tree, prefix)
    with pytest.raises(BugError, match="unlocked in a windowed group twice"):
        unlock_windowed(tree, prefix)
    tree.windowed[1].lock(_one(2))
    tree.unlock(prefix)
    with pytest.raises(BugError, match="windowed page 2 is locked"):
        tree.evict(1)


@pytest.mark.parametrize("num_pages", [10, 10_000])
def test_work_on_a_prefix_does_not_grow_with_its_length(num_pages: int) -> None:
    tree = PrefixTree(num_pages + 1)
    names = CountedKeys([number.to_bytes(4, "big") for number in range(num_pages)])
    prefix = tree.insert(EMPTY, names, pages=[array("i", range(1, num_pages + 1))])
    tree.unlock(prefix)
    tree.order = order = CountedOrder(num_pages + 1)
    order.add(tree.nodes(prefix))
    order.num_calls = names.num_lookups = 0
    found = tree.find(names)
    assert found.num_pages == num_pages
    for _ in range(128):
        tree.lock(found)
    for _ in range(128):
        tree.unlock(found)
    assert order.num_calls == 2  # of the first lock and the last unlock
    assert names.num_lookups <= 20


class CountedOrder(EvictionOrder):
    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.num_calls = 0

    def add(self, pages: Sequence[int] | ArrayI32) -> None:
        self.num_calls += 1
        super().add(pages)

    def remove(self, pages: Sequence[int] | ArrayI32) -> None:
        self.num_calls += 1
        super().remove(pages)


class CountedKeys(list[bytes]):
    num_lookups = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_lookups += 1
        return super().__getitem__(index)


def _one(node: int) -> ArrayI32:
    return np.array([node], np.int32)
