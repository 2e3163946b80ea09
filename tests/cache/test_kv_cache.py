"""Cases of the KV cache by name; tests/cache/test_cache_model.py has random lives of sequences."""

import pytest

from aserve.cache.kv_cache import KvCache
from aserve.errors import BugError
from aserve.messages.executor import GroupSpec
from tests.cache.sequences import (
    PAGE_SIZE,
    cached_len,
    close_all,
    commit_all,
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


def test_a_row_that_meets_a_duplicate_keeps_its_pages_and_inserts_no_more_while_it_lives() -> None:
    cache = make_cache(8)
    first = open_sequence(cache, "abc")
    second = open_sequence(cache, "abd")  # opened before anything was committed: nothing is shared
    commit_all(cache, first, "abc")
    before = list(second.pages[0])
    commit_all(cache, second, "abd")
    assert not second.is_inserting
    assert list(second.pages[0]) == before
    assert second.num_shared == 0
    assert cached_len(cache, "abd") == 2
    cache.check([first, second])


def test_the_least_recently_used_leaf_goes_first_and_parents_go_after_their_children() -> None:
    cache = make_cache(6)
    for symbols in ("ab", "ac", "xyz"):
        serve(cache, symbols)
    cache.close(cache.open(cache.match(page_keys("ab"))), page_keys("ab"), num_pages=2)
    taker = cache.open(cache.match(page_keys("-")))
    gone = []
    for num_pages in range(1, 7):
        cache.grow(taker, num_pages)
        gone.append([cached_len(cache, symbols) for symbols in ("ab", "ac", "xyz")])
        cache.check([taker])
    assert gone == [[2, 1, 3], [2, 1, 2], [2, 1, 1], [2, 1, 0], [1, 1, 0], [0, 0, 0]]


def test_growing_beyond_what_is_available_takes_nothing_in_any_group() -> None:
    cache = make_cache(6, 3, windows=(None, 100))
    serve(cache, "ab")
    allocation = open_sequence(cache, "x")
    before = [list(pages) for pages in allocation.pages]
    assert cache.missing(allocation, 4) == (3, 3)
    with pytest.raises(BugError, match="'group1': an allocation of 1 pages cannot grow to 4: 2"):
        cache.grow(allocation, 4)
    assert [list(pages) for pages in allocation.pages] == before
    assert cached_len(cache, "ab") == 2
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
