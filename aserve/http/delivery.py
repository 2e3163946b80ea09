"""Writes to clients with a deadline: if the client does not read in time, its connection closes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from aiohttp import web

from aserve.channel import yield_to_loop
from aserve.errors import ErrorInfo
from aserve.http.errors import STARTED, StartedAnswer
from aserve.http.long_json import blocks_of
from aserve.unread import UnreadAnswer

logger = logging.getLogger(__name__)

CONTENT_TYPE = "application/json"
STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
# The response that a stream is written to instead of one to the request's connection.
INSTEAD = web.RequestKey("instead", web.StreamResponse)


def closer_of(request: web.Request) -> Callable[[], None]:
    """Returns a function that closes the request's connection at once, which frees its send
    buffer.
    """

    def close() -> None:
        if request.transport is not None:
            logger.info("unread answer: connection closed path=%s", request.path)
            request.transport.abort()

    return close


async def with_deadline(
    writing: Awaitable[None], request: web.Request, *, timeout_s: float
) -> None:
    """Waits until the send buffer has room. After `timeout_s` the connection is closed, and
    UnreadAnswer is raised.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await writing
    except TimeoutError:
        closer_of(request)()
        raise UnreadAnswer(f"the client read nothing for {timeout_s} seconds") from None


def stream_response(request: web.Request, content_type: str) -> web.StreamResponse:
    """Returns the response that a stream of events is written to."""
    headers = STREAM_HEADERS | {"Content-Type": content_type}
    response: web.StreamResponse = request.get(INSTEAD, web.StreamResponse(headers=headers))
    return response


def json_response(body: object) -> web.Response:
    """Returns an answer that is always short. Long ones go by `send_json`."""
    return web.Response(body=msgspec.json.encode(body), content_type=CONTENT_TYPE)


async def send_json(
    request: web.Request, pieces: Iterable[bytes], *, timeout_s: float
) -> web.StreamResponse:
    """Sends a short answer at once, and a long one block by block, one per loop iteration."""
    blocks = iter(blocks_of(pieces))
    first = next(blocks, b"")
    second = next(blocks, None)
    if second is None:
        return web.Response(body=first, content_type=CONTENT_TYPE)
    response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
    await response.prepare(request)

    async def fail(_: ErrorInfo) -> None:
        # An unfinished JSON text must not look like a whole one.
        closer_of(request)()

    request[STARTED] = StartedAnswer(response, fail)
    for block in (first, second):
        await with_deadline(response.write(block), request, timeout_s=timeout_s)
    for block in blocks:
        await yield_to_loop()
        await with_deadline(response.write(block), request, timeout_s=timeout_s)
    await with_deadline(response.write_eof(), request, timeout_s=timeout_s)
    return response
