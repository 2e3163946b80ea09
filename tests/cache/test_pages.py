import pytest

from aserve.cache.pages import PagePool
from aserve.errors import BugError


def test_every_page_but_the_padding_page_is_given_out_once() -> None:
    pool = PagePool("full", 9)
    taken = pool.take(3) + pool.take(0) + pool.take(5)
    assert sorted(taken) == list(range(1, 9))
    assert pool.num_free == 0


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = PagePool("full", 4)
    pool.take(2)
    with pytest.raises(BugError, match="2 pages were asked for, but 1 are free"):
        pool.take(2)
    assert pool.num_free == 1
    assert list(pool.take(1)) == [3]


def test_a_page_that_comes_back_twice_raises_and_is_named() -> None:
    pool = PagePool("full", 5)
    pages = pool.take(4)
    pool.give_back(pages)
    with pytest.raises(BugError, match=f"'full': page {pages[1]} came back, but it is free"):
        pool.give_back([pages[1]])
    assert pool.num_free == 4


def test_a_page_given_back_twice_in_one_call_raises() -> None:
    pool = PagePool("full", 5)
    page = pool.take(1)[0]
    with pytest.raises(BugError, match="free already"):
        pool.give_back([page, page])


@pytest.mark.parametrize("page", [0, -1, 5])
def test_the_padding_page_and_unknown_pages_never_come_back(page: int) -> None:
    pool = PagePool("full", 5)
    pool.take(4)
    with pytest.raises(BugError, match=f"page {page} came back, but pages are 1..4"):
        pool.give_back([page])
