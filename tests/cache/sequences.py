"""Short ways to drive a KvCache in tests: a sequence whose pages each repeat one symbol."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aserve.cache.allocation import PageAllocation
from aserve.cache.kv_cache import KvCache
from aserve.cache.page_keys import extend_keys, root_key
from aserve.messages.executor import GroupSpec

PAGE_SIZE = 4


def make_cache(
    *num_pages: int, windows: Sequence[int | None] = (None, None, None), prefix_cache: bool = True
) -> KvCache:
    """Pools of that many pages to give out; the padding page comes on top."""
    groups = tuple(
        GroupSpec(name=f"group{group}", num_pages=count + 1, window=window)
        for group, (count, window) in enumerate(zip(num_pages, windows, strict=False))
    )
    return KvCache(groups, page_size=PAGE_SIZE, prefix_cache=prefix_cache)


def page_keys(symbols: str, *, namespace: str = "", page_size: int = PAGE_SIZE) -> list[bytes]:
    """One key per symbol: a page whose tokens are all that symbol."""
    tokens = np.repeat(np.array([ord(s) for s in symbols], dtype=np.int32), page_size)
    keys: list[bytes] = []
    extend_keys(keys, tokens, page_size=page_size, root=root_key(namespace))
    return keys


def open_sequence(cache: KvCache, symbols: str) -> PageAllocation:
    """Opened with its cached prefix and grown to all its pages."""
    allocation = cache.open(cache.match(page_keys(symbols)))
    cache.grow([allocation], [len(symbols)])
    return allocation


def commit_all(cache: KvCache, allocation: PageAllocation, symbols: str) -> None:
    cache.commit(allocation, page_keys(symbols), num_pages=len(symbols))
    cache.release_behind(allocation, len(symbols) * PAGE_SIZE)


def close_all(cache: KvCache, allocation: PageAllocation, symbols: str) -> None:
    cache.close(allocation, page_keys(symbols), num_pages=len(symbols))


def serve(cache: KvCache, symbols: str) -> None:
    """A sequence that comes, commits all its pages, and leaves."""
    allocation = open_sequence(cache, symbols)
    commit_all(cache, allocation, symbols)
    close_all(cache, allocation, symbols)


def cached_len(cache: KvCache, symbols: str) -> int:
    """Pages that a sequence of these would find."""
    return cache.match(page_keys(symbols)).num_pages
