"""What several allocations have in common, on a real cache."""

from __future__ import annotations

import pytest

from aserve.cache.allocation import PageAllocation, num_shared_pages
from aserve.cache.kv_cache import KvCache
from aserve.messages.executor import GroupSpec


def opened(cache: KvCache, name: str, *, num_pages: int) -> PageAllocation:
    """A sequence whose whole pages are those of the letters, all of them committed, and one more
    that it writes to."""
    keys = [name[: index + 1].encode() for index in range(len(name))]
    allocation = cache.open(cache.match(keys))
    cache.grow(allocation, num_pages)
    cache.commit(allocation, keys, num_pages=len(keys))
    return allocation


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (["abcdefgh"], 0),
        (["abcdefgh", "abcdefgh"], 8),
        (["abcdefgh", "abc"], 3),
        (["abc", "abcdefgh", "abcd"], 3),
        (["abcdefgh", "abcdeXgh", "abcdefgX"], 5),
        (["abcdefgh", "aXcdefgh"], 1),
        (["abcdefgh", "Xbcdefgh"], 0),
        (["abcdefgh", "abcdefgh", ""], 0),
        (["", ""], 0),
    ],
)
def test_what_all_have_in_common_is_counted(names: list[str], shared: int) -> None:
    cache = KvCache((GroupSpec("full", 64),), page_size=4, prefix_cache=True)
    allocations = [opened(cache, name, num_pages=len(name) + 1) for name in names]
    assert num_shared_pages(allocations) == shared
    assert num_shared_pages(allocations[::-1]) == shared


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    cache = KvCache((GroupSpec("full", 64),), page_size=4, prefix_cache=False)
    assert num_shared_pages([opened(cache, "abc", num_pages=4) for _ in range(2)]) == 0
