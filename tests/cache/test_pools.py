"""Pools of pages and rows, and the order in which cached pages are evicted."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest

from aserve.cache.eviction import EvictionOrder
from aserve.cache.pools import PagePool, RowPool
from aserve.cache.windowed_pages import WindowedPages
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


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_agree_with_an_ordered_dictionary(seed: int) -> None:
    chance = random.Random(seed)
    num_pages = chance.randint(2, 40)
    order, naive = EvictionOrder(num_pages), OrderedDict[int, None]()
    for _ in range(300):
        outside = [page for page in range(1, num_pages) if page not in naive]
        match chance.randint(0, 2):
            case 0 if outside:
                added = chance.sample(outside, chance.randint(1, len(outside)))
                order.add(added)
                naive.update(dict.fromkeys(added))
            case 1 if naive:
                removed = chance.sample(sorted(naive), chance.randint(1, len(naive)))
                order.remove(removed)
                for page in removed:
                    del naive[page]
            case _:
                count = chance.randint(0, len(naive))
                assert list(order.take(count)) == [
                    naive.popitem(last=False)[0] for _ in range(count)
                ]
        assert order.in_order() == list(naive)
        assert len(order) == len(naive)
        assert all((page in order) == (page in naive) for page in range(1, num_pages))


def test_a_windowed_page_that_is_in_use_cannot_be_evicted() -> None:
    windowed = WindowedPages(4)
    nodes = np.array([1, 2], np.int32)
    windowed.fill(1, 11)
    windowed.fill(2, 12)
    windowed.unlock(nodes)
    assert windowed.order.in_order() == [1, 2]
    windowed.lock(nodes[:1])
    assert windowed.order.in_order() == [2]
