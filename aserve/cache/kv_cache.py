"""The KV cache as the scheduler sees it: it matches prefixes, and allocates and caches pages.

All lengths are committed ones, which the caller gives. This file alone writes allocations, page
pools and the prefix tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from aserve.cache.allocation import PageAllocation
from aserve.cache.conservation import check_conservation
from aserve.cache.layout import first_visible_page
from aserve.cache.pools import PagePool
from aserve.cache.prefix_tree import NO_PREFIX, Prefix, PrefixTree
from aserve.cache.stored_pages import StoredPages
from aserve.cache.windowed_pages import usable_len
from aserve.errors import BugError
from aserve.messages.executor import GroupSpec, TierPolicy


class KvCache:
    """Every page of every group is free, in the prefix tree, or private to one allocation."""

    __slots__ = (
        *("_closed", "_has_prefix_cache", "_page_size", "_pools", "_rank", "_tree", "_windowed"),
        *("_windows", "has_windows", "stored"),
    )

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        *,
        page_size: int,
        prefix_cache: bool,
        rank: int = 0,
        tiers: TierPolicy = "off",
    ) -> None:
        if not groups or groups[0].window is not None:
            raise BugError(f"the first layer group must have no window: {groups}")
        self._rank = rank  # the data-parallel rank
        self._page_size = page_size
        self._has_prefix_cache = prefix_cache
        self._pools = tuple(PagePool(group.name, group.num_pages) for group in groups)
        self._windows = tuple(group.window for group in groups)
        self._windowed = tuple(g for g, group in enumerate(groups) if group.window is not None)
        self.stored = StoredPages(tiers, num_groups=len(groups))
        self._tree = PrefixTree(
            groups[0].num_pages, windowed_groups=self._windowed, stored=self.stored
        )
        self.has_windows = bool(self._windowed)
        self._closed: list[PageAllocation] = []  # whose pages a transfer still uses

    # -------------------------------------------------------- the life of an allocation

    def match(self, keys: Sequence[bytes], *, most: int | None = None) -> Prefix:
        """Returns the longest cached prefix of at most `most` pages that a sequence can use: of a
        windowed group it needs only the pages that its next position sees. Changes nothing.
        """
        prefix = self._tree.find(keys, stop=most)
        if not self._windowed or not prefix.num_pages:
            return prefix
        nodes = np.asarray(self._tree.nodes(prefix))
        sees, windowed = self._first_visible, self._tree.windowed
        return self._tree.cut(prefix, usable_len(nodes, windowed, sees, page_size=self._page_size))

    def open(self, prefix: Prefix, *, skipped_len: int = 0) -> PageAllocation:
        """Makes an allocation that starts with `prefix`, and locks its pages. The cache must not
        have changed since `match` returned the prefix.

        Without a prefix the KV of the first `skipped_len` positions may come from elsewhere. The
        allocation must then grow beyond them at once, and has no pages that no later position sees.
        """
        allocation = PageAllocation(len(self._pools), rank=self._rank)
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
        """Returns for each group how many pages `grow` would take."""
        return tuple([max(num_pages - len(pages), 0) for pages in allocation.pages])

    def available(self, group: int) -> int:
        """Returns the number of pages that `grow` could take now: free and evictable ones."""
        return self._pools[group].num_free + self.num_cached(group)

    def grow(self, allocations: Sequence[PageAllocation], num_pages: Sequence[int]) -> None:
        """Extends each allocation to so many pages, and evicts pages if needed. Raises BugError,
        and changes nothing, if not enough pages are available for all of them.
        """
        missing = [
            [num - len(each.pages[group]) for each, num in zip(allocations, num_pages, strict=True)]
            for group in range(len(self._pools))
        ]
        totals = [sum([count for count in counts if count > 0]) for counts in missing]
        for group, total in enumerate(totals):
            if total > self.available(group):
                raise BugError(
                    f"group {self._pools[group].name!r}: {total} more pages cannot be taken: "
                    f"{self.available(group)} pages are available"
                )
        for group, counts in enumerate(missing):
            lacking = totals[group] - self._pools[group].num_free
            if lacking > 0:
                self._evict(group, lacking)
            taken, start = self._pools[group].take(totals[group]), 0
            for each, count in zip(allocations, counts, strict=True):
                if count > 0:
                    each.pages[group].extend(taken[start : start + count])
                    start += count
        for each, num in zip(allocations, num_pages, strict=True):
            if num > each.num_pages:
                each.num_pages = num

    def commit(self, allocation: PageAllocation, keys: Sequence[bytes], *, num_pages: int) -> None:
        """Inserts the pages before `num_pages`, which are full and committed, into the tree. They
        stay locked.

        WHY it stops for good at the first duplicate: two rows, each with nodes below the other's,
        would lock both copies of a prompt, and a full pool would never become free. A row keeps
        its own copies until it closes.
        """
        num_shared = allocation.prefix.num_pages
        if num_shared >= num_pages or not (self._has_prefix_cache and allocation.is_inserting):
            return
        self._require_whole(allocation, keys, num_pages)
        # NOTE: if the first key is new, all later ones are: a key is a digest of its whole prefix.
        if self._tree.get(keys[num_shared]) is not None:
            allocation.is_inserting = False
            return
        self._insert(allocation, keys, num_pages=num_pages)

    def release_behind(self, allocation: PageAllocation, committed_len: int) -> None:
        """Releases the pages of windowed groups that no position from `committed_len` on sees.

        Call it after `commit`, which caches them.
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
        """Ends the allocation. The pages before `num_pages`, which are full and committed, enter
        the tree unless it has them already. The others are freed, and the allocation is empty, at
        once or after its last `release`.
        """
        if self._has_prefix_cache:
            self._require_whole(allocation, keys, num_pages)
            if num_pages > allocation.num_shared:
                found = self._tree.find(keys, start=allocation.num_shared, stop=num_pages)
                if found.num_pages > allocation.num_shared:
                    self._replace(allocation, found)
                if num_pages > allocation.num_shared:
                    self._insert(allocation, keys, num_pages=num_pages)
        if allocation.num_holds:
            self._closed.append(allocation)
        else:
            self._free(allocation)

    def hold(self, allocation: PageAllocation) -> None:
        """Keeps the pages for a transfer until its `release`, even if the allocation is closed."""
        allocation.num_holds += 1

    def release(self, allocation: PageAllocation) -> None:
        allocation.num_holds -= 1
        if not allocation.num_holds and allocation in self._closed:
            self._closed.remove(allocation)
            self._free(allocation)

    def evict_all(self) -> None:
        """Drops every unlocked page of the tree."""
        for group in range(len(self._pools)):
            self._evict(group, self.num_cached(group))

    # -------------------------------------------------------- counts

    def num_free(self, group: int) -> int:
        return self._pools[group].num_free

    def num_cached(self, group: int) -> int:
        """Returns the number of evictable pages, which no sequence uses."""
        return len(self._tree.windowed[group].order if group else self._tree.order)

    def num_used(self, group: int) -> int:
        """Returns the number of pages that sequences use, shared or private."""
        return self._pools[group].num_pages - 1 - self.available(group)

    def check(self, allocations: Iterable[PageAllocation]) -> None:
        """Raises BugError unless every page has exactly one owner. `allocations` are all open ones.
        It visits every page, so it is for tests and --debug-checks.
        """
        held = [*allocations, *self._closed]
        check_conservation(self._pools, self._tree, allocations=held)

    # -------------------------------------------------------- helpers

    def _first_visible(self, group: int, kv_len: int) -> int:
        return first_visible_page(kv_len, window=self._windows[group], page_size=self._page_size)

    def _require_whole(
        self, allocation: PageAllocation, keys: Sequence[bytes], num_pages: int
    ) -> None:
        if num_pages > allocation.num_pages or num_pages > len(keys):
            raise BugError(
                f"{num_pages} pages cannot be cached: {len(keys)} have keys, the allocation has "
                f"{allocation.num_pages}"
            )

    def _insert(self, allocation: PageAllocation, keys: Sequence[bytes], *, num_pages: int) -> None:
        """Makes nodes of the first private pages, whose keys are new. The allocation locks them."""
        prefix = allocation.prefix
        added = slice(prefix.num_pages, num_pages)
        pages = [group_pages[added] for group_pages in allocation.pages]
        allocation.prefix = self._tree.insert(prefix, keys[added], pages=pages)

    def _replace(self, allocation: PageAllocation, prefix: Prefix) -> None:
        """Replaces the first private pages by those that the tree has for the same tokens, at the
        end of `prefix`. The replaced pages are freed, or fill tombstones. It changes the page
        table, so only `close` may do it.
        """
        replaced = slice(allocation.num_shared, prefix.num_pages)
        nodes = self._tree.nodes(prefix)[replaced]
        for group in self._windowed:
            self._replace_windowed(allocation, group, nodes)
        self._pools[0].give_back(allocation.pages[0][replaced])
        allocation.pages[0][replaced] = nodes
        self._tree.lock(prefix)
        self._tree.unlock(allocation.prefix)
        allocation.prefix = prefix

    def _replace_windowed(self, allocation: PageAllocation, group: int, nodes: array[int]) -> None:
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

    def _free(self, allocation: PageAllocation) -> None:
        """NOTE: the deepest nodes are unlocked first (see PrefixTree)."""
        num_shared = allocation.num_shared
        for group, pages in enumerate(allocation.pages):
            first = allocation.num_released[group]
            self._pools[group].give_back(pages[max(num_shared, first) :])
            if group and num_shared > first:
                seen = np.asarray(allocation.pages[0][first:num_shared])
                self._tree.windowed[group].unlock(seen[::-1])
        self._tree.unlock(allocation.prefix)
        allocation.prefix = NO_PREFIX
        allocation.pages = [array("i") for _ in self._pools]
        allocation.num_pages = 0
        allocation.num_released = [0] * len(self._pools)

    def _evict(self, group: int, count: int) -> None:
        if group:
            self._pools[group].give_back(self._tree.windowed[group].evict(count))
            return
        for owner, pages in self._tree.evict(count).items():
            self._pools[owner].give_back(pages)
