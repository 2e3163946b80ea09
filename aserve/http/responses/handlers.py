"""Handlers of /v1/responses: create, read, delete and cancel a response, and list its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal

import msgspec
from aiohttp import web

from aserve.errors import ErrorInfo, InvalidRequest
from aserve.http.body import parse_query
from aserve.http.delivery import closer_of, send_json
from aserve.http.errors import RequestFailed
from aserve.http.long_json import pieces_of
from aserve.http.openai.limits import Range, check_within
from aserve.http.responses.body import ResponseBody
from aserve.http.responses.call import response_call
from aserve.http.responses.conversation import Message, item_of
from aserve.http.responses.events import Event
from aserve.http.responses.live import RESPONSES, LiveResponse, Responses
from aserve.http.responses.records import DeletedResponse, ItemList
from aserve.http.responses.store import ResponseKey
from aserve.http.sse import SseWriter
from aserve.http.state import HttpContext, origin_of

PAGE_SIZES = Range(1, 100)


async def create(
    request: web.Request, context: HttpContext, body: ResponseBody
) -> web.StreamResponse:
    responses = _responses(request)
    call = response_call(body, origin_of(request, context), responses.conversation)
    with responses.running(call) as live:
        if body.stream:
            return await _stream(request, live, context)
        async for _ in live.events():
            pass
    if live.error is not None:
        raise RequestFailed(live.error)
    return await _json(request, live.response, context)


async def read(request: web.Request, context: HttpContext) -> web.StreamResponse:
    if request.query.get("stream", "false").lower() != "false":
        raise InvalidRequest(
            "Unsupported value for 'stream': the events of a response are not stored.",
            param="stream",
            code="unsupported_value",
        )
    return await _json(
        request, _responses(request).get(_key_of(request, context)).response, context
    )


async def delete(request: web.Request, context: HttpContext) -> web.StreamResponse:
    key = _key_of(request, context)
    _responses(request).delete(key)
    return await _json(request, DeletedResponse(key.response_id), context)


async def cancel(request: web.Request, context: HttpContext) -> web.StreamResponse:
    return await _json(request, _responses(request).cancel(_key_of(request, context)), context)


class PageQuery(msgspec.Struct):
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


async def input_items(request: web.Request, context: HttpContext) -> web.StreamResponse:
    query = parse_query(request, PageQuery)
    check_within(query.limit, PAGE_SIZES, param="limit")
    messages = _responses(request).get(_key_of(request, context)).messages
    return await _json(request, page_of(messages, query), context)


async def _stream(
    request: web.Request, live: LiveResponse, context: HttpContext
) -> web.StreamResponse:
    """Streams the answer. The status line waits for the first events, so that a refusal has its
    own status.
    """
    writer = SseWriter(request, timeout_s=context.options.write_timeout)
    live.close_when_unread(closer_of(request))

    async def fail(info: ErrorInfo) -> None:
        await _send(writer, live.fail(info))
        await writer.end()

    async for events in live.events(idle_s=context.keep_alive_s):
        if not writer.response.prepared:
            await writer.start(fail)
        await (_send(writer, events) if events else writer.keep_alive())
    await writer.end()
    return writer.response


async def _send(writer: SseWriter, events: list[Event]) -> None:
    await writer.write(chain.from_iterable(map(frame_of, events)))


def frame_of(event: Event) -> Iterator[bytes]:
    """Yields the pieces of a server-sent event with its type."""
    yield b"event: %b\ndata: " % event.type.encode()
    yield from pieces_of(event)
    yield b"\n\n"


def page_of(messages: Sequence[Message], query: PageQuery) -> ItemList:
    """Returns one page of items. PERF: only the messages of the page are converted to items."""
    places = range(len(messages)) if query.order == "asc" else range(len(messages))[::-1]
    start = 0
    if query.after is not None:
        found = (number for number, place in enumerate(places) if messages[place].id == query.after)
        after = next(found, None)
        if after is None:
            raise InvalidRequest(
                f"Invalid 'after': the input has no item '{query.after[:80]}'.",
                param="after",
                code="invalid_value",
            )
        start = after + 1
    page = [item_of(messages[place]) for place in places[start : start + query.limit]]
    return ItemList(
        page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=start + len(page) < len(places),
    )


def _responses(request: web.Request) -> Responses:
    return request.app[RESPONSES]


def _key_of(request: web.Request, context: HttpContext) -> ResponseKey:
    return ResponseKey(origin_of(request, context).caller.owner, request.match_info["id"])


async def _json(
    request: web.Request, record: msgspec.Struct, context: HttpContext
) -> web.StreamResponse:
    return await send_json(request, pieces_of(record), timeout_s=context.options.write_timeout)
