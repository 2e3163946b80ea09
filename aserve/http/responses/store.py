"""Stores ended responses and conversations in memory, with LRU eviction.

A record is found only with its owner, so its id is useless to other clients. The store is bounded
by count and bytes. `Responses` and `Conversations` write it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import msgspec

from aserve.http.long_json import pieces_of
from aserve.http.responses.conversation import Item, item_of_output, size_of
from aserve.http.responses.records import ConversationObject, ResponseObject


class ResponseKey(NamedTuple):
    """The key of a response, or of a conversation, whose ids begin differently."""

    owner: str
    response_id: str


@dataclass(frozen=True)
class StoredResponse:
    """A response with the items of its prompt, of which the first `num_earlier` are those of the
    response or conversation that it continues. `conversation` also has its output.

    Turns of one conversation share their items, but each turn counts all of them, so the bound
    on bytes holds whichever turns are evicted.
    """

    response: ResponseObject
    items: tuple[Item, ...]
    owner: str = ""
    num_earlier: int = 0

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


@dataclass(frozen=True)
class StoredConversation:
    """Items that responses continue. A change makes a new record."""

    about: ConversationObject
    items: tuple[Item, ...] = ()
    owner: str = ""

    @property
    def key(self) -> ResponseKey:
        return ResponseKey(self.owner, self.about.id)

    @cached_property
    def size_bytes(self) -> int:
        return len(msgspec.json.encode(self.about)) + sum(map(size_of, self.items))


Stored: TypeAlias = StoredResponse | StoredConversation


class ResponseStore:
    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[ResponseKey, Stored] = OrderedDict()
        self._size_bytes = 0

    def put(self, stored: Stored) -> bool:
        """Stores a record instead of an earlier one with its key, and evicts the least recently
        used ones above the bounds. A record larger than the whole store is not stored, and changes
        nothing. Returns whether it is stored.
        """
        if stored.size_bytes > self._max_bytes:
            return False
        self.delete(stored.key)
        self._stored[stored.key] = stored
        self._size_bytes += stored.size_bytes
        while len(self._stored) > self._max_count or self._size_bytes > self._max_bytes:
            self.delete(next(iter(self._stored)))
        return stored.key in self._stored

    def get(self, key: ResponseKey) -> StoredResponse | None:
        found = self._find(key)
        return found if isinstance(found, StoredResponse) else None

    def conversation(self, key: ResponseKey) -> StoredConversation | None:
        found = self._find(key)
        return found if isinstance(found, StoredConversation) else None

    def _find(self, key: ResponseKey) -> Stored | None:
        if key in self._stored:
            self._stored.move_to_end(key)
        return self._stored.get(key)

    def delete(self, key: ResponseKey) -> bool:
        stored = self._stored.pop(key, None)
        if stored is None:
            return False
        self._size_bytes -= stored.size_bytes
        return True
