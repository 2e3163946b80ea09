"""GET /v1/responses with an upgrade: OpenAI's protocol for text over one websocket.

A client sends `response.create` with the body of POST /v1/responses, and gets the events of that
route, each as a text message. Requests with the same `stream_id` form a stream and are answered in
order; streams run side by side. Requests without one share a stream. These are requests, too:
- `response.subscribe` reads the events of a resumable response after number `starting_after`, also
  of one that another connection created;
- `response.fork` has a `response_id` and the body of POST /v1/requests/{id}/fork.
`response.amend`, with the body of POST /v1/requests/{id}, is answered at once. A socket's state is
written by its own tasks, on the loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web
from msgspec import UNSET, UnsetType

from aserve.channel import yield_to_loop
from aserve.errors import AserveError, ErrorInfo, InvalidRequest, QueueFull
from aserve.http.body import parse_body
from aserve.http.calls import begin_with
from aserve.http.delivery import closer_of, with_deadline
from aserve.http.errors import (
    STARTED,
    ErrorFields,
    RequestFailed,
    StartedAnswer,
    error_fields,
    info_of,
    logged_bug,
    refused,
)
from aserve.http.fork import ForkBody, beginning_of, forked_body
from aserve.http.hosts import HOSTS
from aserve.http.intake import INTAKE
from aserve.http.json_bounds import check_json_bounds
from aserve.http.long_json import BLOCK_BYTES, blocks_of, pieces_of
from aserve.http.openai.call import Origin
from aserve.http.openai.checks import unsupported
from aserve.http.responses.body import ResponseBody
from aserve.http.responses.call import ResponseCall, response_call
from aserve.http.responses.conversation import Item
from aserve.http.responses.live import RESPONSES, Responses
from aserve.http.responses.store import ResponseKey, StoredResponse
from aserve.http.route import get
from aserve.http.running import AmendBody, RunningRequest, amend_request, change_of, found_ids
from aserve.http.state import REQUEST_ID, HttpContext, origin_of
from aserve.http.streams.event_log import data_of
from aserve.http.streams.handlers import StreamQuery, key_of
from aserve.http.streams.resumable import STREAMS, StreamKey
from aserve.http.unknown_fields import ignored_fields

SUBSCRIBE = "response.subscribe"
MAX_OPEN = 32  # requests of one socket that run or wait
CLOSE_S = 1.0  # for the client to answer a close frame

logger = logging.getLogger(__name__)


async def connect(request: web.Request, context: HttpContext) -> web.StreamResponse:
    """Serves a websocket. A refusal before the upgrade is an ordinary answer with its status."""
    request.app[HOSTS].check_origin(request)
    refusal = context.state.refusal()
    if refusal is not None:
        raise refusal
    if not web.WebSocketResponse().can_prepare(request):
        raise refused(426, "This URL is a websocket: connect with an upgrade, or use POST.")
    return await ResponseSocket(request, context).serve()


def set_up(app: web.Application, context: HttpContext) -> None:
    app[RESPONSES] = Responses(context)
    app[SOCKETS] = set()
    app.on_shutdown.append(close_sockets)


async def close_sockets(app: web.Application) -> None:
    """Closes all websockets and the readers of responses in the background, when the server stops;
    the responses have ended before.
    """
    await app[RESPONSES].close()
    await asyncio.gather(*(socket.go_away() for socket in app[SOCKETS]))


class Envelope(msgspec.Struct):
    """The fields of a message beside the body. `stream_id` is bounded, because every event of the
    answer repeats it.
    """

    type: str = ""
    stream_id: Annotated[str, msgspec.Meta(max_length=256)] | UnsetType = UNSET
    generate: bool | None = None


class AmendEvent(AmendBody, kw_only=True):
    response_id: str


class ForkEvent(ForkBody, kw_only=True):
    response_id: str


class AmendedEvent(msgspec.Struct, kw_only=True):
    type: str = "response.amended"
    request: RunningRequest


class ErrorEvent(msgspec.Struct, kw_only=True):
    type: str = "error"
    status: int
    error: ErrorFields


class Subscription(StreamQuery, kw_only=True):
    response_id: str


class SocketRequest(NamedTuple):
    """A received message. Its error is sent in order, after the earlier answers of its stream."""

    data: bytes
    envelope: Envelope
    error: InvalidRequest | None = None

    @property
    def stream_id(self) -> str | UnsetType:
        return self.envelope.stream_id


RequestWork: TypeAlias = Callable[[SocketRequest], Coroutine[Any, Any, None]]


class ResponseSocket:
    """One client's connection, from the upgrade to the close."""

    def __init__(self, request: web.Request, context: HttpContext) -> None:
        self._request = request
        self._context = context
        self._responses = request.app[RESPONSES]
        self._intake = request.app[INTAKE]
        self._max_size = context.options.max_body_size
        self._socket = web.WebSocketResponse(
            timeout=CLOSE_S,
            heartbeat=context.heartbeat_s,
            max_msg_size=self._max_size + 1,  # aiohttp refuses what is as large as this
            compress=False,
        )
        # The waiting requests of each stream that has open ones.
        self._streams: dict[str | UnsetType, deque[SocketRequest]] = {}
        self._num_open = 0
        self._waiting_bytes = 0
        self._latest: StoredResponse | None = None
        self._bodies: dict[str, ResponseBody] = {}  # of the running responses, by their ids

    async def serve(self) -> web.WebSocketResponse:
        """Serves until one side closes, and then cancels the running responses."""
        await self._socket.prepare(self._request)
        self._request[STARTED] = StartedAnswer(self._socket, self._fail)
        sockets = self._request.app[SOCKETS]
        sockets.add(self)
        try:
            async with asyncio.TaskGroup() as group:
                tasks: set[asyncio.Task[None]] = set()
                await self._listen(group, tasks)
                for task in tasks:
                    task.cancel()
        except* ConnectionError:
            logger.debug("client gone from its websocket")
        finally:
            sockets.discard(self)
        return self._socket

    async def go_away(self) -> None:
        await self._socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server shuts down")

    async def _fail(self, info: ErrorInfo) -> None:
        with suppress(ConnectionError):
            await self._send_error(info)
        await self._socket.close(code=WSCloseCode.INTERNAL_ERROR)

    async def _listen(self, group: asyncio.TaskGroup, tasks: set[asyncio.Task[None]]) -> None:
        async for message in self._socket:
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                continue  # aiohttp has already closed the socket with a reason
            request = await self._intake.off_loop(
                functools.partial(parse_message, message, self._intake.max_values),
                size=len(message.data),
            )
            if not self._has_room(request):
                await self._send_error(self._overflow(), request.stream_id)
                continue
            self._num_open += 1
            if request.envelope.type == "response.amend":
                self._spawn(self._attempt(self._amend, request), group, tasks)
                continue
            self._waiting_bytes += len(request.data)
            stream = self._streams.get(request.stream_id)
            if stream is not None:
                stream.append(request)
                continue
            self._streams[request.stream_id] = deque([request])
            self._spawn(self._answer_stream(request.stream_id), group, tasks)

    @staticmethod
    def _spawn(
        work: Coroutine[Any, Any, None], group: asyncio.TaskGroup, tasks: set[asyncio.Task[None]]
    ) -> None:
        task = group.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _attempt(self, work: RequestWork, request: SocketRequest) -> None:
        """Answers one request, with an error if that raises. Only a lost client ends the others."""
        try:
            await work(request)
        except (AserveError, RequestFailed) as error:
            await self._send_error(info_of(error), request.stream_id)
        except ConnectionError:
            raise
        except Exception:
            bug = logged_bug(self._request, self._request[REQUEST_ID])
            await self._send_error(bug, request.stream_id)
        self._num_open -= 1

    async def _amend(self, request: SocketRequest) -> None:
        """Changes a running response of this client, also of another socket."""
        body = parse_body(request.data, AmendEvent)
        change = change_of(body, self._request, self._context)
        state = await amend_request(self._request, self._context, body.response_id, change)
        await self._send(pieces_of(AmendedEvent(request=state)), request.stream_id)

    def _has_room(self, request: SocketRequest) -> bool:
        size = self._waiting_bytes + len(request.data)
        return self._num_open < MAX_OPEN and size <= self._max_size

    def _overflow(self) -> ErrorInfo:
        return QueueFull(
            f"This websocket has {self._num_open} open requests. At most {MAX_OPEN} are allowed, "
            f"and {self._max_size} bytes of waiting ones. Wait for a response to end."
        ).info()

    async def _answer_stream(self, stream_id: str | UnsetType) -> None:
        """Answers the requests of a stream one after the other, until none waits."""
        stream = self._streams[stream_id]
        while stream:
            request = stream.popleft()
            self._waiting_bytes -= len(request.data)
            await self._attempt(self._answer, request)
        del self._streams[stream_id]
        if self._context.state.phase == "draining" and not self._streams:
            await self.go_away()

    async def _answer(self, request: SocketRequest) -> None:
        if request.error is None and request.envelope.type == SUBSCRIBE:
            await self._subscribe(request)
            return
        body, origin = await self._begin(request)
        call = response_call(body, origin, self)
        self._bodies[call.response.id] = body
        try:
            await self._run(call, request.stream_id, is_resumable=bool(body.resumable))
        finally:
            del self._bodies[call.response.id]

    async def _run(
        self, call: ResponseCall, stream_id: str | UnsetType, *, is_resumable: bool
    ) -> None:
        if is_resumable:
            live = self._responses.run_with_log(call, self._request.app[STREAMS])
            await self._read(StreamKey(*live.so_far.key), 0, stream_id)
            self._latest = live.so_far
            return
        with self._responses.running(call) as live:
            live.close_when_unread(closer_of(self._request))
            async for events in live.events():
                if live.is_done:
                    self._latest = live.so_far
                for event in events:
                    await self._send(pieces_of(event), stream_id)

    async def _begin(self, request: SocketRequest) -> tuple[ResponseBody, Origin]:
        """Returns the body of a new response or of a fork, and its origin."""
        origin = origin_of(self._request, self._context, started_s=time.monotonic())
        origin = replace(origin, request_id=uuid.uuid4().hex)
        if request.envelope.type != "response.fork":
            work = functools.partial(body_of, request)
            return await self._intake.off_loop(work, size=len(request.data)), origin
        changes = parse_body(request.data, ForkEvent)
        request_ids = found_ids(self._request, changes.response_id)
        body = self._bodies.get(changes.response_id)
        if body is None or len(request_ids) > 1:
            raise refused(409, "Only a response that runs on this websocket can be forked here.")
        original = self._context.gateway.requests[request_ids[0]]
        beginning = await beginning_of(changes, original, self._context)
        return forked_body(body, changes, original), begin_with(beginning, origin)

    async def _subscribe(self, request: SocketRequest) -> None:
        subscription = parse_body(request.data, Subscription)
        key = key_of(self._request, self._context, subscription.response_id)
        await self._read(key, subscription.start, request.stream_id)

    async def _read(self, key: StreamKey, start: int, stream_id: str | UnsetType) -> None:
        """Sends the events of a resumable response from number `start` on."""
        with self._request.app[STREAMS].reading(key) as log:
            log.check(start)
            async for events in log.batches(start):
                for event in events:
                    await self._send((data_of(event),), stream_id)

    def conversation_items(self, key: ResponseKey) -> tuple[Item, ...]:
        return self._responses.conversation_items(key)

    def response_items(self, key: ResponseKey) -> tuple[Item, ...]:
        """Returns the items of an earlier response. The socket's last one is found even if it
        was not stored.
        """
        if self._latest is not None and self._latest.key == key:
            return self._latest.conversation
        return self._responses.response_items(key)

    async def _send_error(self, info: ErrorInfo, stream_id: str | UnsetType = UNSET) -> None:
        event = ErrorEvent(status=info.status, error=error_fields(info))
        await self._send(pieces_of(event), stream_id)

    async def _send(self, pieces: Iterable[bytes], stream_id: str | UnsetType) -> None:
        """Sends the JSON of an event, with the `stream_id` by which the client tells answers apart.
        Waits until the client has read enough that the event fits its send buffer. A client that
        does not read within the write timeout loses its connection.
        """
        data = bytearray()
        for block in blocks_of(pieces):
            data += block
            if len(block) == BLOCK_BYTES:
                await yield_to_loop()
        if stream_id is not UNSET:
            data[:1] = b'{"stream_id":%b,' % msgspec.json.encode(stream_id)
        sending = self._socket.send_frame(bytes(data), WSMsgType.TEXT)
        await with_deadline(sending, self._request, timeout_s=self._context.options.write_timeout)


def parse_message(message: WSMessage, max_values: int) -> SocketRequest:
    if message.type == WSMsgType.BINARY:
        wrong = "Unsupported binary message: send events as JSON text."
        error = InvalidRequest(wrong, code="unsupported_message")
        return SocketRequest(message.data, Envelope(), error)
    data: bytes = message.data.encode()
    try:
        check_json_bounds(data, max_values=max_values)
        return SocketRequest(data, parse_body(data, Envelope))
    except InvalidRequest as error:
        return SocketRequest(data, Envelope(), error)


def body_of(request: SocketRequest) -> ResponseBody:
    if request.error is not None:
        raise request.error
    if request.envelope.type != "response.create":
        raise InvalidRequest(
            f"Unsupported event type '{request.envelope.type[:40]}'. Supported types are "
            f"response.create, {SUBSCRIBE}, response.fork and response.amend.",
            param="type",
            code="unsupported_value",
        )
    if request.envelope.generate is False:
        raise InvalidRequest(
            "Unsupported value for 'generate': prefill without output is not supported.",
            param="generate",
            code="unsupported_value",
        )
    body = parse_body(request.data, ResponseBody)
    ignored_fields(parse_body(request.data, dict[str, msgspec.Raw]), ResponseBody)
    if body.background:
        raise unsupported("background", "A response of a websocket ends with it.")
    body.stream = True
    return body


SOCKETS = web.AppKey("sockets", set[ResponseSocket])  # the open ones
ROUTES = (get("/v1/responses", connect),)
