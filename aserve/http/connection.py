"""A client's connection below HTTP: deadlines, the limit of connections, and protocol errors.

aiohttp parses and answers requests. This class adds what a public server needs: the head of the
first request must arrive in time, and that of each later one within the same time from its first
byte; idle connections are closed; bytes that are no HTTP are answered in JSON, without repeating
them; and websocket frames must be masked. All state is written on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import hdrs, web
from aiohttp.http_exceptions import LineTooLong

from aserve.config import ServerOptions
from aserve.errors import BugError, ErrorInfo
from aserve.http.descriptors import descriptors_for
from aserve.http.errors import error_body, error_response, refused
from aserve.http.masked_frames import MaskedFrames

logger = logging.getLogger(__name__)

UNREAD_BODY_S = 5.0  # for a client to send the rest of a body whose answer has gone out
BACKLOG = 1024  # connections that the system has accepted and this process has not
SURPLUS = 64  # connections above the bound that are still told so
SURPLUS_S = 1.0


async def listen(runner: web.AppRunner, options: ServerOptions) -> asyncio.Server:
    """Opens the port for what `runner` has set up."""
    assert runner.server is not None
    limits = ConnectionLimits(
        header_timeout_s=options.header_timeout,
        keep_alive_s=options.keep_alive_timeout,
        max_connections=descriptors_for(options.max_connections),
    )
    return await asyncio.get_running_loop().create_server(
        Connections(runner.server, limits), options.host, options.port, backlog=BACKLOG
    )


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    header_timeout_s: float
    keep_alive_s: float
    max_connections: int


class Connections:
    """Makes the connections of one server, and knows those that are open."""

    def __init__(self, server: web.Server, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._open: dict[Connection, None] = {}  # the oldest first
        self._num_surplus = 0

    def __call__(self) -> Connection:
        return Connection(self._server, connections=self, loop=self._loop)

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Connection) -> bool:
        """At the bound the oldest connection without a request makes room. Where all have one, the
        newcomer is turned away.
        """
        if len(self._open) >= self.limits.max_connections:
            idle = next((each for each in self._open if each.is_idle), None)
            if idle is None:
                return False
            del self._open[idle]
            idle.force_close()
        self._open[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def turn_away(self, transport: asyncio.Transport) -> None:
        """WHY: a connection that is closed while its client still sends is reset, and the client
        never sees the answer. So it stays open for a moment.
        """
        if self._num_surplus >= SURPLUS:
            transport.abort()
            return
        self._num_surplus += 1
        limit = self.limits.max_connections
        transport.write(
            raw_answer(
                ErrorInfo(
                    f"The server has {limit} open connections, which is its limit. "
                    "Try again later.",
                    type="overloaded_error",
                    code="too_many_connections",
                    status=503,
                ),
                "503 Service Unavailable",
            )
        )
        if transport.can_write_eof():
            transport.write_eof()
        self._loop.call_later(SURPLUS_S, self._close_surplus, transport)

    def _close_surplus(self, transport: asyncio.Transport) -> None:
        self._num_surplus -= 1
        transport.abort()


class Connection(web.RequestHandler):
    __slots__ = ("_connections", "_deadline", "_is_partial", "_is_surplus")

    def __init__(
        self, server: web.Server, *, connections: Connections, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=cast(Any, None),
            keepalive_timeout=connections.limits.keep_alive_s,
            lingering_time=UNREAD_BODY_S,
            auto_decompress=False,
        )
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._is_partial = False  # part of a request's head has come
        self._is_surplus = False

    @property
    def is_idle(self) -> bool:
        """It waits for the head of a request."""
        return self._waiter is not None and not self._waiter.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._connections.enter(self):
            self._is_surplus = True
            self._connections.turn_away(cast(asyncio.Transport, transport))
            return
        super().connection_made(transport)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        if self._is_surplus:
            return
        num_requests = self._request_count
        super().data_received(data)
        if self._request_count != num_requests:
            self._end_deadline()
        elif self.is_idle:
            self._is_partial = True
            if self._deadline is None:
                self._start_deadline()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_deadline()
        self._connections.leave(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What never came to a route. The client's bytes are neither sent back nor logged."""
        logger.debug("no HTTP request error=%s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so the error cannot be sent")
        response = error_response(protocol_error(status, exc))
        response.headers["X-Request-Id"] = uuid.uuid4().hex
        response.headers[hdrs.SERVER] = "aserve"
        response.force_close()
        return response

    def set_parser(self, parser: Any, data_received_cb: Callable[[], None] | None = None) -> None:
        """The connection has become a websocket."""
        super().set_parser(cast(Any, MaskedFrames(parser)), data_received_cb)

    def _start_deadline(self) -> None:
        timeout_s = self._connections.limits.header_timeout_s
        self._deadline = self._loop.call_later(timeout_s, self._end_late)

    def _end_deadline(self) -> None:
        self._is_partial = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_late(self) -> None:
        """A client that has sent nothing at all gets no answer."""
        self._deadline = None
        if self._is_partial and self.transport is not None:
            timeout_s = self._connections.limits.header_timeout_s
            late = refused(408, f"The request's head did not arrive in {timeout_s:g} seconds.")
            self.transport.write(raw_answer(late.info, "408 Request Timeout"))
        self.force_close()


def protocol_error(status: int, error: BaseException | None) -> ErrorInfo:
    if status >= 500:
        return BugError("internal error").info()
    if isinstance(error, LineTooLong):
        return refused(431, "The request line or a header is too long.").info
    return refused(400, "This is not a valid HTTP request: its head cannot be parsed.").info


def raw_answer(info: ErrorInfo, status_line: str) -> bytes:
    """For a connection on which there is no request to answer."""
    body = error_body(info)
    head = (
        f"HTTP/1.1 {status_line}\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nServer: aserve\r\nX-Request-Id: {uuid.uuid4().hex}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
