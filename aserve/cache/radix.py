"""The prefix tree: whole pages of committed tokens that later sequences may share.

A node is one page of tokens; its key names the whole prefix (keys.py), so one dictionary serves as
every node's child lookup. Knows nothing of tokens, free pages or sequences. Written by kv_cache.py
only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from aserve.errors import BugError


class Node:
    """Written by PrefixTree only. `locks[g]` counts the sequences that use `pages[g]`.

    In a group with a window a page may be 0, a tombstone: evicted, or never entered, while the node
    lives on.
    """

    __slots__ = ("key", "locks", "num_children", "pages", "parent")

    def __init__(self, key: bytes, *, parent: Node | None, pages: Sequence[int]) -> None:
        self.key = key
        self.parent = parent
        self.num_children = 0
        self.pages = list(pages)
        self.locks = [int(page != 0) for page in pages]


class Prefix(msgspec.Struct, frozen=True):
    """A match: the nodes of a sequence's first pages. It holds nothing until it is opened."""

    nodes: tuple[Node, ...] = ()

    @property
    def num_pages(self) -> int:
        return len(self.nodes)


class PrefixTree:
    """Nodes by key, and for each group those with an unlocked page, in the order of unlocking.

    NOTE: a sequence locks every node from the first one on, and unlocks the deepest first. So the
    ancestors of a locked node are locked, an unlocked node stands behind all its descendants in
    group 0's order, and the front of that order is always a leaf. Hence evictable pages are counted
    by a length, and the oldest is found without a search.
    """

    __slots__ = ("_nodes", "_unlocked", "num_groups")

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self._nodes: dict[bytes, Node] = {}
        # WHY not a dict: its first key is found by walking over what was deleted before it.
        self._unlocked: tuple[OrderedDict[Node, None], ...] = tuple(
            OrderedDict() for _ in range(num_groups)
        )

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def walk(self, keys: Iterable[bytes]) -> list[Node]:
        """The nodes of the longest prefix of `keys` that is here, in order."""
        nodes: list[Node] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def insert(self, key: bytes, *, parent: Node | None, pages: Sequence[int]) -> Node:
        """A new node, locked once in every group whose page it brings."""
        if key in self._nodes:
            raise BugError(f"prefix {key.hex()} entered the tree, but it is there already")
        if parent is not None:
            parent.num_children += 1
        node = Node(key, parent=parent, pages=pages)
        self._nodes[key] = node
        return node

    def fill(self, node: Node, group: int, *, page: int) -> None:
        """Puts `page` in place of a tombstone, locked once."""
        if node.pages[group]:
            raise BugError(
                f"page {page} was to fill prefix {node.key.hex()} in group {group}, "
                f"but page {node.pages[group]} is there"
            )
        node.pages[group] = page
        node.locks[group] = 1

    def lock(self, node: Node, group: int) -> None:
        if not node.pages[group]:
            raise BugError(
                f"prefix {node.key.hex()} was locked in group {group}, but its page is gone"
            )
        node.locks[group] += 1
        if node.locks[group] == 1:
            del self._unlocked[group][node]

    def unlock(self, node: Node, group: int) -> None:
        if not node.locks[group]:
            raise BugError(
                f"prefix {node.key.hex()} was unlocked in group {group}, but nobody locked it"
            )
        node.locks[group] -= 1
        if node.locks[group] == 0:
            self._unlocked[group][node] = None

    def num_unlocked(self, group: int) -> int:
        return len(self._unlocked[group])

    def unlocked(self, group: int) -> Iterable[Node]:
        """Oldest first: the order of eviction."""
        return iter(self._unlocked[group])

    def evict_oldest(self, group: int) -> list[int]:
        """Returns the freed page of each group, 0 for none.

        A windowed group gives up one page and leaves a tombstone; group 0 gives up the whole node.
        """
        node, _ = self._unlocked[group].popitem(last=False)
        if group == 0:
            return self._remove(node)
        freed = [0] * self.num_groups
        freed[group], node.pages[group] = node.pages[group], 0
        return freed

    def _remove(self, node: Node) -> list[int]:
        if node.num_children or any(node.locks):
            raise BugError(
                f"prefix {node.key.hex()} was evicted with {node.num_children} children "
                f"and locks {node.locks}"
            )
        del self._nodes[node.key]
        if node.parent is not None:
            node.parent.num_children -= 1
        for order in self._unlocked[1:]:
            order.pop(node, None)
        freed, node.pages = node.pages, [0] * self.num_groups
        return freed
