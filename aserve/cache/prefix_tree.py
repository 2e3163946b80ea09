"""The prefix tree: full pages of committed tokens that later sequences can share.

A node is one page of tokens and is named by its page in group 0. Its key is a digest of the whole
prefix. Nodes that were inserted one behind the other form a run, as in a compressed radix tree. A
run is never split: a sequence that leaves a run in its middle starts a new run there. A prefix is
a run and a length. kv_cache.py alone writes the tree.

The cost of finding, locking and unlocking a prefix hardly depends on its length:

- If a key is in the tree, so are the keys of all shorter prefixes, because only leaves are evicted.
  So the longest prefix is found by bisection over the keys of a sequence.
- A lock on a prefix is one entry in `Run.users`: a length, and how many use the run up to it. The
  locked part of a run ends at the longest such length. A run in use counts as one user of its
  parent.
- When a lock changes, only the nodes between the old and the new end of the locked part enter or
  leave the eviction order, as one slice.

Windowed groups count locks per page (windowed_pages.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from aserve.cache.eviction import EvictionOrder
from aserve.cache.runs import Run
from aserve.cache.stored_pages import StoredPages
from aserve.cache.windowed_pages import WindowedPages
from aserve.errors import BugError


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """The first `num_pages` nodes on the path to `run`. A Prefix by itself locks nothing."""

    run: Run | None = None
    num_pages: int = 0


NO_PREFIX = Prefix()


class PrefixTree:
    """The runs by key, and the eviction order of their nodes.

    NOTE: a child run is unlocked before its parent, and a run from its end. So a node comes after
    all its descendants in the eviction order, and the first node is always a leaf at the end of its
    run. Hence every prefix of the order can be evicted.
    """

    __slots__ = ("_run_of", "_runs", "_stored", "order", "windowed")

    def __init__(
        self, num_nodes: int, *, windowed_groups: Sequence[int] = (), stored: StoredPages
    ) -> None:
        """`stored` takes note of what enters the tree and what is evicted."""
        self._stored = stored
        # PERF: 256 dicts, chosen by the first byte of a key, because a dict that grows moves all
        # its entries at once: 2 ms for 40,000 keys. These grow at different times.
        self._runs: list[dict[bytes, Run]] = [{} for _ in range(256)]
        self._run_of: list[Run | None] = [None] * num_nodes
        self.order = EvictionOrder(num_nodes)
        self.windowed = {group: WindowedPages(num_nodes) for group in windowed_groups}

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def __iter__(self) -> Iterator[Run]:
        """Iterates over the runs that have a node."""
        return iter({id(run): run for runs in self._runs for run in runs.values()}.values())

    def get(self, key: bytes) -> Run | None:
        return self._runs[key[0]].get(key)

    def find(self, keys: Sequence[bytes], *, start: int = 0, stop: int | None = None) -> Prefix:
        """Returns the longest cached prefix of `keys[:stop]`. The first `start` must be cached."""
        low, high = start, len(keys) if stop is None else stop
        if low == high or self.get(keys[low]) is None:
            high = low
        while low < high:
            middle = (low + high + 1) // 2
            if self.get(keys[middle - 1]) is not None:
                low = middle
            else:
                high = middle - 1
        return Prefix(self.get(keys[low - 1]), low) if low else NO_PREFIX

    def cut(self, prefix: Prefix, num_pages: int) -> Prefix:
        """Returns the first `num_pages` pages of a prefix."""
        run = prefix.run
        while run is not None and run.start >= num_pages:
            run = run.parent
        return Prefix(run, num_pages) if num_pages else NO_PREFIX

    def nodes(self, prefix: Prefix) -> array[int]:
        parts: list[array[int]] = []
        run, end = prefix.run, prefix.num_pages
        while run is not None:
            if end > run.end:
                raise BugError(f"a prefix of {end} pages was used after its last page was evicted")
            parts.append(run.span(run.start, end))
            end, run = run.start, run.parent
        nodes: array[int] = array("i")
        for part in reversed(parts):
            nodes.extend(part)
        return nodes

    def lock(self, prefix: Prefix) -> None:
        run, end = prefix.run, prefix.num_pages
        while run is not None:
            was_used = bool(run.users)
            run.users[end] = run.users.get(end, 0) + 1
            if end > run.locked_end:
                self.order.remove(run.span(run.locked_end, end))
                run.locked_end = end
            if was_used:
                return
            end, run = run.start, run.parent

    def unlock(self, prefix: Prefix) -> None:
        run, end = prefix.run, prefix.num_pages
        while run is not None:
            run.drop_user(end)
            still_locked = max(run.users, default=run.start)
            if still_locked < run.locked_end:
                self.order.add(run.span(still_locked, run.locked_end)[::-1])
                run.locked_end = still_locked
            if run.users:
                return
            end, run = run.start, run.parent

    def insert(
        self, prefix: Prefix, keys: Sequence[bytes], *, pages: Sequence[array[int]]
    ) -> Prefix:
        """Appends nodes to a locked prefix, with their pages of each group. The lock moves to the
        longer prefix, which is returned. Windowed pages are locked once.
        """
        run, start = prefix.run, prefix.num_pages
        if run is not None and run.start + len(run.pages) == start:
            run.drop_user(start)
        else:
            # WHY the parent gets no new lock: that of the caller now counts for the new run.
            run = Run(run, start)
        run.pages.extend(pages[0])
        run.keys.extend(keys)
        end = start + len(keys)
        run.users[end] = 1
        run.locked_end = end
        for key, node in zip(keys, pages[0], strict=True):
            if self._runs[key[0]].setdefault(key, run) is not run:
                raise BugError(f"prefix {key.hex()} entered the tree, but it is there already")
            self._run_of[node] = run
        for group, windowed in self.windowed.items():
            windowed.pages[pages[0]] = pages[group]
            windowed.locks[pages[0]] = np.asarray(pages[group]) != 0
        self._stored.note_new(keys, pages)
        return Prefix(run, end)

    def evict(self, count: int) -> dict[int, array[int]]:
        """Removes the `count` oldest nodes and returns their pages by group."""
        freed: dict[int, array[int]] = {group: array("i") for group in self.windowed}
        nodes = freed[0] = self.order.take(count)
        start = 0
        while start < count:
            run = self._run_of[nodes[start]]
            num = run.num_at_end(nodes, start) if run is not None else 0
            if run is None or not num:
                raise BugError(
                    f"node {nodes[start]} was evicted, but is not the unlocked end of a run"
                )
            keys = run.keys[: -num - 1 : -1]
            del run.keys[-num:], run.pages[-num:]
            for node, key in zip(nodes[start : start + num], keys, strict=True):
                del self._runs[key[0]][key]
                self._run_of[node] = None
            start += num
            if self.windowed or not self._stored.is_off:
                self._note_evicted(nodes[start - num : start], keys, freed)
        return freed

    def _note_evicted(
        self, nodes: array[int], keys: list[bytes], freed: dict[int, array[int]]
    ) -> None:
        """Drops the windowed pages of evicted nodes, which are freed as well."""
        for node, key in zip(nodes, keys, strict=True):
            dropped = [windowed.drop(node) for windowed in self.windowed.values()]
            self._stored.note_evicted(key, (node, *dropped))
            for group, page in zip(self.windowed, dropped, strict=True):
                if page:
                    freed[group].append(page)
