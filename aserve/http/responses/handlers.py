"""Handlers of /v1/responses: create, read, delete and cancel a response, and show its input."""

from __future__ import annotations

from collections.abc import Sequence
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
from aserve.http.responses.call import prompt_of, response_call
from aserve.http.responses.conversation import Item, item_for_client
from aserve.http.responses.events import Event, frame_of
from aserve.http.responses.live import RESPONSES, LiveResponse, Responses
from aserve.http.responses.records import DeletedResponse, InputTokens, ItemList
from aserve.http.responses.store import ResponseKey
from aserve.http.route import Route, get, post
from aserve.http.sse import SseWriter
from aserve.http.state import HttpContext, origin_of
from aserve.http.streams.handlers import StreamQuery, read_stream, run_or_resume
from aserve.http.streams.resumable import STREAMS, StreamKey

PAGE_SIZES = Range(1, 100)


async def create(
    request: web.Request, context: HttpContext, body: ResponseBody
) -> web.StreamResponse:
    responses = responses_of(request)
    if body.resumable or (body.background and body.stream):
        return await run_or_resume(request, context, body, lambda: _run(request, context, body))
    call = response_call(body, origin_of(request, context), responses)
    if body.background:
        return await send_record(request, responses.run_in_background(call), context)
    with responses.running(call) as live:
        if body.stream:
            return await _stream(request, live, context)
        async for _ in live.events():
            pass
    if live.error is not None:
        raise RequestFailed(live.error)
    return await send_record(request, live.response, context)


def _run(request: web.Request, context: HttpContext, body: ResponseBody) -> str:
    """Starts a response that does not depend on its client, and returns its id."""
    responses = responses_of(request)
    call = response_call(body, origin_of(request, context), responses)
    return responses.run_with_log(call, request.app[STREAMS]).response.id


async def input_tokens(
    request: web.Request, context: HttpContext, body: ResponseBody
) -> web.StreamResponse:
    """Counts the tokens of the prompt that a body would have."""
    prompt = prompt_of(body, origin_of(request, context), responses_of(request))
    refusal = context.state.refusal()
    if refusal is not None:
        raise refusal
    count = await context.tokenize_service.count(prompt)
    return await send_record(request, InputTokens(count), context)


class ReadQuery(StreamQuery):
    stream: bool = False


async def read(request: web.Request, context: HttpContext) -> web.StreamResponse:
    """Returns a response, or with `stream` its events after number `starting_after`."""
    query = parse_query(request, ReadQuery)
    key = key_of(request, context)
    if query.stream and StreamKey(*key) in request.app[STREAMS]:
        return await read_stream(request, context, key.response_id, query.start)
    response = responses_of(request).get(key).response
    if query.stream:
        raise InvalidRequest(
            "Unsupported value for 'stream': the events of this response are not stored. They are "
            "for --resume-ttl seconds if it is created with 'stream' and 'background', or with "
            "'stream' and 'resumable'.",
            param="stream",
            code="unsupported_value",
        )
    return await send_record(request, response, context)


async def delete(request: web.Request, context: HttpContext) -> web.StreamResponse:
    key = key_of(request, context)
    responses_of(request).delete(key)
    request.app[STREAMS].forget(StreamKey(*key))  # the last event is still to be written
    return await send_record(request, DeletedResponse(key.response_id), context)


async def cancel(request: web.Request, context: HttpContext) -> web.StreamResponse:
    return await send_record(
        request, responses_of(request).cancel(key_of(request, context)), context
    )


class PageQuery(msgspec.Struct):
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


async def input_items(request: web.Request, context: HttpContext) -> web.StreamResponse:
    query = parse_query(request, PageQuery)
    check_within(query.limit, PAGE_SIZES, param="limit")
    items = responses_of(request).get(key_of(request, context)).items
    return await send_record(request, page_of(items, query), context)


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


def page_of(items: Sequence[Item], query: PageQuery) -> ItemList:
    """Returns one page of items. PERF: only those of the page are converted for the client."""
    places = range(len(items)) if query.order == "asc" else range(len(items))[::-1]
    start = 0
    if query.after is not None:
        found = (number for number, place in enumerate(places) if items[place].id == query.after)
        after = next(found, None)
        if after is None:
            raise InvalidRequest(
                f"Invalid 'after': the list has no item '{query.after[:80]}'.",
                param="after",
                code="invalid_value",
            )
        start = after + 1
    page = [item_for_client(items[place]) for place in places[start : start + query.limit]]
    return ItemList(
        page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=start + len(page) < len(places),
    )


def responses_of(request: web.Request) -> Responses:
    return request.app[RESPONSES]


def key_of(request: web.Request, context: HttpContext) -> ResponseKey:
    return ResponseKey(origin_of(request, context).caller.owner, request.match_info["id"])


async def send_record(
    request: web.Request, record: msgspec.Struct, context: HttpContext
) -> web.StreamResponse:
    return await send_json(request, pieces_of(record), timeout_s=context.options.write_timeout)


ROUTES = (
    post("/v1/responses", ResponseBody, create),
    post("/v1/responses/input_tokens", ResponseBody, input_tokens),
    get("/v1/responses/{id:resp_[^/]*}", read),
    Route("DELETE", "/v1/responses/{id:resp_[^/]*}", delete),
    Route("POST", "/v1/responses/{id:resp_[^/]*}/cancel", cancel),
    get("/v1/responses/{id:resp_[^/]*}/input_items", input_items),
)
