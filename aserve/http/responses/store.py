"""Stores ended responses in memory, so that they can be read and continued, with LRU eviction.

A response is found only with its owner, so its id is useless to other clients. The store is bounded
by count and bytes. Only `Responses` writes it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from aserve.http.long_json import pieces_of
from aserve.http.responses.conversation import Item, item_of_output, size_of
from aserve.http.responses.records import ResponseObject


class ResponseKey(NamedTuple):
    owner: str
    response_id: str


@dataclass(frozen=True)
class StoredResponse:
    """A response with the items of its prompt. `conversation` also has its output.

    Turns of one conversation share their items, but each turn counts all of them, so the bound
    on bytes holds whichever turns are evicted.
    """

    response: ResponseObject
    items: tuple[Item, ...]
    owner: str = ""

    @property
    def key(self) -> ResponseKey:
        return ResponseKey(self.owner, self.response.id)

    @property
    def conversation(self) -> tuple[Item, ...]:
        return (*self.items, *map(item_of_output, self.response.output))

    @cached_property
    def size_bytes(self) -> int:
        size = sum(map(len, pieces_of(self.response)))
        return size + sum(map(size_of, self.items))


class ResponseStore:
    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[ResponseKey, StoredResponse] = OrderedDict()
        self._size_bytes = 0

    def put(self, stored: StoredResponse) -> None:
        """Stores a response, and evicts the least recently used ones above the bounds. A response
        larger than the whole store is not stored.
        """
        if stored.size_bytes > self._max_bytes:
            return
        self._stored[stored.key] = stored
        self._size_bytes += stored.size_bytes
        while len(self._stored) > self._max_count or self._size_bytes > self._max_bytes:
            self.delete(next(iter(self._stored)))

    def get(self, key: ResponseKey) -> StoredResponse | None:
        if key in self._stored:
            self._stored.move_to_end(key)
        return self._stored.get(key)

    def delete(self, key: ResponseKey) -> bool:
        stored = self._stored.pop(key, None)
        if stored is None:
            return False
        self._size_bytes -= stored.size_bytes
        return True
