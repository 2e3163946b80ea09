"""Handlers of /v1/conversations: create, read, change and delete conversations and their items."""

from __future__ import annotations

import msgspec
from aiohttp import web

from aserve.http.body import parse_query
from aserve.http.openai.limits import check_length, check_within
from aserve.http.responses.body import InputItem
from aserve.http.responses.call import check_metadata
from aserve.http.responses.conversation import Item, item_for_client, items_of
from aserve.http.responses.conversations import PREFIX, Conversations
from aserve.http.responses.handlers import (
    PAGE_SIZES,
    PageQuery,
    key_of,
    page_of,
    responses_of,
    send_record,
)
from aserve.http.responses.records import ConversationObject, DeletedConversation
from aserve.http.responses.store import StoredConversation
from aserve.http.route import Route, get, post
from aserve.http.state import REQUEST_ID, HttpContext, origin_of

MAX_ADDED = 20  # items that one request adds


class ConversationBody(msgspec.Struct, kw_only=True):
    items: list[InputItem] | None = None
    metadata: dict[str, str] | None = None


class MetadataBody(msgspec.Struct, kw_only=True):
    metadata: dict[str, str] | None = None


class ItemsBody(msgspec.Struct, kw_only=True):
    items: list[InputItem] | None = None


async def create_conversation(
    request: web.Request, context: HttpContext, body: ConversationBody
) -> web.StreamResponse:
    metadata = body.metadata or {}
    check_metadata(metadata)
    items = _items_of(request, body.items) if body.items else ()
    origin = origin_of(request, context)
    about = ConversationObject(f"{PREFIX}{origin.request_id}", origin.created, metadata)
    _conversations(request).put(StoredConversation(about, items, origin.caller.owner))
    return await send_record(request, about, context)


async def read_conversation(request: web.Request, context: HttpContext) -> web.StreamResponse:
    about = _conversations(request).get(key_of(request, context)).about
    return await send_record(request, about, context)


async def update_conversation(
    request: web.Request, context: HttpContext, body: MetadataBody
) -> web.StreamResponse:
    """Replaces the metadata."""
    metadata = body.metadata or {}
    check_metadata(metadata)
    about = _conversations(request).describe(key_of(request, context), metadata)
    return await send_record(request, about, context)


async def delete_conversation(request: web.Request, context: HttpContext) -> web.StreamResponse:
    key = key_of(request, context)
    _conversations(request).delete(key)
    return await send_record(request, DeletedConversation(key.response_id), context)


async def list_items(request: web.Request, context: HttpContext) -> web.StreamResponse:
    query = parse_query(request, PageQuery)
    check_within(query.limit, PAGE_SIZES, param="limit")
    items = _conversations(request).get(key_of(request, context)).items
    return await send_record(request, page_of(items, query), context)


async def add_items(
    request: web.Request, context: HttpContext, body: ItemsBody
) -> web.StreamResponse:
    """Adds items at the end, and returns them."""
    conversations, key = _conversations(request), key_of(request, context)
    conversations.get(key)  # an unknown conversation is a 404, whatever the items are
    items = _items_of(request, body.items)
    conversations.add(key, items)
    query = PageQuery(limit=MAX_ADDED, order="asc")
    return await send_record(request, page_of(items, query), context)


async def read_item(request: web.Request, context: HttpContext) -> web.StreamResponse:
    item = _conversations(request).item(key_of(request, context), request.match_info["item"])
    return await send_record(request, item_for_client(item), context)


async def delete_item(request: web.Request, context: HttpContext) -> web.StreamResponse:
    """Removes an item, and returns its conversation."""
    item_id = request.match_info["item"]
    about = _conversations(request).remove(key_of(request, context), item_id)
    return await send_record(request, about, context)


def _items_of(request: web.Request, given: list[InputItem] | None) -> tuple[Item, ...]:
    check_length(given or (), MAX_ADDED, param="items")
    return items_of(given, f"resp_{request[REQUEST_ID]}", param="items")


def _conversations(request: web.Request) -> Conversations:
    return responses_of(request).conversations


ROUTES = (
    post("/v1/conversations", ConversationBody, create_conversation),
    get("/v1/conversations/{id}", read_conversation),
    post("/v1/conversations/{id}", MetadataBody, update_conversation),
    Route("DELETE", "/v1/conversations/{id}", delete_conversation),
    get("/v1/conversations/{id}/items", list_items),
    post("/v1/conversations/{id}/items", ItemsBody, add_items),
    get("/v1/conversations/{id}/items/{item}", read_item),
    Route("DELETE", "/v1/conversations/{id}/items/{item}", delete_item),
)
