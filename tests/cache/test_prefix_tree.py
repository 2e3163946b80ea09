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


def insert(tree: PrefixTree, prefix: Prefix, keys: str, *, first: int) -> Prefix:
    """One node per letter, with the pages first, first + 1, ... in both groups."""
    pages = array("i", range(first, first + len(keys)))
    return tree.insert(prefix, [key.encode() for key in keys], pages=[pages, pages])


def unlock_windowed(tree: PrefixTree, prefix: Prefix) -> None:
    tree.windowed[1].unlock(np.asarray(tree.nodes(prefix))[::-1])


def keys(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


def test_mistakes_in_locking_and_inserting_raise() -> None:
    tree = PrefixTree(32, windowed_groups=(1,))
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
