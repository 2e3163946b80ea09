"""Writes server-sent events to a streaming client.

The caller passes all events that are ready, and they are sent in blocks. Every write waits, up to
the deadline, until the client has read enough of the earlier ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import StreamWriter

from aserve.channel import yield_to_loop
from aserve.errors import ErrorInfo
from aserve.http.delivery import stream_response, with_deadline
from aserve.http.direct import DirectWriter, frame
from aserve.http.errors import STARTED, StartedAnswer, error_body
from aserve.http.long_json import blocks_of

EVENT_STREAM = "text/event-stream; charset=utf-8"
LAST_EVENT_ID = "Last-Event-ID"  # the header by which a client goes on behind an event
DONE = b"data: [DONE]\n\n"
BLOCKS_PER_ITERATION = 16
KEEP_ALIVE = b": keep-alive\n\n"


class SseWriter:
    """The event stream of one request. One handler writes it: `start` first, then `send` or
    `write`, and at last `finish`, `fail` or `end`.
    """

    def __init__(
        self, request: web.Request, *, timeout_s: float, content_type: str = EVENT_STREAM
    ) -> None:
        self.response = stream_response(request, content_type)
        self._request = request
        self._timeout_s = timeout_s
        self._writer: AbstractStreamWriter | None = None
        # None before the start, and if the events go to an event log
        self.direct: DirectWriter | None = None

    async def start(self, fail: Callable[[ErrorInfo], Awaitable[None]] | None = None) -> None:
        """Sends the status line. From now on the border middleware reports errors with `fail`."""
        self._writer = await self.response.prepare(self._request)
        if isinstance(self._writer, StreamWriter):
            self.direct = DirectWriter(self._request.protocol, self._writer)
        self._request[STARTED] = StartedAnswer(self.response, fail or self.fail)

    async def send(self, payloads: Iterable[bytes]) -> None:
        await self.write(map(frame, payloads))

    async def write(self, pieces: Iterable[bytes]) -> None:
        """Writes pieces that together are whole events."""
        for number, block in enumerate(blocks_of(pieces), start=1):
            await self._write(block)
            if number % BLOCKS_PER_ITERATION == 0:
                await yield_to_loop()

    async def end(self) -> None:
        await with_deadline(self.response.write_eof(), self._request, timeout_s=self._timeout_s)

    async def keep_alive(self) -> None:
        """Writes a comment, which clients skip, because proxies close silent connections."""
        await self.write((KEEP_ALIVE,))

    async def finish(self, payloads: Iterable[bytes] = ()) -> None:
        await self.write((*map(frame, payloads), DONE))
        await self.end()

    async def fail(self, info: ErrorInfo) -> None:
        """Sends the error as the last event."""
        await self.finish([error_body(info)])

    async def _write(self, block: bytes) -> None:
        """PERF: only a write that waits for the client has a timer, which cost 9 % of the CPU time
        of a streamed token.
        """
        writer = self._writer
        if not isinstance(writer, StreamWriter):
            await self.response.write(block)  # to an event log, which never waits
            return
        await writer.write(block, drain=False)
        if self._request.protocol.writing_paused:
            await with_deadline(writer.drain(), self._request, timeout_s=self._timeout_s)
