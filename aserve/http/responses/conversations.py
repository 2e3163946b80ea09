"""The conversations of /v1/conversations: items that several responses continue, one after another.

They are kept in the store of the responses. Only `Conversations` writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from aserve.errors import InvalidRequest, NotFound
from aserve.http.openai.limits import check_length
from aserve.http.responses.conversation import MAX_ITEMS, Item
from aserve.http.responses.records import ConversationObject
from aserve.http.responses.store import (
    ResponseKey,
    ResponseStore,
    StoredConversation,
    StoredResponse,
)

PREFIX = "conv_"

logger = logging.getLogger(__name__)


class Conversations:
    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def get(self, key: ResponseKey) -> StoredConversation:
        """Raises NotFound, which is the same for a conversation of another owner."""
        found = self._store.conversation(key)
        if found is None:
            raise NotFound(
                f"Conversation with id '{key.response_id[:80]}' not found.",
                code="conversation_not_found",
            )
        return found

    def put(self, conversation: StoredConversation) -> None:
        """Stores a new or changed conversation, or raises InvalidRequest."""
        check_length(conversation.items, MAX_ITEMS, param="items")
        if not self._store.put(conversation):
            raise InvalidRequest(
                f"The conversation has {conversation.size_bytes} bytes, which this server cannot "
                "store. See --max-stored-bytes and --max-stored-responses.",
                param="items",
                code="conversation_too_large",
            )

    def describe(self, key: ResponseKey, metadata: dict[str, str]) -> ConversationObject:
        """Replaces the metadata."""
        conversation = self.get(key)
        about = msgspec.structs.replace(conversation.about, metadata=metadata)
        self.put(replace(conversation, about=about))
        return about

    def add(self, key: ResponseKey, items: Sequence[Item]) -> None:
        conversation = self.get(key)
        self.put(replace(conversation, items=(*conversation.items, *items)))

    def item(self, key: ResponseKey, item_id: str) -> Item:
        found = next((item for item in self.get(key).items if item.id == item_id), None)
        if found is None:
            raise NotFound(
                f"Item with id '{item_id[:80]}' not found in conversation '{key.response_id}'.",
                code="item_not_found",
            )
        return found

    def remove(self, key: ResponseKey, item_id: str) -> ConversationObject:
        removed, conversation = self.item(key, item_id), self.get(key)
        items = tuple(item for item in conversation.items if item is not removed)
        self.put(replace(conversation, items=items))
        return conversation.about

    def delete(self, key: ResponseKey) -> None:
        self.get(key)
        self._store.delete(key)

    def extend(self, ended: StoredResponse) -> None:
        """Adds the input and output of a response to the conversation that it continues. One that
        outgrows the store is dropped, so that no later turn lacks an earlier one.
        """
        continued = ended.response.conversation
        if continued is None or ended.response.status not in ("completed", "incomplete"):
            return
        key = ResponseKey(ended.owner, continued.id)
        try:
            self.add(key, ended.conversation[ended.num_earlier :])
        except NotFound:
            logger.debug("conversation deleted before its response ended id=%s", continued.id)
        except InvalidRequest as error:
            logger.warning("conversation dropped id=%s reason=%s", continued.id, error)
            self._store.delete(key)
