"""Requests of one frontend process to another one, which may be stopped or have ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import time
from collections.abc import AsyncIterator, Coroutine, Set
from typing import Any, TypeAlias

import aiohttp
from aiohttp import hdrs, web
from multidict import MultiMapping

from aserve.errors import EngineDead, ErrorInfo
from aserve.http.cut_streams import last_events
from aserve.http.delivery import closer_of, with_deadline
from aserve.http.errors import STARTED, StartedAnswer
from aserve.http.intake import INTAKE
from aserve.http.peers import EXPIRES, FORWARDED, PASSED_ON, Peers
from aserve.http.state import REQUEST_ID

Headers: TypeAlias = list[tuple[str, str]]

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
SKIPPED = (hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)
GONE = (aiohttp.ClientConnectionError, OSError)


@contextlib.asynccontextmanager
async def ask(
    request: web.Request, peers: Peers, target: int, data: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Sends a client's request to another frontend, and gives the answer once it has begun. Raises
    TimeoutError, also within the answer, if that frontend is silent and answers no probe either.
    """
    request[PASSED_ON] = True
    heard = _Heard()
    probes = _probe(request, peers, target, heard)
    async with probing(probes), session_with(peers, target) as session:
        asked = session.request(
            request.method,
            request.url.with_scheme("http"),
            headers=headers_for(request, peers),
            data=data,
            skip_auto_headers=SKIPPED,
            allow_redirects=False,
        )
        async with await asked as answer:
            heard.content = answer.content
            yield answer


@contextlib.asynccontextmanager
async def probing(probes: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Ends its body by the error of the probes, if they raise one."""
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(probes)
            yield
            task.cancel()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


class _Heard:
    """Counts the bytes that have come of an answer, whose `content` is set once it has begun."""

    def __init__(self) -> None:
        self.content: aiohttp.StreamReader | None = None

    def num_bytes(self) -> int:
        return 0 if self.content is None else self.content.total_bytes


async def _probe(request: web.Request, peers: Peers, target: int, heard: _Heard) -> None:
    """Raises TimeoutError when a frontend has not answered a probe in time. One that goes on with
    its answer gets none.
    """
    url = request.url.with_scheme("http").with_path(PROBE)
    headers = [(FORWARDED, peers.header_for(request))]
    pause_s = ANSWER_S / 5
    while True:
        num_bytes = heard.num_bytes()
        await asyncio.sleep(pause_s)
        if heard.num_bytes() > num_bytes:
            continue
        try:
            async with (
                asyncio.timeout(ANSWER_S - pause_s),
                session_with(peers, target) as session,
                session.get(url, headers=headers),
            ):
                pass
        except GONE as error:
            if is_silent(error):
                raise TimeoutError from None


def session_with(peers: Peers, target: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(peers.socket_of(target), force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def headers_for(request: web.Request, peers: Peers) -> Headers:
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


async def pass_on(
    answer: aiohttp.ClientResponse, request: web.Request, *, timeout_s: float
) -> web.StreamResponse:
    """Streams the answer of another frontend to the client, whose speed is then that of both. One
    that reads nothing for `timeout_s` is closed.
    """
    headers = end_to_end(answer.headers)
    request[REQUEST_ID] = answer.headers.get("X-Request-Id", request[REQUEST_ID])
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
    await response.prepare(request)
    within_limit = functools.partial(with_deadline, request=request, timeout_s=timeout_s)
    piece = b""

    async def fail(info: ErrorInfo) -> None:
        last = last_events(request.path, answer.headers, piece, info)
        if last is None:
            closer_of(request)()
            return
        await within_limit(response.write_eof(last))

    request[STARTED] = StartedAnswer(response, fail)
    try:
        async for piece in answer.content.iter_any():
            await within_limit(response.write(piece))
    except aiohttp.ClientPayloadError:
        raise EngineDead("the frontend ended within its answer", code="frontend_ended") from None
    await within_limit(response.write_eof())
    return response


async def body_of(request: web.Request) -> bytes | None:
    if not request.can_read_body:
        return None
    intake = request.app[INTAKE]
    with intake.hold() as held:
        return await intake.receive(request, held)


def answer_timeout(wait_s: float = 0.0) -> asyncio.Timeout:
    """Limits the time for answers of frontends that may wait for `wait_s` before they answer."""
    return asyncio.timeout(ANSWER_S + wait_s)


def silence(numbers: list[int], path: str, wait_s: float = 0.0) -> EngineDead:
    return EngineDead(
        f"Frontends {numbers} have not answered {path} within {ANSWER_S + wait_s:g} s; the others "
        "do what they are asked for. Let these processes go on, or end them: then they are started "
        "again.",
        code="frontend_silent",
        retry_after_s=ANSWER_S,
    )


def is_silent(error: aiohttp.ClientError | OSError) -> bool:
    """Returns whether a process listens, but answers too late, or has no room for connections."""
    is_full = isinstance(error, OSError) and error.errno == errno.EAGAIN
    return is_full or isinstance(error, TimeoutError)
