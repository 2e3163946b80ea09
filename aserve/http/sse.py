"""Server-sent events: what is written to one streaming client.

Must not know what the events say. One write per call, so the caller joins what is ready.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from aserve.errors import ErrorInfo
from aserve.http.errors import error_body

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class SseWriter:
    """Written to by one handler; `start` comes first, `finish`, `fail` or `end` last."""

    def __init__(self) -> None:
        self.response = web.StreamResponse(headers=HEADERS)

    async def start(self, request: web.Request) -> None:
        await self.response.prepare(request)

    async def send(self, payloads: Iterable[bytes]) -> None:
        data = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
        if data:
            await self.response.write(data)

    async def send_named(self, events: Iterable[tuple[str, bytes]]) -> None:
        """Events that say what they are; a stream of them ends with `end`."""
        frames = (b"event: %b\ndata: %b\n\n" % (name.encode(), data) for name, data in events)
        await self.response.write(b"".join(frames))

    async def end(self) -> None:
        await self.response.write_eof()

    async def keep_alive(self) -> None:
        """For proxies that close what is silent; clients skip comments."""
        await self.response.write(KEEP_ALIVE)

    async def finish(self, payloads: Iterable[bytes] = ()) -> None:
        data = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
        await self.response.write(data + DONE)
        await self.end()

    async def fail(self, info: ErrorInfo) -> None:
        """The status line has gone out, so the error is an event."""
        await self.finish([error_body(info)])
