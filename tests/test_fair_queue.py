"""Owners in turn, each in order of arrival, and who is left out keeps the place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from aserve.fair_queue import FairQueue


def filled(*items: str) -> FairQueue[str]:
    """Items are named by their owner and a number."""
    queue: FairQueue[str] = FairQueue()
    for item in items:
        queue.push(item[0], item)
    return queue


def drained(queue: FairQueue[str]) -> Iterator[str]:
    while (item := queue.pop()) is not None:
        yield item


def test_owners_are_served_in_turn_and_the_last_served_comes_last() -> None:
    queue = filled("a1", "a2", "a3", "b1", "c1", "b2")
    assert queue.pop() == "a1"
    queue.push("d", "d1")
    assert list(drained(queue)) == ["b1", "c1", "d1", "a2", "b2", "a3"]
    assert len(queue) == 0


def test_an_owner_that_may_not_be_served_keeps_its_place() -> None:
    queue = filled("a1", "b1", "b2")
    assert queue.pop(lambda owner: owner != "a") == "b1"
    assert queue.pop(lambda owner: False) is None
    assert list(drained(queue)) == ["a1", "b2"]


def test_what_is_taken_out_is_not_served_and_may_be_gone_already() -> None:
    queue = filled("a1", "a2", "b1", "c1")
    queue.remove("a", "a1")
    queue.remove("a", "a1")
    queue.remove("x", "x1")
    queue.drop("b")
    queue.drop("b")
    assert len(queue) == 2
    assert list(drained(queue)) == ["a2", "c1"]


@given(st.lists(st.sampled_from("abcd")))
def test_nobody_waits_for_more_than_one_item_of_each_other_owner(token_to_row: list[str]) -> None:
    items = [f"{owner}{number}" for number, owner in enumerate(token_to_row)]
    served = list(drained(filled(*items)))
    assert sorted(served) == sorted(items)
    for owner in set(token_to_row):
        positions = [i for i, item in enumerate(served) if item[0] == owner]
        between = [served[i + 1 : j] for i, j in itertools.pairwise(positions)]
        assert all(len({item[0] for item in gap}) == len(gap) for gap in between)
        assert positions[0] < len(set(token_to_row))
