"""/v1/responses over HTTP: create, read, delete, cancel, and what one was asked with.

Must not know the engine, nor how events come about: it parses, asks `Responses`, and writes.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from aserve.errors import ErrorInfo, InvalidRequest
from aserve.http.body import parse_query
from aserve.http.errors import RequestFailed
from aserve.http.openai.limits import Range, check_within
from aserve.http.openai.responses.body import ResponseBody
from aserve.http.openai.responses.call import response_call
from aserve.http.openai.responses.conversation import item_of
from aserve.http.openai.responses.events import Event
from aserve.http.openai.responses.live import RESPONSES, LiveResponse, Responses
from aserve.http.openai.responses.records import (
    DeletedResponse,
    InputMessage,
    ItemList,
    OutputMessage,
)
from aserve.http.origin import origin_of
from aserve.http.sse import SseWriter
from aserve.http.started import STARTED, StartedAnswer
from aserve.http.state import HttpContext

PAGE_SIZES = Range(1, 100)


async def create(
    request: web.Request, context: HttpContext, body: ResponseBody
) -> web.StreamResponse:
    responses = _responses(request)
    asked = response_call(body, origin_of(request, context), responses.conversation)
    with responses.running(asked) as live:
        if body.stream:
            return await _stream(request, live, idle_s=context.keep_alive_s)
        async for _ in live.events():
            pass
    if live.error is not None:
        raise RequestFailed(live.error)
    return _json(live.response)


async def read(request: web.Request, _: HttpContext) -> web.Response:
    if request.query.get("stream", "false").lower() != "false":
        raise InvalidRequest(
            "Unsupported value for 'stream': what a response has streamed is not kept.",
            param="stream",
            code="unsupported_value",
        )
    return _json(_responses(request).get(_id_in(request)).response)


async def delete(request: web.Request, _: HttpContext) -> web.Response:
    _responses(request).delete(_id_in(request))
    return _json(DeletedResponse(_id_in(request)))


async def cancel(request: web.Request, _: HttpContext) -> web.Response:
    return _json(_responses(request).cancel(_id_in(request)))


class PageQuery(msgspec.Struct):
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


async def input_items(request: web.Request, _: HttpContext) -> web.Response:
    query = parse_query(request, PageQuery)
    check_within(query.limit, PAGE_SIZES, param="limit")
    items = [*map(item_of, _responses(request).get(_id_in(request)).messages)]
    return _json(_page(items if query.order == "asc" else items[::-1], query))


async def _stream(request: web.Request, live: LiveResponse, *, idle_s: float) -> web.StreamResponse:
    """The status line waits for the first events, so that a refusal has a status of its own."""
    writer = SseWriter()

    async def fail(info: ErrorInfo) -> None:
        await _send(writer, live.fail(info))
        await writer.end()

    async for events in live.events(idle_s=idle_s):
        if not writer.response.prepared:
            await writer.start(request)
            request[STARTED] = StartedAnswer(writer.response, fail)
        await (_send(writer, events) if events else writer.keep_alive())
    await writer.end()
    return writer.response


async def _send(writer: SseWriter, events: list[Event]) -> None:
    await writer.send_named((event.type, msgspec.json.encode(event)) for event in events)


def _page(items: list[InputMessage | OutputMessage], query: PageQuery) -> ItemList:
    start = 0
    if query.after is not None:
        ids = [item.id for item in items]
        if query.after not in ids:
            raise InvalidRequest(
                f"Invalid 'after': the input has no item '{query.after[:80]}'.",
                param="after",
                code="invalid_value",
            )
        start = ids.index(query.after) + 1
    page = items[start : start + query.limit]
    return ItemList(
        page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=start + len(page) < len(items),
    )


def _responses(request: web.Request) -> Responses:
    return request.app[RESPONSES]


def _id_in(request: web.Request) -> str:
    return request.match_info["id"]


def _json(record: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(record), content_type="application/json")
