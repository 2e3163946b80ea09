import pytest

from aserve.cache.radix import Node, PrefixTree
from aserve.errors import BugError


def chain(tree: PrefixTree, *keys: bytes) -> list[Node]:
    """Nodes below each other, locked, with pages 1, 2, 3, ... in both groups."""
    nodes: list[Node] = []
    for page, key in enumerate(keys, len(tree) + 1):
        parent = nodes[-1] if nodes else None
        nodes.append(tree.insert(key, parent=parent, pages=[page, page]))
    return nodes


def unlock(tree: PrefixTree, nodes: list[Node]) -> None:
    for node in reversed(nodes):
        tree.unlock(node, 0)
        tree.unlock(node, 1)


def test_a_walk_ends_at_the_first_page_that_is_not_there() -> None:
    tree = PrefixTree(2)
    nodes = chain(tree, b"a", b"b", b"c")
    assert tree.walk([b"a", b"b", b"x", b"c"]) == nodes[:2]
    assert tree.walk([b"x", b"a"]) == []


def test_evicting_a_node_frees_its_pages_in_all_groups() -> None:
    tree = PrefixTree(2)
    unlock(tree, chain(tree, b"a", b"b"))
    assert tree.evict_oldest(0) == [2, 2]
    assert (tree.num_unlocked(0), tree.num_unlocked(1)) == (1, 1)
    assert tree.get(b"b") is None


def test_evicting_a_windowed_page_leaves_a_tombstone_that_a_newcomer_fills() -> None:
    tree = PrefixTree(2)
    nodes = chain(tree, b"a")
    unlock(tree, nodes)
    assert tree.evict_oldest(1) == [0, 1]
    assert tree.get(b"a") is nodes[0]
    with pytest.raises(BugError, match="locked in group 1, but its page is gone"):
        tree.lock(nodes[0], 1)
    tree.fill(nodes[0], 1, page=9)
    tree.unlock(nodes[0], 1)
    assert tree.evict_oldest(0) == [1, 9]
    assert tree.num_unlocked(1) == 0


def test_locking_again_takes_a_node_out_of_the_order_and_unlocking_puts_it_last() -> None:
    tree = PrefixTree(2)
    first, second = chain(tree, b"a")[0], chain(tree, b"x")[0]
    unlock(tree, [second])
    unlock(tree, [first])
    tree.lock(second, 0)
    assert list(tree.unlocked(0)) == [first]
    tree.unlock(second, 0)
    assert list(tree.unlocked(0)) == [first, second]


def test_mistakes_in_locking_and_inserting_raise() -> None:
    tree = PrefixTree(2)
    nodes = chain(tree, b"a", b"b")
    with pytest.raises(BugError, match="there already"):
        tree.insert(b"b", parent=nodes[0], pages=[8, 8])
    with pytest.raises(BugError, match=r"to fill .* page 1 is there"):
        tree.fill(nodes[0], 1, page=8)
    tree.unlock(nodes[0], 0)
    with pytest.raises(BugError, match="nobody locked it"):
        tree.unlock(nodes[0], 0)
    with pytest.raises(BugError, match="evicted with 1 children"):
        tree.evict_oldest(0)
