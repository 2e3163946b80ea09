"""Writes short server-sent events to a connection at once, outside of the handler of its request.

It is the fast way of a streamed token. All else goes by the handler (sse.py), which waits for a
client that reads slowly.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from aiohttp.http import StreamWriter


def frame(payload: bytes) -> bytes:
    return b"data: %b\n\n" % payload


BETWEEN = b"\n\ndata: "  # two events
FRAME_BYTES = len(frame(b""))


class DirectWriter:
    """Writes to a connection whose answer has begun.

    PERF: it frames events, and the chunk of HTTP, in one step. The coroutines of `StreamWriter` and
    `SseWriter` took 5 us for each token.
    """

    __slots__ = ("_is_chunked", "_protocol", "_writer")

    def __init__(self, protocol: web.RequestHandler, writer: StreamWriter) -> None:
        self._protocol = protocol
        self._writer = writer
        self._is_chunked = writer.chunked

    @property
    def is_free(self) -> bool:
        """Whether the connection takes bytes without waiting for the client."""
        transport = self._protocol.transport
        if transport is None or self._protocol.writing_paused:
            return False
        return not transport.is_closing()

    def send(self, payloads: Iterable[bytes]) -> None:
        """Sends events; the connection must be free."""
        data = BETWEEN.join(payloads)
        if not data:
            return  # an empty chunk would end the answer
        if self._is_chunked:
            data = b"%x\r\ndata: %b\n\n\r\n" % (len(data) + FRAME_BYTES, data)
        else:
            data = frame(data)
        self._writer.output_size += len(data)
        assert self._protocol.transport is not None, "the connection is free"
        self._protocol.transport.write(data)
