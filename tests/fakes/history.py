"""A history for responses: the same items for every id, or none at all."""

from __future__ import annotations

from collections.abc import Sequence

from aserve.errors import InvalidRequest
from aserve.http.responses.conversation import Item
from aserve.http.responses.store import ResponseKey


class FakeHistory:
    def __init__(self, *items: Item) -> None:
        self._items = items

    def response_items(self, _: ResponseKey) -> Sequence[Item]:
        if not self._items:
            raise InvalidRequest("not found", param="previous_response_id")
        return self._items

    conversation_items = response_items
