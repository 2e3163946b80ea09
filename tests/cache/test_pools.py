""""""

import pytest

from aserve.cache.pools import PagePool, RowPool
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


def test_the_lowest_free_row_is_taken_first_and_never_row_zero() -> None:
    rows = RowPool(4)
    assert [rows.take() for _ in range(4)] == [1, 2, 3, 4]
    for row in (3, 1, 2):
        rows.give_back(row)
    assert [rows.take(), rows.take()] == [1, 2]
    assert rows.num_free == 1


def test_taking_a_row_of_a_full_table_raises() -> None:
    rows = RowPool(1)
    rows.take()
    with pytest.raises(BugError, match="all 1 are taken"):
        rows.take()


@pytest.mark.parametrize("row", [0, -1, 3])
def test_rows_outside_the_table_never_come_back(row: int) -> None:
    rows = RowPool(2)
    rows.take()
    rows.take()
    with pytest.raises(BugError, match=r"rows are 1\.\.2"):
        rows.give_back(row)


def test_a_row_that_comes_back_twice_raises() -> None:
    rows = RowPool(2)
    row = rows.take()
    rows.give_back(row)
    with pytest.raises(BugError, match="free already"):
        rows.give_back(row)
