"""A response of many input items: few of them are touched to show few, and there is a bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import aiohttp
import pytest

from aserve.http.responses.conversation import MAX_ITEMS, Message
from aserve.http.responses.handlers import PageQuery, page_of


class Counted(Sequence[Message]):
    """Messages that are made when they are looked at."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.num_looks = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Message]:
        return (self[place] for place in range(self._length))

    @overload
    def __getitem__(self, place: int) -> Message: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Message]: ...
    def __getitem__(self, place: int | slice) -> Message | Sequence[Message]:
        assert isinstance(place, int)
        self.num_looks += 1
        return Message(f"msg_{place}", "user", ("a",))


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_page_converts_only_its_own_messages(order: Any) -> None:
    messages = Counted(500_000)
    page = page_of(messages, PageQuery(limit=3, order=order))
    first = 0 if order == "asc" else 499_999
    step = 1 if order == "asc" else -1
    assert [item.id for item in page.data] == [f"msg_{first + step * i}" for i in range(3)]
    assert (page.first_id, page.last_id) == (page.data[0].id, page.data[-1].id)
    assert page.has_more
    assert messages.num_looks == 3


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_follow_each_other_to_the_end(order: Any) -> None:
    seen: list[str] = []
    after = None
    while True:
        page = page_of(Counted(10), PageQuery(limit=4, order=order, after=after))
        seen += [item.id for item in page.data]
        after = page.last_id
        if not page.has_more:
            break
    numbers = range(10) if order == "asc" else range(9, -1, -1)
    assert seen == [f"msg_{number}" for number in numbers]


async def test_more_items_than_the_bound_are_refused(web: aiohttp.ClientSession) -> None:
    items = [{"role": "user", "content": "a"}] * (MAX_ITEMS + 1)
    async with web.post("/v1/responses", json={"input": items}) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "input")
    assert str(MAX_ITEMS) in error["message"]
