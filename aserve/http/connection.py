"""A client's connection below HTTP: deadlines, the limit of connections, and protocol errors.

aiohttp parses and answers requests. `Connection` adds what a public server needs:
- The head of the first request has a deadline from the connection's start, and the head of each
  later one has the same time from its first byte.
- Idle connections are closed, and those of clients that do not read.
- Bytes that are not HTTP get a JSON error, which does not repeat them.
- Websocket frames must be masked.
- An `Expect` waits until the application has checked the request's head.
- An answer that only the close can end ends with its connection.

All state is written on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import LineTooLong

from aserve.config import ServerOptions
from aserve.errors import BugError, ErrorInfo
from aserve.http.errors import error_body, error_response, refused
from aserve.http.intake import EXPECTATION
from aserve.http.masked_frames import MaskedFrames
from aserve.http.peers import Peers
from aserve.http.tls import TlsArguments, tls_arguments
from aserve.options.option import is_host

# Waits for what a frontend must know before clients reach it. Other frontends reach it already.
Join: TypeAlias = Callable[[], Awaitable[None]]

logger = logging.getLogger(__name__)

UNREAD_ANSWER_S = 1.0  # after which a handler must have noticed that its answer is not read
UNREAD_BODY_S = 5.0  # for the client to finish sending a body that has already been answered
BACKLOG = 1024  # connections that the kernel has accepted and this process has not
ACCEPTS = 32  # connections that are accepted in one iteration of the loop, about 0.1 ms each
MAX_SURPLUS = 64  # connections above the limit that still get a 503
SURPLUS_S = 1.0
OTHER_FILES = 256  # files of the model and the loop, listening sockets, and pipes to workers
# The same where files are few: a server has 50 open, and MAX_SURPLUS connections.
LEAST_OTHER_FILES = 128


async def join_none() -> None:
    """A server without others before it has nothing to wait for."""


async def listen(
    runner: web.AppRunner, options: ServerOptions, peers: Peers, *, join: Join = join_none
) -> list[asyncio.Server]:
    """Opens the port or the Unix socket for the application of `runner`, which must be set up. With
    other frontends it shares the port, which it opens behind its private socket and `join`.
    """
    assert runner.server is not None
    limits = ConnectionLimits(
        header_timeout_s=options.header_timeout,
        keep_alive_s=options.keep_alive_timeout,
        write_timeout_s=options.write_timeout,
        max_connections=descriptors_for(options.max_connections),
    )
    _complete_heads(runner.server)
    connections = Connections(runner.server, limits)
    tls = tls_arguments(options)
    if options.uds is not None:
        await check_unused(options.uds)
        loop = asyncio.get_running_loop()
        return [await loop.create_unix_server(connections, options.uds, backlog=BACKLOG, **tls)]
    is_shared = peers.are_several
    host, port = options.host, options.port
    if host and not is_host(host):
        raise OSError(f"{host!r} is no host name")
    if is_shared and not peers.number:
        await check_free(host, port)
    if not is_shared:
        return await open_port(connections, host, port, tls=tls)
    path = peers.socket_of(peers.number)
    loop = asyncio.get_running_loop()
    private = await loop.create_unix_server(connections, path, backlog=BACKLOG)
    await join()
    return [*await open_port(connections, host, port, tls=tls, is_shared=True), private]


def _complete_heads(server: web.Server) -> None:
    """Gives a target without a path the path `/` (RFC 9112, 3.2.1), which aiohttp finds no route
    for, and moves the Expect header of each request to EXPECTATION, for `meet_expectation`.

    WHY: aiohttp would answer it before any middleware runs. It asks for bodies of requests that are
    then refused by their head, and repeats an expectation that it does not know.
    """
    make_request = server.request_factory

    def make(message: RawRequestMessage, *parts: Any) -> web.BaseRequest:
        if message.url.scheme and message.url.raw_path == "/":
            message = message._replace(url=message.url.with_path("/", keep_query=True))
        if hdrs.EXPECT not in message.headers:
            return make_request(message, *parts)
        headers: Any = message.headers.copy()
        given = headers.popall(hdrs.EXPECT)
        request = make_request(message._replace(headers=headers), *parts)
        if request.version >= HttpVersion11:
            request[EXPECTATION] = ", ".join(given)
        return request

    server.request_factory = make


async def close_after_unsized(request: web.Request, response: web.StreamResponse) -> None:
    """Closes the connection after an answer without a length to a client of HTTP/1.0, which cannot
    see its end otherwise.

    WHY: aiohttp leaves it open if the client keeps connections.
    """
    if request.version < HttpVersion11 and response.content_length is None:
        response.force_close()


def address_of(listener: asyncio.Server, options: ServerOptions) -> str:
    """Returns the URL of a listening socket, or the path of a Unix socket as `unix:PATH`."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listener.sockets[0].getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def reason_of(error: OSError) -> str:
    """Returns the system's message of an error.

    WHY: asyncio wraps the message in its own, but keeps the error number. The number of an unknown
    host name is negative.
    """
    number = error.errno or 0
    return os.strerror(number).lower() if number > 0 else error.strerror or str(error)


async def check_free(host: str, port: int) -> None:
    """Raises OSError if a server has the port. WHY: the first frontend lets others share it, so it
    would also share it with another server that allows the same.
    """
    loop = asyncio.get_running_loop()
    kind, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
    for found in await loop.getaddrinfo(host or None, port, type=kind, flags=passive):
        family, kind, protocol, _, address = found
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)


async def check_unused(path: str) -> None:
    """Raises OSError if a server listens on this Unix socket. WHY: the loop replaces the socket of
    a server that has died, and it would replace that of one that lives, too.
    """
    loop = asyncio.get_running_loop()
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        transport, _ = await loop.create_unix_connection(asyncio.Protocol, path)
        transport.close()
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


async def open_port(
    make_protocol: Callable[[], asyncio.Protocol],
    host: str,
    port: int,
    *,
    tls: TlsArguments | None = None,
    is_shared: bool = False,
) -> list[asyncio.Server]:
    """Opens a port, which other processes may open as well if it `is_shared`. All of the servers
    that it returns accept from one queue of the kernel.

    WHY: libuv, and so uvloop, accepts one connection per server and iteration of the loop. Where an
    iteration lasts as long as a step of the engine, a client would wait for a step per connection
    that others opened before it: 300 of them delayed it by 180 steps.
    """
    loop, tls = asyncio.get_running_loop(), tls or {}
    first = await loop.create_server(
        make_protocol, host, port, backlog=BACKLOG, reuse_port=is_shared or None, **tls
    )
    copies = [
        socket.fromfd(sock.fileno(), sock.family, sock.type)
        for sock in first.sockets
        for _ in range(ACCEPTS - 1)
    ]
    others = [
        await loop.create_server(make_protocol, sock=sock, backlog=BACKLOG, **tls)
        for sock in copies
    ]
    return [first, *others]


def descriptors_for(max_connections: int) -> int:
    """Raises the soft limit as far as the hard one allows, and returns how many connections fit.

    WHY: a process without free descriptors can accept no connection, not even to refuse it.
    """
    wanted = max_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    if allowed >= wanted:
        return max_connections
    reserved = min(OTHER_FILES, max(LEAST_OTHER_FILES, allowed // 2))
    fitting = max(1, allowed - reserved)
    logger.warning(
        "open_files=%s leave room for max_connections=%s instead of %s",
        allowed,
        fitting,
        max_connections,
    )
    return fitting


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    header_timeout_s: float
    keep_alive_s: float
    write_timeout_s: float
    max_connections: int


class Connections:
    """The protocol factory of one server, which keeps track of the open connections."""

    def __init__(self, server: web.Server, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._open: dict[Connection, None] = {}  # oldest first
        self._num_surplus = 0

    def __call__(self) -> Connection:
        return Connection(self._server, connections=self, loop=self._loop)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> bool:
        """Adds a new connection. At the limit the oldest idle connection is closed for it. Returns
        False if none is idle.
        """
        if len(self._open) >= self.limits.max_connections:
            idle = next((each for each in self._open if each.is_idle), None)
            if idle is None:
                return False
            del self._open[idle]
            idle.force_close()
        self._open[connection] = None
        return True

    def discard(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def reject(self, transport: asyncio.Transport) -> None:
        """Answers 503 and closes the connection a moment later.

        WHY: a connection that is closed while its client still sends is reset, and the client never
        sees the answer.
        """
        if self._num_surplus >= MAX_SURPLUS:
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
    __slots__ = ("_connections", "_deadline", "_is_partial", "_is_surplus", "_unread")

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
        self._is_partial = False  # part of a request's head has arrived
        self._is_surplus = False
        self._unread: asyncio.TimerHandle | None = None  # while the send buffer is full

    @property
    def is_idle(self) -> bool:
        """True while no request is being handled."""
        return self._waiter is not None and not self._waiter.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._connections.add(self):
            self._is_surplus = True
            self._connections.reject(cast(asyncio.Transport, transport))
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
        elif self.is_idle or not num_requests:
            self._is_partial = True
            if self._deadline is None:
                self._start_deadline()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_deadline()
        self._end_unread()
        self._connections.discard(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """WHY: aiohttp waits without an end for a client that does not read its short answers. The
        handlers of long ones have a deadline of their own, which is over first.
        """
        super().pause_writing()
        timeout_s = self._connections.limits.write_timeout_s + UNREAD_ANSWER_S
        self._unread = self._loop.call_later(timeout_s, self._drop_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_unread()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers a request that aiohttp could not parse. The client's bytes are neither sent back
        nor logged.
        """
        logger.debug("invalid HTTP error=%s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so the error cannot be sent")
        response = error_response(protocol_error(status, exc))
        response.headers["X-Request-Id"] = uuid.uuid4().hex
        response.headers[hdrs.SERVER] = "aserve"
        response.force_close()
        return response

    def set_parser(self, parser: Any, data_received_cb: Callable[[], None] | None = None) -> None:
        """Wraps the websocket reader that aiohttp sets when the connection is upgraded."""
        super().set_parser(cast(Any, MaskedFrames(parser)), data_received_cb)

    def _start_deadline(self) -> None:
        timeout_s = self._connections.limits.header_timeout_s
        self._deadline = self._loop.call_later(timeout_s, self._time_out)

    def _end_deadline(self) -> None:
        self._is_partial = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _drop_unread(self) -> None:
        """NOTE: `force_close` would wait until the client has read everything."""
        if self.transport is not None:
            logger.info("unread answers: connection closed")
            self.transport.abort()

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _time_out(self) -> None:
        """Closes the connection, with a 408 if the client has sent part of a request."""
        self._deadline = None
        if self._is_partial and self.transport is not None:
            timeout_s = self._connections.limits.header_timeout_s
            late = refused(408, f"The request's head did not arrive within {timeout_s:g} seconds.")
            self.transport.write(raw_answer(late.info, "408 Request Timeout"))
        self.force_close()


def protocol_error(status: int, error: BaseException | None) -> ErrorInfo:
    if status >= 500:
        return BugError("internal error").info()
    if isinstance(error, LineTooLong):
        return refused(431, "The request line or a header is too long.").info
    return refused(400, "The request is not valid HTTP: its head cannot be parsed.").info


def raw_answer(info: ErrorInfo, status_line: str) -> bytes:
    """Returns a whole HTTP response as bytes, for a connection without a parsed request."""
    body = error_body(info)
    head = (
        f"HTTP/1.1 {status_line}\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nServer: aserve\r\nX-Request-Id: {uuid.uuid4().hex}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
