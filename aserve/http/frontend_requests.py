"""Requests of one frontend process to another one, which may be stopped or have ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Set
from typing import Any, TypeAlias

import aiohttp
from aiohttp import hdrs, web
from multidict import MultiMapping

from aserve.errors import EngineDead
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
    """Sends a client's request to another frontend, and gives the answer once it has begun."""
    request[PASSED_ON] = True
    async with session_with(peers, target) as session:
        asked = session.request(
            request.method,
            request.url.with_scheme("http"),
            headers=headers_for(request, peers),
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


async def pass_on(answer: aiohttp.ClientResponse, request: web.Request) -> web.StreamResponse:
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
