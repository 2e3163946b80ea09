"""Writes to a client's connection at once, outside of the handler of its request.

It is the fast way of a streamed token, and of a replica's answer through the router. All else goes
by the handler (sse.py), which waits for a client that reads slowly.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from aiohttp.http import StreamWriter

from aserve.messages.output import OutputChunk


def frame(payload: bytes) -> bytes:
    return b"data: %b\n\n" % payload


BETWEEN = b"\n\ndata: "  # two events


class DirectWriter:
    """Writes to a connection whose answer has begun.

    PERF: it frames the chunk of HTTP itself. The coroutines of `StreamWriter` and `SseWriter` took
    5 us for each token.
    """

    __slots__ = ("_is_chunked", "_protocol", "_writer")

    def __init__(self, protocol: web.RequestHandler, writer: StreamWriter) -> None:
        self._protocol = protocol
        self._writer = writer
        self._is_chunked = writer.chunked

    @property
    def is_gone(self) -> bool:
        transport = self._protocol.transport
        return transport is None or transport.is_closing()

    @property
    def is_full(self) -> bool:
        """Whether the client must be waited for."""
        return self._protocol.writing_paused

    def takes(self, chunk: OutputChunk) -> bool:
        """Whether a chunk is short, and the connection takes it without a wait."""
        if self.is_full or self.is_gone:
            return False
        return not chunk.logprobs and chunk.prompt is None

    def send(self, payloads: Iterable[bytes]) -> None:
        """Sends events to a connection that takes them."""
        data = BETWEEN.join(payloads)
        if data:
            self.write(frame(data))

    def write(self, data: bytes) -> None:
        """Writes part of an answer's body, such as whole events, to a connection that is there."""
        if not data:
            return  # an empty chunk would end the answer
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._writer.output_size += len(data)
        assert self._protocol.transport is not None, "the connection is there"
        self._protocol.transport.write(data)
