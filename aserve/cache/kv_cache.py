"""KV pages as scheduling sees them: match a prefix; open, grow, commit and close a holding.

Knows nothing of requests, rows, steps or devices: lengths are committed ones, given by the caller.
Only this file writes holdings, page pools and the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from aserve.cache.allocation import PageAllocation
from aserve.cache.conservation import check_conservation
from aserve.cache.layout import first_visible_page
from aserve.cache.pools import PagePool
from aserve.cache.prefix_tree import Prefix, PrefixTree
from aserve.errors import BugError
from aserve.messages.base import ArrayI32
from aserve.messages.executor import GroupSpec


class KvCache:
    """Every page of every group is free, in the tree, or private to one holding."""

    __slots__ = (
        "_closed",
        "_has_prefix_cache",
        "_page_size",
        "_pools",
        "_tree",
        "_windowed",
        "_windows",
        "has_windows",
    )

    def __init__(
        self, groups: tuple[GroupSpec, ...], *, page_size: int, prefix_cache: bool
    ) -> None:
        if not groups or groups[0].window is not None:
            raise BugError(f"the first layer group must have no window: {groups}")
        self._page_size = page_size
        self._has_prefix_cache = prefix_cache
        self._pools = tuple(PagePool(group.name, group.num_pages) for group in groups)
        self._windows = tuple(group.window for group in groups)
        self._windowed = tuple(g for g, group in enumerate(groups) if group.window is not None)
        self._tree = PrefixTree(groups[0].num_pages, windowed_groups=self._windowed)
        self.has_windows = bool(self._windowed)
        self._closed: list[PageAllocation] = []  # whose pages a transfer still uses

    # -------------------------------------------------------- a sequence's way through the cache

    def match(self, keys: Sequence[bytes], *, most: int | None = None) -> Prefix:
        """The longest prefix from which a sequence can go on: all its pages in the groups without a
        window, and in the others those that its next position sees. Locks and touches nothing.
        """
        prefix = self._tree.find(keys, stop=most)
        if not self._windowed or not prefix.num_pages:
            return prefix
        nodes = np.asarray(self._tree.nodes(prefix))
        return self._tree.cut(prefix, self._usable_len(nodes))

    def open(self, prefix: Prefix, *, skipped_len: int = 0) -> PageAllocation:
        """Must follow its match before anything else happens to this cache.

        Without a prefix the KV of the first `skipped_len` positions may come from elsewhere. The
        holding must then grow beyond them at once, and has no pages that no later position sees.
        """
        allocation = PageAllocation(len(self._pools))
        if not prefix.num_pages:
            for group in self._windowed:
                first = self._first_visible(group, skipped_len)
                allocation.pages[group].frombytes(bytes(4 * first))
                allocation.num_released[group] = first
            return allocation
        allocation.pages[0] = self._tree.nodes(prefix)
        allocation.num_pages = prefix.num_pages
        self._tree.lock(prefix)
        allocation.prefix = prefix
        for group in self._windowed:
            windowed = self._tree.windowed[group]
            first = self._first_visible(group, prefix.num_pages * self._page_size)
            seen = np.asarray(allocation.pages[0][first:])
            windowed.lock(seen)
            allocation.pages[group].frombytes(bytes(4 * first) + windowed.pages[seen].tobytes())
            allocation.num_released[group] = first
        return allocation

    def missing(self, allocation: PageAllocation, num_pages: int) -> tuple[int, ...]:
        """For each group, the pages to take so that the holding covers `num_pages` page indices."""
        return tuple(max(num_pages - len(pages), 0) for pages in allocation.pages)

    def available(self, group: int) -> int:
        """What growing could get now: free pages and evictable ones."""
        return self._pools[group].num_free + self.num_cached(group)

    def grow(self, allocation: PageAllocation, num_pages: int) -> None:
        """Covers at least `num_pages` page indices, evicting what it must; all or nothing."""
        if num_pages <= allocation.num_pages:
            return
        missing = self.missing(allocation, num_pages)
        for group, count in enumerate(missing):
            if count > self.available(group):
                raise BugError(
                    f"group {self._pools[group].name!r}: a holding of {allocation.num_pages} pages "
                    f"was to grow to {num_pages}, but {self.available(group)} pages are available"
                )
        for group, count in enumerate(missing):
            lacking = count - self._pools[group].num_free
            if lacking > 0:
                self._evict(group, lacking)
            allocation.pages[group].extend(self._pools[group].take(count))
        allocation.num_pages = num_pages

    def commit(self, allocation: PageAllocation, keys: Sequence[bytes], *, num_pages: int) -> None:
        """The first `num_pages` pages are whole and committed: new ones enter the tree, locked.

        WHY the first duplicate ends it: two rows that each hold pages below the other's would lock
        both copies of a prompt, and a full pool would wait for ever. A row keeps its own copies
        until it closes.
        """
        if not (self._has_prefix_cache and allocation.is_inserting):
            return
        self._require_whole(allocation, keys, num_pages)
        num_shared = allocation.num_shared
        if num_shared >= num_pages:
            return
        # NOTE: where the first key is new, so are all after it: a key names what is before it.
        if self._tree.get(keys[num_shared]) is not None:
            allocation.is_inserting = False
            return
        self._insert(allocation, keys, num_pages=num_pages)

    def release_behind(self, allocation: PageAllocation, committed_len: int) -> None:
        """Lets go of pages that no position from `committed_len` on sees.

        Comes after commit, which caches them.
        """
        for group in self._windowed:
            pages, first = allocation.pages[group], allocation.num_released[group]
            visible = min(self._first_visible(group, committed_len), len(pages))
            if visible <= first:
                continue
            border = min(max(allocation.num_shared, first), visible)
            if border > first:
                self._tree.windowed[group].unlock(np.asarray(allocation.pages[0][first:border]))
            self._pools[group].give_back(pages[border:visible])
            pages[first:visible] = array("i", bytes(4 * (visible - first)))
            allocation.num_released[group] = visible

    def close(self, allocation: PageAllocation, keys: Sequence[bytes], *, num_pages: int) -> None:
        """The sequence leaves: its first `num_pages` pages, whole and committed, go to the tree or,
        where that has them already, are freed with the rest. The holding is empty afterwards, or
        after its last `release`.
        """
        if self._has_prefix_cache:
            self._require_whole(allocation, keys, num_pages)
            if num_pages > allocation.num_shared:
                found = self._tree.find(keys, start=allocation.num_shared, stop=num_pages)
                if found.num_pages > allocation.num_shared:
                    self._exchange(allocation, found)
                if num_pages > allocation.num_shared:
                    self._insert(allocation, keys, num_pages=num_pages)
        if allocation.num_holds:
            self._closed.append(allocation)
        else:
            self._let_go(allocation)

    def hold(self, allocation: PageAllocation) -> None:
        """A transfer begins to use the pages. They stay where they are until its `release`, even if
        the holding is closed.
        """
        allocation.num_holds += 1

    def release(self, allocation: PageAllocation) -> None:
        allocation.num_holds -= 1
        if not allocation.num_holds and allocation in self._closed:
            self._closed.remove(allocation)
            self._let_go(allocation)

    def evict_all(self) -> None:
        """Drops every unlocked page of the tree."""
        for group in range(len(self._pools)):
            self._evict(group, self.num_cached(group))

    # -------------------------------------------------------- accounts

    def num_free(self, group: int) -> int:
        return self._pools[group].num_free

    def num_cached(self, group: int) -> int:
        """Pages that only the tree holds: they stay until somebody needs the room."""
        return len(self._tree.windowed[group].order if group else self._tree.order)

    def num_used(self, group: int) -> int:
        """Pages that some sequence holds, shared or private."""
        return self._pools[group].num_pages - 1 - self.available(group)

    def check(self, allocations: Iterable[PageAllocation]) -> None:
        """Raises a BugError with a page's story unless every page is owned exactly once;
        `allocations` are all open ones. It walks over everything: for tests and debug mode.
        """
        held = [*allocations, *self._closed]
        check_conservation(self._pools, self._tree, allocations=held)

    # -------------------------------------------------------- inside

    def _first_visible(self, group: int, kv_len: int) -> int:
        return first_visible_page(kv_len, window=self._windows[group], page_size=self._page_size)

    def _usable_len(self, nodes: ArrayI32) -> int:
        """A prefix that sees a tombstone ends before it: any end after that sees it, too."""
        usable = len(nodes)
        while (gap := self._last_gap(nodes[:usable])) is not None:
            usable = gap
        return usable

    def _last_gap(self, nodes: ArrayI32) -> int | None:
        """The last tombstone among the pages that the position after these whole pages sees."""
        for group in self._windowed:
            first = self._first_visible(group, len(nodes) * self._page_size)
            gaps = np.flatnonzero(self._tree.windowed[group].pages[nodes[first:]] == 0)
            if len(gaps):
                return first + int(gaps[-1])
        return None

    def _require_whole(
        self, allocation: PageAllocation, keys: Sequence[bytes], num_pages: int
    ) -> None:
        if num_pages > min(len(keys), allocation.num_pages):
            raise BugError(
                f"{num_pages} pages were to be cached, but {len(keys)} have keys "
                f"and the holding covers {allocation.num_pages}"
            )

    def _insert(self, allocation: PageAllocation, keys: Sequence[bytes], *, num_pages: int) -> None:
        """The holding's first private pages become nodes, locked by the holding."""
        query_len = slice(allocation.num_shared, num_pages)
        pages = [group_pages[query_len] for group_pages in allocation.pages]
        allocation.prefix = self._tree.insert(allocation.prefix, keys[query_len], pages=pages)

    def _exchange(self, allocation: PageAllocation, prefix: Prefix) -> None:
        """The holding's first private pages are in the tree already, as the end of `prefix`: its
        own pages are freed for those, or fill tombstones. Only a leaving sequence does this, since
        its page table changes.
        """
        query_len = slice(allocation.num_shared, prefix.num_pages)
        nodes = self._tree.nodes(prefix)[query_len]
        for group in self._windowed:
            self._exchange_windowed(allocation, group, nodes)
        self._pools[0].give_back(allocation.pages[0][query_len])
        allocation.pages[0][query_len] = nodes
        self._tree.lock(prefix)
        self._tree.unlock(allocation.prefix)
        allocation.prefix = prefix

    def _exchange_windowed(self, allocation: PageAllocation, group: int, nodes: array[int]) -> None:
        windowed, pages = self._tree.windowed[group], allocation.pages[group]
        start = allocation.num_shared
        for index in range(max(start, allocation.num_released[group]), start + len(nodes)):
            node = nodes[index - start]
            page = int(windowed.pages[node])
            if not page:
                windowed.fill(node, pages[index])
                continue
            self._pools[group].give_back([pages[index]])
            windowed.lock(np.array([node], np.int32))
            pages[index] = page

    def _let_go(self, allocation: PageAllocation) -> None:
        """NOTE: deepest first, see PrefixTree."""
        num_shared = allocation.num_shared
        for group, pages in enumerate(allocation.pages):
            first = allocation.num_released[group]
            self._pools[group].give_back(pages[max(num_shared, first) :])
            if group and num_shared > first:
                seen = np.asarray(allocation.pages[0][first:num_shared])
                self._tree.windowed[group].unlock(seen[::-1])
        self._tree.unlock(allocation.prefix)
        allocation.prefix = Prefix()
        allocation.pages = [array("i") for _ in self._pools]
        allocation.num_pages = 0
        allocation.num_released = [0] * len(self._pools)

    def _evict(self, group: int, count: int) -> None:
        if group:
            self._pools[group].give_back(self._tree.windowed[group].evict(count))
            return
        for owner, pages in self._tree.evict(count).items():
            self._pools[owner].give_back(pages)
