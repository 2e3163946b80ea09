"""Answers a call, streamed or whole, in the JSON of its endpoint's Dialect.

This is the only reader of the call's RequestStream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from aiohttp import web

from aserve.http.delivery import closer_of, send_json
from aserve.http.errors import RequestFailed
from aserve.http.openai.answers import ChoiceT, Dialect, Tally
from aserve.http.openai.choices import whole_answer
from aserve.http.sse import SseWriter
from aserve.http.state import HttpContext
from aserve.messages.base import ChildKey
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
            answer = StreamedAnswer(dialect, writer)
            return await answer.write(request_stream, idle_s=context.keep_alive_s)
        pieces = await whole_answer(request_stream, dialect)
        return await send_json(request, pieces, timeout_s=context.options.write_timeout)
    finally:
        request_stream.cancel()


class StreamedAnswer(Generic[ChoiceT]):
    """Writes the answer of one call as events. The status line waits for the first chunk, so that a
    refusal has its own status. One write sends all events that are ready; while none is, a comment
    keeps the connection open.
    """

    __slots__ = ("_dialect", "_opened", "_tally", "_writer")

    def __init__(self, dialect: Dialect[ChoiceT], writer: SseWriter) -> None:
        self._dialect = dialect
        self._writer = writer
        self._tally = Tally(dialect.call)
        self._opened: dict[ChildKey, int] = {}  # the choices that have had events

    async def write(self, request_stream: RequestStream, *, idle_s: float) -> web.StreamResponse:
        """PERF: the chunks of several choices are read together, so that they take one write."""
        call, writer = self._dialect.call, self._writer
        offer = self._offer if call.num_sequences == 1 else None
        async for chunks in request_stream.batches(idle_s=idle_s, offer=offer):
            failed = next((chunk.error for chunk in chunks if chunk.error is not None), None)
            if not writer.response.prepared:
                if failed is not None:
                    raise RequestFailed(failed)
                await writer.start()
            if not chunks:
                await writer.keep_alive()
                continue
            await writer.send(event for chunk in chunks for event in self._events(chunk))
            if failed is not None:
                await writer.fail(failed)
                return writer.response
        await writer.finish(
            [self._dialect.usage(self._tally.total())] if call.reports_usage else []
        )
        return writer.response

    def _offer(self, chunk: OutputChunk) -> bool:
        """Sends a chunk at once, unless it may be long."""
        direct = self._writer.direct
        if direct is None or not direct.takes(chunk):
            return False
        direct.send(self._events(chunk))
        return True

    def _events(self, chunk: OutputChunk) -> Iterable[bytes]:
        if chunk.error is not None:
            return ()
        dialect, key = self._dialect, (chunk.request_id, chunk.child)
        self._tally.add(chunk)
        usage = self._tally.total() if dialect.call.reports_each_usage else None
        index, opening = self._opened.get(key), None
        if index is None:
            index = self._opened[key] = dialect.call.index_of(chunk)
            opening = dialect.opening(index, usage)
        events = map(dialect.call.pad, dialect.deltas(index, chunk, usage))
        return events if opening is None else (opening, *events)
