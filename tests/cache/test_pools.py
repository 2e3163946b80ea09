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


@pytest.mark.parametrize(
    ("pages", "story"),
    [
        ([0], "page 0 came back, but pages are 1..4"),
        ([-1], "page -1 came back, but pages are 1..4"),
        ([5], "page 5 came back, but pages are 1..4"),
        ([2, 2], "'full': page 2 came back, but it is free already"),
    ],
)
def test_a_page_comes_back_once_and_unknown_ones_never(pages: list[int], story: str) -> None:
    pool = PagePool("full", 5)
    pool.take(4)
    with pytest.raises(BugError, match=story):
        pool.give_back(pages)


def test_the_lowest_free_row_is_taken_first_and_never_row_zero() -> None:
    rows = RowPool(4)
    assert [rows.take() for _ in range(4)] == [1, 2, 3, 4]
    for row in (3, 1, 2):
        rows.give_back(row)
    assert [rows.take(), rows.take()] == [1, 2]
    assert rows.num_free == 1


@pytest.mark.parametrize(
    ("row", "story"),
    [(0, r"rows are 1\.\.2"), (-1, r"1\.\.2"), (3, r"1\.\.2"), (2, "free already")],
)
def test_a_row_comes_back_once_and_unknown_ones_never(row: int, story: str) -> None:
    rows = RowPool(2)
    rows.take()
    rows.take()
    with pytest.raises(BugError, match="all 2 are taken"):
        rows.take()
    rows.give_back(2)
    with pytest.raises(BugError, match=story):
        rows.give_back(row)
