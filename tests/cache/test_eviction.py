from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest

from aserve.cache.eviction import EvictionOrder
from aserve.cache.windowed_pages import WindowedPages


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
