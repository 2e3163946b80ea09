"""Passes a request on to a replica, and the answer back to the client.

A request is sent to another replica only while the client has seen nothing of an answer. The head
of an answer is therefore held back until its first byte has come. From then on a failure of the
replica ends an event stream with one error event, if it failed between two events, and closes the
client's connection otherwise, so that half an answer is never taken for a whole one.

A JSON body is read as a whole, because it decides where the request goes and may be sent again.
Other bodies (uploads of files) are streamed, and are not sent again once they have begun.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import aiohttp
from aiohttp import web
from aiohttp.http import StreamWriter

from aserve.config import RouterOptions
from aserve.errors import EngineDead, ErrorInfo
from aserve.http.cut_streams import last_events
from aserve.http.delivery import with_deadline
from aserve.http.direct import DirectWriter
from aserve.http.errors import RequestFailed
from aserve.http.frontend_requests import end_to_end
from aserve.http.websocket_relay import accept, client_socket, pump_both
from aserve.router.balancer import Balancer
from aserve.router.failures import (
    BROKEN,
    RETRY_AFTER_S,
    UNKNOWN,
    NotAnswered,
    RouterEnds,
    refused_by,
    refused_upgrade,
)
from aserve.router.metrics import RouterMetrics
from aserve.router.owners import Owners, ids_in
from aserve.router.policies import Demand
from aserve.router.rate_limits import SocketLimits
from aserve.router.replica_connection import Answer, AnswerBroken
from aserve.router.search import Begun, Search
from aserve.router.upstream import CANNOT_CONNECT, GONE, Call, Upstream

logger = logging.getLogger(__name__)

# The replica starts, drains or has lost its engine: another one may serve the request.
TRY_ANOTHER = frozenset({502, 503})
TAIL_BYTES = 4096
STARTED_S = web.RequestKey("started_s", float)


@dataclass(slots=True)
class Exchange:
    """One request and its way. `named` are ids of state that the replica which answers has.
    `headers` are added to the answer. `tail` is the end of the answer, kept if `keeps_tail`, as the
    numbers of its bytes and events are.
    """

    request: web.Request
    call: Call
    demand: Demand
    named: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    limits: SocketLimits | None = None  # of a websocket
    keeps_tail: bool = False
    tail: bytes = b""
    num_bytes: int = 0
    num_events: int = 0

    def keep(self, piece: bytes) -> None:
        """Takes note of a piece of the answer, if that is wanted."""
        if not self.keeps_tail:
            return
        self.tail = (self.tail + piece)[-TAIL_BYTES:]
        self.num_bytes += len(piece)
        self.num_events += piece.count(b"data:")


Send: TypeAlias = Callable[[Exchange, str], Awaitable[web.StreamResponse]]


class ClientStream:
    """The client's side of an answer whose head is prepared. `last` is the piece sent last. Behind
    the first piece, with which the head goes out, no task is woken for a piece. A client that reads
    nothing for `timeout_s` is closed.
    """

    def __init__(self, exchange: Exchange, writer: StreamWriter, *, timeout_s: float) -> None:
        self.last = b""
        self._timeout_s = timeout_s
        self._exchange = exchange
        self._writer = writer
        self._direct = DirectWriter(exchange.request.protocol, writer)

    async def begin(self, piece: bytes) -> None:
        await self._within_limit(self._writer.write(piece))
        self._note(piece)

    def write(self, piece: bytes) -> bool:
        """Returns False if the client must be waited for, by `drain`."""
        if self._direct.is_gone:
            return False
        self._direct.write(piece)
        self._note(piece)
        return not self._direct.is_full

    async def drain(self) -> None:
        if self._direct.is_gone:
            raise ConnectionResetError("the client has gone")
        await self._within_limit(self._writer.drain())

    async def _within_limit(self, writing: Awaitable[None]) -> None:
        await with_deadline(writing, self._exchange.request, timeout_s=self._timeout_s)

    def _note(self, piece: bytes) -> None:
        self.last = piece
        self._exchange.keep(piece)


class Proxy:
    """`heartbeat_s`: a silent websocket, of a client or a replica, gets a ping after that time, and
    half of it to answer. A client that reads nothing for `write_timeout_s` is closed. `end_open`
    ends all that is open.
    """

    def __init__(
        self,
        options: RouterOptions,
        balancer: Balancer,
        metrics: RouterMetrics,
        *,
        write_timeout_s: float,
    ) -> None:
        self.owners = Owners()
        self.upstreams: dict[str, Upstream] = {}
        self.heartbeat_s = 60.0
        self.num_open = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._options = options
        self._balancer = balancer
        self._metrics = metrics
        self._write_timeout_s = write_timeout_s
        self._websockets: set[web.WebSocketResponse] = set()

    async def end_open(self) -> None:
        """Ends what is open: answers by an error, and websockets by 1001 (going away)."""
        for upstream in self.upstreams.values():
            upstream.fail_all(RouterEnds())
        async with asyncio.TaskGroup() as group:
            for client in self._websockets:
                group.create_task(
                    client.close(code=aiohttp.WSCloseCode.GOING_AWAY, message=b"shutting down")
                )

    async def forward(self, exchange: Exchange) -> web.StreamResponse:
        return await self._tried(exchange, self._send)

    async def _tried(self, exchange: Exchange, send: Send) -> web.StreamResponse:
        """Sends the request to one replica after the other, until one begins to answer."""
        tried: list[str] = []
        failure: NotAnswered | None = None
        while True:
            name = self._balancer.pick(exchange.demand, excluded=tried)
            if name is None and failure is not None and failure.was_open and len(tried) == 1:
                name = tried[0] if self._balancer.find(tried[0]) is not None else None
            if name is None:
                raise self._refusal(exchange.demand, failure)
            if failure is not None:
                if not failure.may_repeat or not self._balancer.may_retry(len(tried)):
                    raise RequestFailed(failure.info)
                self._metrics.retries.inc()
            try:
                return await send(exchange, name)
            except NotAnswered as error:
                logger.warning("not answered replica=%s cause=%r", name, error.info.message)
                failure = error
                tried.append(name)

    async def search(self, exchange: Exchange, names: Sequence[str]) -> web.StreamResponse:
        """Asks all at once for an id that may be any replica's."""

        async def ask(name: str) -> Begun:
            if self._balancer.find(name) is None:  # it was removed meanwhile
                raise NotAnswered(UNKNOWN)
            return await self._ask(exchange, name)

        try:
            found = await Search(ask).best(names)
        except NotAnswered as error:
            raise self._refusal(exchange.demand, error) from None
        return await self._pass_on(exchange, found)

    async def relay(self, exchange: Exchange, *, max_size: int) -> web.StreamResponse:
        """Connects a websocket of the client with one of the first replica that takes it."""
        return await self._tried(exchange, functools.partial(self._relay, max_size=max_size))

    async def _relay(
        self, exchange: Exchange, name: str, *, max_size: int
    ) -> web.WebSocketResponse:
        with self._counted(exchange, name):
            upstream = await self._connected(exchange, name)
            client = client_socket(heartbeat_s=self.heartbeat_s, max_size=max_size)
            async with upstream:
                await client.prepare(exchange.request)
                self._websockets.add(client)
                try:
                    limits = exchange.limits
                    asked = accept if limits is None else limits.asked
                    answered = accept if limits is None else limits.answered
                    await pump_both(client, upstream, asked=asked, answered=answered)
                finally:
                    self._websockets.discard(client)
            return client

    async def _connected(self, exchange: Exchange, name: str) -> aiohttp.ClientWebSocketResponse:
        with self._failing_over(exchange, name):
            try:
                found = await self.upstreams[name].connect(exchange.call, self.heartbeat_s)
            except aiohttp.WSServerHandshakeError as error:
                info = refused_upgrade(error)
                if error.status not in TRY_ANOTHER or exchange.demand.owner:
                    raise RequestFailed(info) from None
                self._balancer.failed(name)
                raise NotAnswered(info) from None
        self._balancer.succeeded(name)
        return found

    async def _send(self, exchange: Exchange, name: str) -> web.StreamResponse:
        return await self._pass_on(exchange, await self._ask(exchange, name))

    async def _ask(self, exchange: Exchange, name: str) -> Begun:
        """Returns an answer whose first bytes have come. It is open until it is passed on."""
        upstream = self.upstreams[name]
        async with AsyncExitStack() as opened:
            opened.enter_context(self._counted(exchange, name))
            with self._failing_over(exchange, name):
                answer = await upstream.ask(exchange.call)
            opened.push_async_callback(upstream.release, answer)
            with self._failing_over(exchange, name):
                first = await self._first_bytes(exchange, name, answer)
            return Begun(name, answer, first, opened.pop_all())

    async def _pass_on(self, exchange: Exchange, begun: Begun) -> web.StreamResponse:
        async with begun.opened:
            return await self._stream(exchange, begun)

    @contextmanager
    def _failing_over(self, exchange: Exchange, name: str) -> Iterator[None]:
        """Lets another replica be tried if this one fails here, before the answer's first byte."""
        try:
            yield
        except GONE as error:
            info = self._note_failure(name, error)
            is_late = isinstance(error, TimeoutError)
            may_repeat = isinstance(error, CANNOT_CONNECT) or (_repeats(exchange) and not is_late)
            was_open = isinstance(error, AnswerBroken) and not error.has_begun
            raise NotAnswered(info, may_repeat=may_repeat, was_open=was_open) from None

    async def _first_bytes(self, exchange: Exchange, name: str, answer: Answer) -> bytes:
        if answer.status in TRY_ANOTHER and not exchange.demand.owner:
            self._balancer.failed(name)
            raise NotAnswered(await refused_by(answer), may_repeat=_repeats(exchange))
        first = await answer.read_some()
        self._balancer.succeeded(name)
        return first

    async def _stream(self, exchange: Exchange, begun: Begun) -> web.StreamResponse:
        """Streams the answer. The client's speed is then that of the replica."""
        name, answer, first, request = begun.name, begun.answer, begun.first, exchange.request
        headers = [*end_to_end(answer.headers), *exchange.headers.items()]
        if answer.status < 400:
            made = [*exchange.named, *ids_in(first), *answer.headers.getall("X-Request-Id", [])]
            self.owners.learn(made, name)
        status, reason = answer.status, answer.reason
        if first and answer.is_complete:
            exchange.keep(first)
            return web.Response(body=first, status=status, reason=reason, headers=headers)
        response = web.StreamResponse(status=status, reason=reason, headers=headers)
        writer = await response.prepare(request)
        assert isinstance(writer, StreamWriter), "aiohttp's, for a request that it has parsed"
        client = ClientStream(exchange, writer, timeout_s=self._write_timeout_s)
        end = b""
        try:
            if first:
                await client.begin(first)
            while not await answer.pipe(client.write):
                await client.drain()
        except (AnswerBroken, TimeoutError, web.RequestPayloadError, RouterEnds) as error:
            last = None
            if isinstance(error, RouterEnds):
                last = last_events(request.path, answer.headers, client.last, error.info())
            elif not isinstance(error, web.RequestPayloadError):  # which is the client's
                self._balancer.failed(name)
                self._metrics.broken.labels(name).inc()
                logger.warning("answer broken replica=%s cause=%s", name, error)
                last = last_events(request.path, answer.headers, client.last, BROKEN)
            if last is None:
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the answer was cut") from error
            end = last
        await with_deadline(response.write_eof(end), request, timeout_s=self._write_timeout_s)
        return response

    @contextmanager
    def _counted(self, exchange: Exchange, name: str) -> Iterator[None]:
        """Counts the request as open at the replica."""
        self.num_open += 1
        self.idle.clear()
        self._balancer.start(name, exchange.demand)
        self._metrics.requests.labels(name).inc()
        self._metrics.overhead.observe(time.monotonic() - exchange.request[STARTED_S])
        try:
            yield
        finally:
            self._balancer.end(name)
            self.num_open -= 1
            if not self.num_open:
                self.idle.set()

    def _note_failure(self, name: str, error: BaseException) -> ErrorInfo:
        is_down = isinstance(error, CANNOT_CONNECT)
        self._balancer.failed(name, is_down=is_down)
        if isinstance(error, TimeoutError) and not is_down:
            return ErrorInfo(
                f"The replica has sent nothing for {self._options.replica_timeout:g} seconds.",
                type="timeout_error",
                code="replica_timeout",
                status=504,
            )
        what = "cannot be reached" if is_down else "ended before it answered"
        return ErrorInfo(
            f"The replica {what}.",
            type="server_error",
            code="replica_failed",
            status=502,
        )

    def _refusal(self, demand: Demand, failure: NotAnswered | None) -> Exception:
        """Returns the error of a request that no further replica can serve."""
        if failure is not None:
            return RequestFailed(failure.info)
        if demand.owner:
            return EngineDead("The replica that has this id is gone.", retry_after_s=RETRY_AFTER_S)
        return EngineDead("No replica is ready.", retry_after_s=RETRY_AFTER_S, code="no_replica")


def _repeats(exchange: Exchange) -> bool:
    """Returns whether the request can be sent again."""
    return exchange.call.data is None or isinstance(exchange.call.data, bytes)
