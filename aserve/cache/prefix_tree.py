"""The prefix tree: whole pages of committed tokens that later sequences may share.

A node is one page of tokens and is named by its page in group 0; its key names the whole prefix
(keys.py). Nodes that were inserted one behind the other form a run, as in a compressed radix tree,
except that a run is never split: a sequence that leaves a run in its middle starts a new run there.
So a prefix is a run and a length, and finding, locking and unlocking one cost about the same for 10
pages and for 10,000. Knows nothing of tokens, free pages or sequences. Written by kv_cache.py only.

How the tree stays O(1) in the length of a prefix:

- A key that is in the tree implies that the keys of all shorter prefixes are, because only leaves
  are evicted. So the longest prefix is found by bisection over the keys of a sequence.
- A lock on a prefix is one entry in `Run.users` (a length, and how many use the run up to it). What
  is locked of a run is the longest such length. A run in use counts as one user of its parent.
- Only the nodes between the longest length before and after a change enter or leave the order of
  eviction, as one slice.

Groups with a window count locks per page (windowed_pages.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import overload

import msgspec
import numpy as np

from aserve.cache.eviction import EvictionOrder
from aserve.cache.windowed_pages import WindowedPages
from aserve.errors import BugError
from aserve.messages.base import ArrayI32, array_i32


class Run:
    """Nodes one behind the other, from page index `start` on. Written by PrefixTree only."""

    __slots__ = ("keys", "locked_end", "pages", "parent", "start", "users")

    def __init__(self, parent: Run | None, start: int) -> None:
        self.parent = parent
        self.start = start
        self.pages: array[int] = array("i")  # of group 0, one per node
        self.keys: list[bytes] = []
        self.users: dict[int, int] = {}  # how many use the nodes before each page index
        self.locked_end = start  # nodes before this page index are locked

    @property
    def end(self) -> int:
        return self.start + len(self.pages)

    def span(self, start: int, end: int) -> array[int]:
        """The nodes of page indices start..end - 1."""
        return self.pages[start - self.start : end - self.start]


class Prefix(msgspec.Struct, frozen=True):
    """The first `num_pages` nodes on the way to `run`. It holds nothing until it is opened."""

    run: Run | None = None
    num_pages: int = 0


class PrefixTree:
    """Runs by key; in group 0 the order of eviction.

    NOTE: a child run is unlocked before its parent and a run from its end, so a node stands behind
    all its descendants in the order, and the front of the order is always the last node of its run
    and a leaf. Hence evictable pages are counted by a length, and the oldest is found without a
    search.
    """

    __slots__ = ("_run_of", "_runs", "order", "windowed")

    def __init__(self, num_nodes: int, *, windowed_groups: Sequence[int] = ()) -> None:
        self._runs: dict[bytes, Run] = {}
        self._run_of: list[Run | None] = [None] * num_nodes
        self.order = EvictionOrder(num_nodes)
        self.windowed = {group: WindowedPages(num_nodes) for group in windowed_groups}

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        """Every run that has a node."""
        return iter({id(run): run for run in self._runs.values()}.values())

    def get(self, key: bytes) -> Run | None:
        return self._runs.get(key)

    def find(self, keys: Sequence[bytes], *, start: int = 0, stop: int | None = None) -> Prefix:
        """The longest prefix of `keys[:stop]` that is here; the first `start` are known to be."""
        low, high = start, len(keys) if stop is None else stop
        if low == high or keys[low] not in self._runs:
            high = low
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in self._runs:
                low = middle
            else:
                high = middle - 1
        return Prefix(self._runs[keys[low - 1]], low) if low else Prefix()

    def cut(self, prefix: Prefix, num_pages: int) -> Prefix:
        """The first pages of a prefix."""
        run = prefix.run
        while run is not None and run.start >= num_pages:
            run = run.parent
        return Prefix(run, num_pages) if num_pages else Prefix()

    def nodes(self, prefix: Prefix) -> array[int]:
        parts: list[array[int]] = []
        run, end = prefix.run, prefix.num_pages
        while run is not None:
            if end > run.end:
                raise BugError(f"a prefix of {end} pages was opened, but its page is gone")
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
            _drop_user(run, end)
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
        """Nodes behind a locked prefix, with their pages of each group. The lock moves to the
        longer prefix, which is returned; windowed pages are locked once.
        """
        if keys[0] in self._runs:
            raise BugError(f"prefix {keys[0].hex()} entered the tree, but it is there already")
        run, start = prefix.run, prefix.num_pages
        if run is not None and run.end == start:
            _drop_user(run, start)
        else:
            # WHY no lock on the parent: the holder's own is the new run's from now on.
            run = Run(run, start)
        run.pages.extend(pages[0])
        run.keys.extend(keys)
        run.users[run.end] = 1
        run.locked_end = run.end
        self._runs.update(dict.fromkeys(keys, run))
        for node in pages[0]:
            self._run_of[node] = run
        for group, windowed in self.windowed.items():
            windowed.pages[pages[0]] = pages[group]
            windowed.locks[pages[0]] = np.asarray(pages[group]) != 0
        return Prefix(run, run.end)

    def evict(self, count: int) -> dict[int, array[int]]:
        """Removes the oldest nodes; returns the freed pages of each group."""
        freed: dict[int, array[int]] = {group: array("i") for group in self.windowed}
        freed[0] = self.order.take(count)
        for node in freed[0]:
            run = self._run_of[node]
            if run is None or run.pages[-1] != node or run.locked_end >= run.end:
                raise BugError(f"node {node} was evicted, but it is no unlocked end of a run")
            run.pages.pop()
            del self._runs[run.keys.pop()]
            self._run_of[node] = None
            for group, windowed in self.windowed.items():
                page = windowed.drop(node)
                if page:
                    freed[group].append(page)
        return freed


def _drop_user(run: Run, end: int) -> None:
    left = run.users.get(end, 0) - 1
    if left < 0:
        raise BugError(f"a prefix of {end} pages was unlocked, but nobody locked it")
    if left:
        run.users[end] = left
    else:
        del run.users[end]


KEY_BYTES = 16  # 2^64 pages until two of them are likely to share a key


def root_key(namespace: str) -> bytes:
    """The key before the first page: requests of different namespaces (salt, adapter, weights)
    share nothing.
    """
    return blake2b(namespace.encode(), digest_size=KEY_BYTES).digest()


def extend_keys(keys: list[bytes], tokens: ArrayI32, *, page_size: int, root: bytes) -> None:
    """Appends the keys of those whole pages of `tokens` that have none yet.

    `tokens` is int32 [sequence length], from position 0 on; `keys` are those of its first pages.
    """
    # NOTE: the same tokens in another width would get other keys, which is a cache that never hits.
    assert tokens.dtype == np.int32
    parent = keys[-1] if keys else root
    for start in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        page_tokens = tokens[start : start + page_size].tobytes()
        parent = blake2b(page_tokens, digest_size=KEY_BYTES, key=parent).digest()
        keys.append(parent)


def prompt_keys(prompt_ids: bytes, *, page_size: int, namespace: str) -> bytes:
    """The keys of a prompt's whole pages, one after the other, as an AdmitRequest carries them.

    PERF: about 1 us per page, so the tokenizer makes them beside the loop where a prompt is long.
    """
    keys: list[bytes] = []
    extend_keys(keys, array_i32(prompt_ids), page_size=page_size, root=root_key(namespace))
    return b"".join(keys)


class PageKeys(Sequence[bytes]):
    """The keys of a sequence's whole pages. Those of the prompt are shared by all children of a
    request and stay in the bytes in which they came.
    """

    __slots__ = ("_num_prompt", "_own", "_prompt", "_root")

    def __init__(self, prompt: bytes, *, root: bytes) -> None:
        self._prompt = prompt
        self._num_prompt = len(prompt) // KEY_BYTES
        self._own: list[bytes] = []
        self._root = root

    def __len__(self) -> int:
        return self._num_prompt + len(self._own)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """One key, or those of a range of pages."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if index >= self._num_prompt:
            return self._own[index - self._num_prompt]
        return self._prompt[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def append(self, page_tokens: ArrayI32) -> None:
        """The key of the next page, from its tokens."""
        parent = self[len(self) - 1] if len(self) else self._root
        self._own.append(blake2b(page_tokens.tobytes(), digest_size=KEY_BYTES, key=parent).digest())

    def num_alike(self, other: PageKeys, *, start: int, stop: int) -> int:
        """How many of the first `stop` keys are those of `other`; the first `start` are."""
        low, high = start, min(stop, len(self), len(other))
        while low < high:
            middle = (low + high + 1) // 2
            if self[middle - 1] == other[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low
