"""Answers a call, streamed or whole, in the JSON of its endpoint's Dialect.

This is the only reader of the call's RequestStream.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from aserve.http.delivery import closer_of, send_json
from aserve.http.errors import RequestFailed
from aserve.http.openai.answers import ChoiceT, Dialect, Tally
from aserve.http.openai.choices import whole_answer
from aserve.http.sse import SseWriter
from aserve.http.state import HttpContext
from aserve.messages.output import OutputChunk
from aserve.request_stream import RequestStream


async def respond(
    request: web.Request, context: HttpContext, dialect: Dialect[ChoiceT]
) -> web.StreamResponse:
    """Answers the call. A client that disconnects cancels this handler, and so its requests."""
    refusal = context.state.refusal()
    if refusal is not None:
        raise refusal
    request_stream = context.gateway.open(*dialect.call.requests)
    try:
        if dialect.call.is_streaming:
            request_stream.bound_unread(closer_of(request))
            writer = SseWriter(request, timeout_s=context.options.write_timeout)
            return await _stream(writer, request_stream, dialect, idle_s=context.keep_alive_s)
        pieces = await whole_answer(request_stream, dialect)
        return await send_json(request, pieces, timeout_s=context.options.write_timeout)
    finally:
        request_stream.cancel()


async def _stream(
    writer: SseWriter, request_stream: RequestStream, dialect: Dialect[ChoiceT], *, idle_s: float
) -> web.StreamResponse:
    """Streams the answer. The status line waits for the first chunk, so that a refusal has its own
    status. One write sends all events that are ready; while none is, a comment keeps the connection
    open.
    """
    tally = Tally(dialect.call)
    opened: set[int] = set()
    async for chunks in request_stream.batches(idle_s=idle_s):
        failed = next((chunk.error for chunk in chunks if chunk.error is not None), None)
        if not writer.response.prepared:
            if failed is not None:
                raise RequestFailed(failed)
            await writer.start()
        if not chunks:
            await writer.keep_alive()
            continue
        await writer.send(_events(chunks, dialect, opened, tally))
        if failed is not None:
            await writer.fail(failed)
            return writer.response
    await writer.finish([dialect.usage(tally.total())] if dialect.call.reports_usage else [])
    return writer.response


def _events(
    chunks: Iterable[OutputChunk], dialect: Dialect[ChoiceT], opened: set[int], tally: Tally
) -> Iterable[bytes]:
    for chunk in chunks:
        if chunk.error is not None:
            continue
        tally.add(chunk)
        usage = tally.total() if dialect.call.reports_each_usage else None
        index = dialect.call.index_of(chunk)
        if index not in opened:
            opened.add(index)
            opening = dialect.opening(index, usage)
            if opening is not None:
                yield opening
        yield from map(dialect.call.pad, dialect.deltas(index, chunk, usage))
