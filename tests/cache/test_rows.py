import pytest

from aserve.cache.rows import RowPool
from aserve.errors import BugError


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
