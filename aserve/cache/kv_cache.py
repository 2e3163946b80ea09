"""KV pages as scheduling sees them: match a prefix; open, grow, commit and close a holding.

Knows nothing of requests, rows, steps or devices: lengths are committed ones, given by the caller.
Only this file writes holdings, page pools and the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aserve.cache.conservation import check_conservation
from aserve.cache.holding import Holding
from aserve.cache.pages import PagePool
from aserve.cache.radix import Node, Prefix, PrefixTree
from aserve.cache.windows import first_visible_page
from aserve.errors import BugError
from aserve.messages import GroupSpec


class KvCache:
    """Every page of every group is free, in the tree, or private to one holding."""

    __slots__ = ("_has_prefix_cache", "_page_size", "_pools", "_tree", "_windowed", "_windows")

    def __init__(
        self, groups: tuple[GroupSpec, ...], *, page_size: int, prefix_cache: bool
    ) -> None:
        if not groups or groups[0].window is not None:
            raise BugError(f"the first layer group must have no window: {groups}")
        self._page_size = page_size
        self._has_prefix_cache = prefix_cache
        self._pools = tuple(PagePool(group.name, group.num_pages) for group in groups)
        self._tree = PrefixTree(len(groups))
        self._windows = tuple(group.window for group in groups)
        self._windowed = tuple(g for g, group in enumerate(groups) if group.window is not None)

    # -------------------------------------------------------- a sequence's way through the cache

    def match(self, keys: Sequence[bytes]) -> Prefix:
        """The longest prefix from which a sequence can go on: all its pages in the groups without a
        window, and in the others those that its next position sees. Locks and touches nothing.
        """
        nodes = self._tree.walk(keys)
        return Prefix(tuple(nodes[: self._usable_len(nodes)]))

    def open(self, prefix: Prefix) -> Holding:
        """Must follow its match before anything else happens to this cache."""
        holding = Holding(len(self._pools))
        holding.nodes.extend(prefix.nodes)
        for group, pages in enumerate(holding.pages):
            first = self._first_visible(group, prefix.num_pages * self._page_size)
            for node in prefix.nodes[first:]:
                self._tree.lock(node, group)
            pages.extend([0] * first)
            pages.extend(node.pages[group] for node in prefix.nodes[first:])
            holding.num_released[group] = first
        return holding

    def missing(self, holding: Holding, num_pages: int) -> tuple[int, ...]:
        """For each group, the pages to take so that the holding covers `num_pages` page indices."""
        count = max(num_pages - holding.num_pages, 0)
        return (count,) * len(self._pools)

    def available(self, group: int) -> int:
        """What growing could get now: free pages and evictable ones."""
        return self._pools[group].num_free + self._tree.num_unlocked(group)

    def grow(self, holding: Holding, num_pages: int) -> None:
        """Covers at least `num_pages` page indices, evicting what it must; all or nothing."""
        if num_pages <= holding.num_pages:
            return
        missing = self.missing(holding, num_pages)
        for group, count in enumerate(missing):
            if count > self.available(group):
                raise BugError(
                    f"group {self._pools[group].name!r}: a holding of {holding.num_pages} pages "
                    f"was to grow to {num_pages}, but {self.available(group)} pages are available"
                )
        for group, count in enumerate(missing):
            while self._pools[group].num_free < count:
                self._evict_oldest(group)
            holding.pages[group].extend(self._pools[group].take(count))

    def commit(self, holding: Holding, keys: Sequence[bytes], *, num_pages: int) -> None:
        """The first `num_pages` pages are whole and committed: new ones enter the tree, locked.

        WHY the first duplicate ends it: two rows that each hold pages below the other's would lock
        both copies of a prompt, and a full pool would wait for ever. A row keeps its own copies
        until it closes.
        """
        if not (self._has_prefix_cache and holding.is_inserting):
            return
        self._require_whole(holding, keys, num_pages)
        for index in range(len(holding.nodes), num_pages):
            if self._tree.get(keys[index]) is not None:
                holding.is_inserting = False
                return
            self._insert(holding, keys[index])

    def release_behind(self, holding: Holding, committed_len: int) -> None:
        """Lets go of pages that no position from `committed_len` on sees.

        Comes after commit, which caches them.
        """
        for group in self._windowed:
            pages = holding.pages[group]
            visible = min(self._first_visible(group, committed_len), len(pages))
            for index in range(holding.num_released[group], visible):
                if index < len(holding.nodes):
                    self._tree.unlock(holding.nodes[index], group)
                else:
                    self._pools[group].give_back([pages[index]])
                pages[index] = 0
            holding.num_released[group] = max(visible, holding.num_released[group])

    def close(self, holding: Holding, keys: Sequence[bytes], *, num_pages: int) -> None:
        """The sequence leaves: its first `num_pages` pages, whole and committed, go to the tree or,
        where that has them already, are freed with the rest. The holding is empty afterwards.
        """
        if self._has_prefix_cache:
            self._require_whole(holding, keys, num_pages)
            for index in range(len(holding.nodes), num_pages):
                node = self._tree.get(keys[index])
                if node is None:
                    self._insert(holding, keys[index])
                else:
                    self._exchange(holding, node)
        self._let_go(holding)

    def evict_all(self) -> None:
        """Drops every unlocked page of the tree."""
        for group in range(len(self._pools)):
            while self._tree.num_unlocked(group):
                self._evict_oldest(group)

    # -------------------------------------------------------- accounts

    def num_free(self, group: int) -> int:
        return self._pools[group].num_free

    def num_cached(self, group: int) -> int:
        """Pages that only the tree holds: they stay until somebody needs the room."""
        return self._tree.num_unlocked(group)

    def num_used(self, group: int) -> int:
        """Pages that some sequence holds, shared or private."""
        return self._pools[group].num_pages - 1 - self.available(group)

    def check(self, holdings: Iterable[Holding]) -> None:
        """Raises a BugError with a page's story unless every page is owned exactly once; `holdings`
        are all open ones. It walks over everything: for tests and debug mode.
        """
        check_conservation(self._pools, self._tree, holdings=list(holdings))

    # -------------------------------------------------------- inside

    def _first_visible(self, group: int, kv_len: int) -> int:
        return first_visible_page(kv_len, window=self._windows[group], page_size=self._page_size)

    def _usable_len(self, nodes: Sequence[Node]) -> int:
        """A prefix that sees a tombstone ends before it: any end after that sees it, too."""
        usable = len(nodes)
        while (gap := self._last_gap(nodes, usable)) is not None:
            usable = gap
        return usable

    def _last_gap(self, nodes: Sequence[Node], num_pages: int) -> int | None:
        """A tombstone among the pages that the position after `num_pages` whole pages sees."""
        for group in self._windowed:
            first = self._first_visible(group, num_pages * self._page_size)
            for index in reversed(range(first, num_pages)):
                if not nodes[index].pages[group]:
                    return index
        return None

    def _require_whole(self, holding: Holding, keys: Sequence[bytes], num_pages: int) -> None:
        if num_pages > min(len(keys), holding.num_pages):
            raise BugError(
                f"{num_pages} pages were to be cached, but {len(keys)} have keys "
                f"and the holding covers {holding.num_pages}"
            )

    def _insert(self, holding: Holding, key: bytes) -> None:
        """The holding's first private page index becomes a node, locked by the holding."""
        index = len(holding.nodes)
        parent = holding.nodes[-1] if holding.nodes else None
        pages = [group_pages[index] for group_pages in holding.pages]
        holding.nodes.append(self._tree.insert(key, parent=parent, pages=pages))

    def _exchange(self, holding: Holding, node: Node) -> None:
        """The holding's first private page index is in the tree already: its own pages are freed
        for the node's, or fill the node's tombstones. Only a leaving sequence does this, since its
        page table changes.
        """
        index = len(holding.nodes)
        for group, pages in enumerate(holding.pages):
            page = pages[index]
            if page and node.pages[group]:
                self._pools[group].give_back([page])
                self._tree.lock(node, group)
                pages[index] = node.pages[group]
            elif page:
                self._tree.fill(node, group, page=page)
        holding.nodes.append(node)

    def _let_go(self, holding: Holding) -> None:
        num_shared = len(holding.nodes)
        for group, pages in enumerate(holding.pages):
            self._pools[group].give_back([page for page in pages[num_shared:] if page])
            # NOTE: deepest first, see PrefixTree.
            for index in reversed(range(num_shared)):
                if pages[index]:
                    self._tree.unlock(holding.nodes[index], group)
            pages.clear()
        holding.nodes.clear()
        holding.num_released = [0] * len(self._pools)

    def _evict_oldest(self, group: int) -> None:
        for owner, page in enumerate(self._tree.evict_oldest(group)):
            if page:
                self._pools[owner].give_back([page])
