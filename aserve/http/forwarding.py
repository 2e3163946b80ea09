"""Decides which frontend process answers a request, on a server with several of them.

The kernel gives a connection to any of the frontends. Each of them serves the routes that create
answers and need no store. Requests about an id go to the frontend that made it, and those about the
whole server to all of them. The first frontend answers everything else: it has the stores and the
adapters, and hears from the engine first. A frontend answers what another one has forwarded itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import aiohttp
import msgspec
from aiohttp import hdrs, web
from multidict import MultiMapping
from prometheus_client import CONTENT_TYPE_LATEST

from aserve.errors import AserveError, EngineDead, NotFound
from aserve.http.errors import RequestFailed, info_of, refused
from aserve.http.intake import INTAKE
from aserve.http.peers import EXPIRES, FORWARDED, PASSED_ON, RAW_BODY, Peers, owner_of
from aserve.http.route import METRICS, Route
from aserve.http.state import REQUEST_ID, HttpContext
from aserve.http.websocket_relay import client_socket, pump_both
from aserve.observability.metric_sums import summed

Headers: TypeAlias = list[tuple[str, str]]

# Every frontend serves these.
LOCAL = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"),
        *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
        *("/render", "/v1/chat/completions/render", "/apply-template"),
        *("/generate", "/generate_stream", "/completion", "/completions"),
        *("/api/chat", "/api/generate"),
        *("/pause_generation", "/pause"),  # which tell all of them
    }
)
# These are about the open requests of all frontends: the answers are added up.
MERGED = frozenset(
    {
        *(METRICS, "/abort_request", "/continue_generation", "/is_paused"),
        *("/v1/requests", "/load", "/live", "/resume", "/abort_requests"),
        *("/freeze_gc", "/set_trace_level"),
    }
)
# These go to the frontend that made the id.
BY_ID = frozenset({"/v1/requests/{id}", "/v1/requests/{id}/fork", "/v1/streams/{id}"})

LAST_EVENT_ID = "Last-Event-ID"
PROBE = "/livez"
CONNECT_S = 5.0
# For what a frontend does at once: one that is stopped, or whose event loop stands still, does not.
# An engine is stuck after the same time. A frontend that goes on later than BEGIN_S does nothing of
# what was asked meanwhile, because the others have given up then, or will have.
ANSWER_S = 10.0
BEGIN_S = 8.0
# Headers of one connection (RFC 9110, 7.6.1), and those that the connection between frontends has.
# `end_to_end` adds those that Connection names.
HOP_BY_HOP = frozenset(
    name.lower()
    for name in (
        *(hdrs.CONNECTION, hdrs.KEEP_ALIVE, hdrs.PROXY_AUTHENTICATE, hdrs.PROXY_AUTHORIZATION),
        *(hdrs.TRAILER, hdrs.TRANSFER_ENCODING, hdrs.UPGRADE, hdrs.EXPECT),
        *(FORWARDED, EXPIRES),
        *("Proxy-Connection", hdrs.TE),
        *(hdrs.SEC_WEBSOCKET_KEY, hdrs.SEC_WEBSOCKET_VERSION, hdrs.SEC_WEBSOCKET_EXTENSIONS),
        *(hdrs.SEC_WEBSOCKET_PROTOCOL, hdrs.SERVER, hdrs.DATE),
    )
)
OF_A_BODY = frozenset({"content-length", "content-type", "content-encoding"})
JSON = (hdrs.CONTENT_TYPE, "application/json")
SKIPPED = (hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)
GONE = (aiohttp.ClientConnectionError, OSError)

T = TypeVar("T")


def forwarded(route: Route, context: HttpContext) -> Route:
    """Returns the route as one of several frontends handles it. Its handler keeps its name and its
    docstring, which describe it in /openapi.json.
    """
    if not context.peers.are_several:
        return route
    handler = functools.update_wrapper(functools.partial(_dispatch, route), route.handler)
    return dataclasses.replace(route, handler=handler)


async def _dispatch(route: Route, request: web.Request, context: HttpContext) -> web.StreamResponse:
    peers = context.peers
    if peers.is_forwarded(request):
        _check_time(request, context)
        return await route.handler(request, context)
    if route.path in MERGED:
        return await _ask_all(route, request, peers)
    if route.path in BY_ID:
        return await _ask_by_id(route, request, peers)
    target = peers.number if route.path in LOCAL else 0
    if request.headers.get(LAST_EVENT_ID):
        target = owner_of(request.headers[LAST_EVENT_ID])
    if target != peers.number:
        return await _forward(request, context, target)
    return await _serve(route, request, context)


def _check_time(request: web.Request, context: HttpContext) -> None:
    """Refuses what other frontends wait for no more. If the first one refuses, the others may have
    done it, and get its state again.
    """
    if time.monotonic() > float(request.headers.get(EXPIRES, "inf")):
        context.state.share()
        raise EngineDead(f"this frontend did not run for {BEGIN_S:g} s, and goes on")


async def _serve(route: Route, request: web.Request, context: HttpContext) -> web.StreamResponse:
    """Serves a request here. The first frontend gets it if it names an unknown model, which may be
    an adapter.
    """
    try:
        return await route.handler(request, context)
    except (AserveError, RequestFailed) as error:
        body = request.get(RAW_BODY)
        if info_of(error).code != "model_not_found" or body is None:
            raise
    return await _forward(request, context, 0, body=body)


async def _forward(
    request: web.Request, context: HttpContext, target: int, *, body: bytes | None = None
) -> web.StreamResponse:
    peers = context.peers
    try:
        if web.WebSocketResponse().can_prepare(request):
            return await _relay(request, context, target)
        data = body or (request.content if request.can_read_body else None)
        async with _asked(request, peers, target, data) as answer:
            return await _passed_on(answer, request)
    except GONE as error:
        if _is_silent(error):
            raise _silence([target], request.path, ANSWER_S) from None
        if isinstance(error, ConnectionResetError):  # the client has gone
            raise
        if target:
            raise NotFound("The frontend that made this id has ended.") from None
        raise EngineDead("the first frontend does not answer", retry_after_s=5) from None


@contextlib.asynccontextmanager
async def _asked(
    request: web.Request, peers: Peers, target: int, data: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    request[PASSED_ON] = True
    async with _session(peers, target) as session:
        asked = session.request(
            request.method,
            request.url.with_scheme("http"),
            headers=_headers(request, peers),
            data=data,
            skip_auto_headers=SKIPPED,
            allow_redirects=False,
        )
        async with await _begun(asked, _probe(request, peers, target)) as answer:
            yield answer


async def _begun(
    asked: Awaitable[aiohttp.ClientResponse], probes: Coroutine[Any, Any, None]
) -> aiohttp.ClientResponse:
    """Waits for the beginning of an answer as long as its frontend answers probes."""
    try:
        async with asyncio.TaskGroup() as group:
            probing = group.create_task(probes)
            answer = await asked
            probing.cancel()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return answer


async def _probe(request: web.Request, peers: Peers, target: int) -> None:
    """Raises TimeoutError when a frontend has not answered a probe in time."""
    url = request.url.with_scheme("http").with_path(PROBE)
    headers = [(FORWARDED, peers.header_for(request))]
    pause_s = ANSWER_S / 5
    while True:
        await asyncio.sleep(pause_s)
        try:
            async with (
                asyncio.timeout(ANSWER_S - pause_s),
                _session(peers, target) as session,
                session.get(url, headers=headers),
            ):
                pass
        except GONE as error:
            if _is_silent(error):
                raise TimeoutError from None


def _session(peers: Peers, target: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(peers.socket_of(target), force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _headers(request: web.Request, peers: Peers) -> Headers:
    expires = f"{time.monotonic() + BEGIN_S}"
    own = [(FORWARDED, peers.header_for(request)), (EXPIRES, expires)]
    return [*end_to_end(request.headers), *own]


def end_to_end(given: MultiMapping[str]) -> Headers:
    """Returns the headers of a message that are not of one connection."""
    dropped: Set[str] = HOP_BY_HOP
    if hdrs.CONNECTION in given:
        named = ",".join(given.getall(hdrs.CONNECTION)).lower().split(",")
        dropped = HOP_BY_HOP.union(map(str.strip, named))
    return [(name, value) for name, value in given.items() if name.lower() not in dropped]


async def _passed_on(answer: aiohttp.ClientResponse, request: web.Request) -> web.StreamResponse:
    """Streams the answer of another frontend to the client, whose speed is then that of both."""
    headers = end_to_end(answer.headers)
    request[REQUEST_ID] = answer.headers.get("X-Request-Id", request[REQUEST_ID])
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
    await response.prepare(request)
    try:
        async for piece in answer.content.iter_any():
            await response.write(piece)
    except aiohttp.ClientError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("another frontend ended within its answer") from error
    await response.write_eof()
    return response


async def _relay(request: web.Request, context: HttpContext, target: int) -> web.WebSocketResponse:
    peers = context.peers
    async with _session(peers, target) as session:
        try:
            async with asyncio.timeout(ANSWER_S):
                upstream = await session.ws_connect(
                    request.url.with_scheme("http"),
                    headers=_headers(request, peers),
                    heartbeat=context.heartbeat_s,
                    max_msg_size=0,
                    compress=0,
                )
        except aiohttp.WSServerHandshakeError as error:
            raise refused(error.status, "The websocket was refused.") from None
        size = context.options.max_body_size + 1
        client = client_socket(heartbeat_s=context.heartbeat_s, max_size=size)
        await client.prepare(request)
        async with upstream:
            await pump_both(client, upstream)
        return client


async def _body_of(request: web.Request) -> bytes | None:
    if not request.can_read_body:
        return None
    intake = request.app[INTAKE]
    with intake.hold() as held:
        return await intake.receive(request, held)


async def _ask_by_id(route: Route, request: web.Request, peers: Peers) -> web.StreamResponse:
    """Asks the frontend that made the id. An id may also be the client's own, so the others are
    asked if that one does not know it.
    """
    body = await _body_of(request)
    owner = owner_of(request.match_info["id"])
    numbers = sorted(peers.numbers(), key=lambda number: number == owner, reverse=True)
    for number in numbers:
        asked = _asked(request, peers, number, body)
        try:
            response = await _known(request, asked, is_last=number == numbers[-1])
        except (TimeoutError, aiohttp.ClientConnectorError) as error:
            if _is_silent(error):
                raise _silence([number], route.path, ANSWER_S) from None
            continue  # it has ended
        if response is not None:
            return response
    raise NotFound("The frontend that made this id has ended.")


async def _known(
    request: web.Request,
    asked: AbstractAsyncContextManager[aiohttp.ClientResponse],
    *,
    is_last: bool,
) -> web.StreamResponse | None:
    """Returns None if the frontend does not know the id and is not the last one to be asked."""
    async with asked as answer:
        if answer.status == NotFound.status and not is_last:
            return None
        return await _passed_on(answer, request)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    content_type: str
    body: bytes


async def _ask_all(route: Route, request: web.Request, peers: Peers) -> web.Response:
    """Adds up the answers of all frontends. The answer is an error if one of them is."""
    body = await _body_of(request)
    ask = functools.partial(_whole, request, peers, body=body)
    answers = await _of_all(route.path, peers, ask, wait_s=0)
    failed = [answer for answer in answers if answer.status >= 400]
    if failed:
        first = failed[0]
        return web.Response(body=first.body, status=first.status, content_type=first.content_type)
    bodies = [answer.body for answer in answers]
    if route.path == METRICS:
        data = summed(bodies)
        return web.Response(body=data, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE_LATEST})
    data = msgspec.json.encode(merged([msgspec.json.decode(each) for each in bodies]))
    return web.Response(body=data, content_type="application/json")


async def tell_all(
    request: web.Request, peers: Peers, path: str, body: bytes, *, wait_s: float
) -> dict[str, Any]:
    """Posts a JSON body to another path of every frontend, with the key of `request`. Each may wait
    for `wait_s` before it answers. Returns the sum of their answers, or one that is an error.
    """
    given = _headers(request, peers)
    headers = [pair for pair in given if pair[0].lower() not in OF_A_BODY]
    url = request.url.with_scheme("http").with_path(path)

    async def tell(number: int) -> dict[str, Any]:
        async with (
            _session(peers, number) as session,
            session.post(url, data=body, headers=[*headers, JSON]) as answer,
        ):
            found: dict[str, Any] = await answer.json()
            return found

    told = await _of_all(path, peers, tell, wait_s=wait_s)
    failed = [each for each in told if "error" in each]
    return failed[0] if failed else merged(told)


async def _of_all(
    path: str, peers: Peers, ask: Callable[[int], Awaitable[T]], *, wait_s: float
) -> list[T]:
    """Returns the answers of the frontends that have not ended, and raises if one of them gives
    none in time. The others have done then what they were asked for. What it missed of the state
    that all share, it gets from the first frontend, over the link, when it goes on.
    """
    limit_s = ANSWER_S + wait_s
    silent: list[int] = []

    async def within_limit(number: int) -> list[T]:
        try:
            async with asyncio.timeout(limit_s):
                return [await ask(number)]
        except GONE as error:
            if _is_silent(error):
                silent.append(number)
        return []

    answers = await asyncio.gather(*map(within_limit, peers.numbers()))
    if silent:
        raise _silence(silent, path, limit_s)
    return list(itertools.chain(*answers))


def _silence(numbers: list[int], path: str, limit_s: float) -> EngineDead:
    return EngineDead(
        f"Frontends {numbers} have not answered {path} within {limit_s:g} s; the others do what "
        "they are asked for. Let these processes go on, or end them: then they are started again.",
        code="frontend_silent",
        retry_after_s=ANSWER_S,
    )


def _is_silent(error: aiohttp.ClientError | OSError) -> bool:
    """Returns whether a process listens, but answers too late, or has no room for connections."""
    is_full = isinstance(error, OSError) and error.errno == errno.EAGAIN
    return is_full or isinstance(error, TimeoutError)


async def _whole(request: web.Request, peers: Peers, number: int, *, body: bytes | None) -> _Answer:
    async with _asked(request, peers, number, body) as answer:
        data = await answer.read()
    return _Answer(answer.status, answer.content_type, data)


def merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds up the numbers of JSON objects, and joins their lists. `now_s` is the earliest, up to
    which all of them tell what happened. All else is of the first that has it, as are values whose
    types differ.
    """
    whole = dict(answers[0])
    for answer in answers[1:]:
        for key, value in answer.items():
            if whole.get(key) is None:
                whole[key] = value
            elif type(value) is not type(whole[key]):
                continue
            elif key == "now_s":
                whole[key] = min(whole[key], value)
            elif isinstance(value, int | list) and not isinstance(value, bool):
                whole[key] = whole[key] + value
    return whole
