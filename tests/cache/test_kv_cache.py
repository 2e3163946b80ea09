"""Cases of the KV cache by name; tests/cache/test_cache_model.py has random lives of sequences."""

from __future__ import annotations

import pytest

from aserve.cache.allocation import PageAllocation, num_shared_pages
from aserve.cache.kv_cache import KvCache
from aserve.errors import BugError
from aserve.messages.executor import GroupSpec
from tests.cache.sequences import (
    PAGE_SIZE,
    cached_len,
    close_all,
    make_cache,
    open_sequence,
    page_keys,
    serve,
)


def test_releasing_inside_a_page_keeps_it() -> None:
    """Trap 10: only whole pages are given back, those that no position from the committed length on
    sees.
    """
    cache = make_cache(8, 8, windows=(None, 6))
    allocation = open_sequence(cache, "abc")
    cache.commit(allocation, page_keys("abc"), num_pages=2)
    cache.release_behind(allocation, 8)  # position 8 sees 3..8, and 3 is the last one of page 0
    assert 0 not in allocation.pages[1]
    cache.release_behind(allocation, 9)
    assert [page == 0 for page in allocation.pages[1]] == [True, False, False]
    assert 0 not in allocation.pages[0]
    cache.check([allocation])


def test_without_a_prefix_cache_nothing_is_kept_nor_held_behind_the_window() -> None:
    cache = make_cache(8, 8, windows=(None, PAGE_SIZE), prefix_cache=False)
    allocation = open_sequence(cache, "abcd")
    cache.release_behind(allocation, 4 * PAGE_SIZE)
    cache.release_behind(allocation, 4 * PAGE_SIZE)
    assert (cache.num_free(0), cache.num_free(1)) == (4, 7)
    cache.check([allocation])
    close_all(cache, allocation, "abcd")
    assert (cached_len(cache, "abcd"), cache.num_free(0)) == (0, 8)
    cache.close(allocation, [], num_pages=0)  # harms nobody


@pytest.mark.parametrize("num_pages", [3, 4])
def test_caching_pages_without_keys_or_beyond_the_allocation_raises(num_pages: int) -> None:
    cache = make_cache(4)
    allocation = open_sequence(cache, "ab")
    keys = page_keys("ab" if num_pages == 3 else "abcd")
    with pytest.raises(BugError, match="cannot be cached"):
        cache.commit(allocation, keys, num_pages=num_pages)
    with pytest.raises(BugError, match="cannot be cached"):
        cache.close(allocation, keys, num_pages=num_pages)


def test_opening_a_match_that_was_evicted_since_raises() -> None:
    cache = make_cache(4)
    serve(cache, "ab")
    prefix = cache.match(page_keys("ab"))
    cache.evict_all()
    with pytest.raises(BugError, match="after its last page was evicted"):
        cache.open(prefix)


def test_the_first_group_must_see_everything() -> None:
    groups = (GroupSpec(name="window", num_pages=4, window=8),)
    with pytest.raises(BugError, match="must have no window"):
        KvCache(groups, page_size=4, prefix_cache=True)


def opened(cache: KvCache, name: str, *, num_pages: int) -> PageAllocation:
    """A sequence whose whole pages are those of the letters, all of them committed, and one more
    that it writes to."""
    keys = [name[: index + 1].encode() for index in range(len(name))]
    allocation = cache.open(cache.match(keys))
    cache.grow([allocation], [num_pages])
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
