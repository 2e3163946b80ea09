"""Resumable streams: the answer of a request with `"resumable": true` does not depend on its
connection, and GET /v1/streams/{id} reads it from the start or from any event on.

The endpoint's own handler runs in a task, and writes the stream to an event log. The connection of
the request is the log's first reader; those of later requests are others.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Protocol, TypeAlias, TypeVar

import msgspec
from aiohttp import web

from aserve.errors import ErrorInfo, InvalidRequest
from aserve.http.body import parse_query
from aserve.http.delivery import INSTEAD
from aserve.http.errors import STARTED
from aserve.http.route import get
from aserve.http.sse import LAST_EVENT_ID, SseWriter
from aserve.http.state import REQUEST_ID, HttpContext, caller_for
from aserve.http.streams.event_log import EventLogResponse
from aserve.http.streams.resumable import STREAMS, StreamKey, Streams


class StreamedBody(Protocol):
    stream: bool | None
    resumable: bool | None


BodyT = TypeVar("BodyT", bound=StreamedBody)
StreamHandler: TypeAlias = Callable[
    [web.Request, HttpContext, BodyT], Awaitable[web.StreamResponse]
]
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def resumable(prefix: str, handler: StreamHandler[BodyT]) -> StreamHandler[BodyT]:
    """Lets clients resume the streams of a handler. `prefix` is that of the ids of its answers."""

    @functools.wraps(handler)
    async def handle(request: web.Request, context: HttpContext, body: BodyT) -> web.StreamResponse:
        if not body.resumable:
            return await handler(request, context, body)

        def run() -> str:
            stream_id = prefix + request[REQUEST_ID]
            key = key_of(request, context, stream_id)
            _run_detached(request, key, lambda detached: handler(detached, context, body))
            return stream_id

        return await run_or_resume(request, context, body, run)

    return handle


async def run_or_resume(
    request: web.Request, context: HttpContext, body: StreamedBody, run: Callable[[], str]
) -> web.StreamResponse:
    """Begins a stream with `run`, which returns its id, and sends it. A repeated request, with the
    id of the last event that its client got, begins nothing and reads on.
    """
    if not body.stream:
        raise InvalidRequest(
            "Invalid 'resumable': only a stream can be resumed; send \"stream\": true.",
            param="resumable",
            code="invalid_value",
        )
    request.app[STREAMS].check_enabled()
    last_id = request.headers.get(LAST_EVENT_ID)
    if last_id:
        stream_id, _, number = last_id.rpartition(":")
        return await read_stream(request, context, stream_id, _start_after(number))
    return await read_stream(request, context, run(), 0)


def _run_detached(request: web.Request, key: StreamKey, handler: Handler) -> None:
    """Runs a handler whose stream goes to an event log.

    WHY a clone of the request: the request itself is the reader's, with its own state.
    """
    streams = request.app[STREAMS]
    log = streams.new_log(key)
    detached = request.clone()
    detached[INSTEAD] = EventLogResponse(log)

    async def fail(info: ErrorInfo) -> None:
        if STARTED in detached:
            await detached[STARTED].fail(info)
        else:
            log.refuse(info)

    streams.run(key, lambda: handler(detached), fail)


async def read_stream(
    request: web.Request, context: HttpContext, stream_id: str, start: int
) -> web.StreamResponse:
    """Streams the events from number `start` on, those that are there and those to come. Nothing
    more will come after the last one, which a 204 tells a browser's EventSource.
    """
    with request.app[STREAMS].reading(key_of(request, context, stream_id)) as log:
        if log.is_done and start >= log.next > 0:
            return web.Response(status=204)
        log.check(start)
        writer = SseWriter(request, timeout_s=context.options.write_timeout)
        async for events in log.batches(start, idle_s=context.keep_alive_s):
            if not writer.response.prepared:
                await writer.start()
            await (writer.write(events) if events else writer.keep_alive())
        if not writer.response.prepared:
            await writer.start()
        await writer.end()
        return writer.response


class StreamQuery(msgspec.Struct):
    starting_after: Annotated[int, msgspec.Meta(ge=0)] | None = None

    @property
    def start(self) -> int:
        """The number of the first event that is sent."""
        return 0 if self.starting_after is None else self.starting_after + 1


async def read(request: web.Request, context: HttpContext) -> web.StreamResponse:
    """Streams the answer of a resumable request, also while it is generated, to any number of
    readers: all events, or those after `starting_after` or the header Last-Event-ID.
    """
    start = parse_query(request, StreamQuery).start
    last_id = request.headers.get(LAST_EVENT_ID)
    if last_id:
        start = _start_after(last_id.rpartition(":")[2])
    return await read_stream(request, context, request.match_info["id"], start)


def _start_after(number: str) -> int:
    if not number.isdecimal() or len(number) > 18:
        raise InvalidRequest(
            f"Invalid {LAST_EVENT_ID}: it is the id of an event, as in "
            "chatcmpl-0123456789abcdef:7.",
            param=LAST_EVENT_ID,
            code="invalid_value",
        )
    return int(number) + 1


def key_of(request: web.Request, context: HttpContext, stream_id: str) -> StreamKey:
    return StreamKey(caller_for(request, context).owner, stream_id)


def set_up(app: web.Application, context: HttpContext) -> None:
    app[STREAMS] = Streams(context.options)
    app.on_shutdown.append(close)


async def close(app: web.Application) -> None:
    await app[STREAMS].close()


ROUTES = (get("/v1/streams/{id}", read),)
