"""The keys of pages, and the tree that they are looked up in."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aserve.cache.eviction import EvictionOrder
from aserve.cache.page_keys import extend_keys, root_key
from aserve.cache.prefix_tree import Prefix, PrefixTree
from aserve.cache.stored_pages import StoredPages
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
    tree = PrefixTree(32, windowed_groups=(1,), stored=StoredPages("off", num_groups=2))
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
    tree = PrefixTree(num_pages + 1, stored=StoredPages("off", num_groups=1))
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


def keys_of(tokens: list[int], *, page_size: int, namespace: str = "") -> list[bytes]:
    keys: list[bytes] = []
    array: ArrayI32 = np.array(tokens, dtype=np.int32)
    extend_keys(keys, array, page_size=page_size, root=root_key(namespace))
    return keys


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("num_pages", [0, 1, 3])
def test_only_whole_pages_have_keys_at_every_page_edge(page_size: int, num_pages: int) -> None:
    tokens = list(range(page_size * (num_pages + 2)))
    edge = num_pages * page_size
    assert len(keys_of(tokens[: max(edge - 1, 0)], page_size=page_size)) == max(
        (edge - 1) // page_size, 0
    )
    assert len(keys_of(tokens[:edge], page_size=page_size)) == num_pages
    assert len(keys_of(tokens[: edge + 1], page_size=page_size)) == (edge + 1) // page_size


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_keys_do_not_depend_on_when_the_tokens_arrived(page_size: int) -> None:
    tokens: ArrayI32 = np.arange(50, dtype=np.int32)
    keys: list[bytes] = []
    for num_tokens in (0, 1, 15, 16, 17, 33, 50, 50):
        extend_keys(keys, tokens[:num_tokens], page_size=page_size, root=root_key("a"))
    assert keys == keys_of(list(range(50)), page_size=page_size, namespace="a")


def test_namespaces_share_no_key() -> None:
    first = keys_of([1, 2, 3, 4], page_size=2, namespace="salt")
    second = keys_of([1, 2, 3, 4], page_size=2, namespace="salt2")
    assert len({*first, *second}) == 4


def test_equal_pages_after_different_prefixes_have_different_keys() -> None:
    first = keys_of([1, 2, 7, 8, 5, 5], page_size=2)
    second = keys_of([1, 3, 7, 8, 5, 5], page_size=2)
    third = keys_of([1, 2, 7, 8, 5, 6], page_size=2)
    assert not {*first} & {*second}
    assert first[:2] == third[:2]
    assert first[2] != third[2]
