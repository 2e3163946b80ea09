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


def test_a_second_sequence_shares_the_pages_that_a_running_one_committed() -> None:
    cache = make_cache(8)
    first = open_sequence(cache, "abc")
    commit_all(cache, first, "abc")
    second = open_sequence(cache, "abd")
    assert second.pages[0][:2] == first.pages[0][:2]
    assert second.pages[0][2] != first.pages[0][2]
    assert cache.num_used(0) == 4
    cache.check([first, second])


def test_pages_that_were_not_committed_are_not_found() -> None:
    cache = make_cache(8)
    allocation = open_sequence(cache, "abc")
    cache.commit(allocation, page_keys("abc"), num_pages=1)
    assert cached_len(cache, "abc") == 1
    cache.close(allocation, page_keys("abc"), num_pages=2)
    assert cached_len(cache, "abc") == 2


def test_namespaces_share_no_pages() -> None:
    cache = make_cache(8)
    serve(cache, "ab")
    assert cache.match(page_keys("ab", namespace="salt")).num_pages == 0
    assert cached_len(cache, "ab") == 2


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


def test_leaving_inside_a_page_frees_that_page_and_caches_the_whole_ones_before_it() -> None:
    """Trap 10: what lies after the last whole committed page is freed, and nothing else is."""
    for committed_len in (2 * PAGE_SIZE - 1, 2 * PAGE_SIZE, 2 * PAGE_SIZE + 1):
        cache = make_cache(8)
        allocation = open_sequence(cache, "abc")
        whole = committed_len // PAGE_SIZE
        cache.close(allocation, page_keys("abc"), num_pages=whole)
        assert cached_len(cache, "abc") == whole
        assert cache.num_free(0) == 8 - whole
        cache.check([])


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


def test_a_row_that_met_a_duplicate_frees_its_copies_and_inserts_the_rest_when_it_leaves() -> None:
    cache = make_cache(8)
    first = open_sequence(cache, "abc")
    second = open_sequence(cache, "abd")
    commit_all(cache, first, "abc")
    commit_all(cache, second, "abd")
    close_all(cache, second, "abd")
    assert cached_len(cache, "abd") == 3
    assert (cache.num_used(0), cache.num_cached(0), cache.num_free(0)) == (3, 1, 4)
    cache.check([first])


def test_rows_with_copies_of_one_prompt_do_not_block_each_other_in_a_full_pool() -> None:
    """Each row's copy is its own, so when one leaves the other can take all that it had."""
    cache = make_cache(6)
    first = open_sequence(cache, "abc")
    second = open_sequence(cache, "abc")
    commit_all(cache, first, "abc")
    commit_all(cache, second, "abc")
    assert cache.available(0) == 0
    close_all(cache, second, "abc")
    assert cache.available(0) == 3
    cache.grow(first, 6)
    cache.check([first])


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


def test_matching_touches_nothing() -> None:
    cache = make_cache(4)
    serve(cache, "a")
    serve(cache, "b")
    cached_len(cache, "a")
    taker = open_sequence(cache, "uvw")
    assert (cached_len(cache, "a"), cached_len(cache, "b")) == (0, 1)
    cache.check([taker])


def test_what_a_running_sequence_uses_is_not_evicted() -> None:
    cache = make_cache(5)
    serve(cache, "abc")
    allocation = cache.open(cache.match(page_keys("ab")))
    assert cache.available(0) == 3
    taker = open_sequence(cache, "xyz")
    assert cache.available(0) == 0
    assert cached_len(cache, "abc") == 2
    cache.check([allocation, taker])


def test_growing_beyond_what_is_available_takes_nothing_in_any_group() -> None:
    cache = make_cache(6, 3, windows=(None, 100))
    serve(cache, "ab")
    allocation = open_sequence(cache, "x")
    before = [list(pages) for pages in allocation.pages]
    assert cache.missing(allocation, 4) == (3, 3)
    with pytest.raises(BugError, match="'group1': a holding of 1 pages was to grow to 4, but 2"):
        cache.grow(allocation, 4)
    assert [list(pages) for pages in allocation.pages] == before
    assert cached_len(cache, "ab") == 2
    cache.check([allocation])


def test_growing_to_fewer_pages_keeps_all() -> None:
    cache = make_cache(4)
    allocation = open_sequence(cache, "abc")
    cache.grow(allocation, 1)
    assert allocation.num_pages == 3


def test_a_windowed_group_in_need_leaves_tombstones_and_the_full_group_keeps_its_pages() -> None:
    cache = make_cache(8, 4, windows=(None, 2 * PAGE_SIZE))
    serve(cache, "abcd")
    taker = open_sequence(cache, "x")
    assert cache.num_cached(0) == 4
    assert cache.num_cached(1) == 3
    cache.check([taker])


def test_a_match_ends_where_every_page_of_the_last_window_is_there() -> None:
    """A sequence leaves a windowed page for each of its pages; those behind its window go first."""
    cache = make_cache(9, 4, windows=(None, PAGE_SIZE + 1))
    serve(cache, "abcd")
    lens = [cached_len(cache, "abcd")]
    taker = cache.open(cache.match(page_keys("-")))
    for num_pages in (1, 2, 3, 4):
        cache.grow(taker, num_pages)
        lens.append(cached_len(cache, "abcd"))
    # Position 16 sees 12..16: page d alone. Then a, b, c go, which it doesn't see, and d goes last.
    assert lens == [4, 4, 4, 4, 0]
    assert cache.num_cached(0) == 4


def test_a_match_is_shortened_to_before_a_tombstone() -> None:
    cache = make_cache(9, 4, windows=(None, 100))
    serve(cache, "abcd")
    taker = open_sequence(cache, "x")  # evicts the windowed page of d, the deepest
    assert cached_len(cache, "abcd") == 3
    allocation = open_sequence(cache, "abc")
    assert 0 not in allocation.pages[1]
    cache.check([taker, allocation])


def test_a_prefix_is_opened_without_the_pages_behind_its_window() -> None:
    cache = make_cache(8, 8, windows=(None, PAGE_SIZE))
    serve(cache, "abcd")
    allocation = cache.open(cache.match(page_keys("abcd")))
    assert [page == 0 for page in allocation.pages[1]] == [True, True, True, False]
    assert cache.num_cached(1) == 3
    assert cache.num_used(1) == 1
    cache.check([allocation])


def test_an_opened_prefix_moves_out_of_the_window_page_by_page() -> None:
    cache = make_cache(8, 8, windows=(None, 2 * PAGE_SIZE))
    serve(cache, "abcd")
    allocation = open_sequence(cache, "abcdef")
    for committed_len, num_behind in ((20, 3), (24, 4), (25, 4), (28, 5)):
        cache.commit(allocation, page_keys("abcdef"), num_pages=min(committed_len // PAGE_SIZE, 6))
        cache.release_behind(allocation, committed_len)
        assert allocation.pages[1].count(0) == num_behind
        cache.check([allocation])


def test_a_page_committed_after_its_window_passed_enters_as_a_tombstone() -> None:
    cache = make_cache(8, 8, windows=(None, PAGE_SIZE))
    allocation = open_sequence(cache, "abc")
    cache.release_behind(allocation, 3 * PAGE_SIZE)
    cache.commit(allocation, page_keys("abc"), num_pages=3)
    cache.check([allocation])
    close_all(cache, allocation, "abc")
    assert (cache.num_cached(0), cache.num_cached(1)) == (3, 1)
    assert cached_len(cache, "abc") == 3
    assert cached_len(cache, "ab") == 0


def test_a_newcomer_fills_the_tombstones_that_it_recomputed() -> None:
    cache = make_cache(12, 4, windows=(None, 100))
    serve(cache, "abc")
    close_all(cache, open_sequence(cache, "wxyz"), "wxyz")  # evicts all windowed pages of abc
    assert cached_len(cache, "abc") == 0
    assert cache.num_cached(0) == 7
    serve(cache, "abc")
    assert cached_len(cache, "abc") == 3
    assert cache.num_cached(0) == 7
    cache.check([])


def test_pages_behind_the_window_stay_cached_if_they_were_committed_before() -> None:
    cache = make_cache(8, 8, windows=(None, PAGE_SIZE))
    allocation = open_sequence(cache, "abcd")
    commit_all(cache, allocation, "abcd")
    assert cached_len(cache, "ab") == 2
    close_all(cache, allocation, "abcd")
    assert cache.num_cached(1) == 4


def test_a_private_page_behind_the_window_is_freed() -> None:
    cache = make_cache(8, 8, windows=(None, PAGE_SIZE), prefix_cache=False)
    allocation = open_sequence(cache, "abcd")
    cache.release_behind(allocation, 4 * PAGE_SIZE)
    cache.release_behind(allocation, 4 * PAGE_SIZE)
    assert (cache.num_free(0), cache.num_free(1)) == (4, 7)
    cache.check([allocation])


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    cache = make_cache(4, prefix_cache=False)
    allocation = open_sequence(cache, "ab")
    commit_all(cache, allocation, "ab")
    assert allocation.num_shared == 0
    close_all(cache, allocation, "ab")
    assert cached_len(cache, "ab") == 0
    assert cache.num_free(0) == 4


def test_evicting_all_keeps_what_running_sequences_use() -> None:
    cache = make_cache(8, 8, windows=(None, PAGE_SIZE))
    serve(cache, "abcd")
    allocation = cache.open(cache.match(page_keys("ab")))
    cache.evict_all()
    assert (cache.num_cached(0), cache.num_cached(1)) == (0, 0)
    assert (cache.num_used(0), cache.num_used(1)) == (2, 1)
    cache.check([allocation])


def test_a_closed_holding_is_empty_and_closes_again_without_harm() -> None:
    cache = make_cache(4)
    allocation = open_sequence(cache, "ab")
    close_all(cache, allocation, "ab")
    assert allocation.num_pages == 0
    cache.close(allocation, [], num_pages=0)
    assert cache.num_cached(0) == 2


@pytest.mark.parametrize("num_pages", [3, 4])
def test_caching_pages_without_keys_or_beyond_the_holding_raises(num_pages: int) -> None:
    cache = make_cache(4)
    allocation = open_sequence(cache, "ab")
    keys = page_keys("ab" if num_pages == 3 else "abcd")
    with pytest.raises(BugError, match="were to be cached"):
        cache.commit(allocation, keys, num_pages=num_pages)
    with pytest.raises(BugError, match="were to be cached"):
        cache.close(allocation, keys, num_pages=num_pages)


def test_opening_a_match_that_was_evicted_since_raises() -> None:
    cache = make_cache(4)
    serve(cache, "ab")
    prefix = cache.match(page_keys("ab"))
    cache.evict_all()
    with pytest.raises(BugError, match="its page is gone"):
        cache.open(prefix)


def test_the_first_group_must_see_everything() -> None:
    groups = (GroupSpec(name="window", num_pages=4, window=8),)
    with pytest.raises(BugError, match="must have no window"):
        KvCache(groups, page_size=4, prefix_cache=True)
