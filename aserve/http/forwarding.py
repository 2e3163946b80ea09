"""Decides which frontend process answers a request, on a server with several of them.

The kernel gives a connection to any of the frontends. Each of them serves the routes that create
answers and need no store. Requests about an id go to the frontend that made it, and those about the
whole server to all of them. The first frontend answers everything else: it has the stores and the
adapters, and hears from the engine first. A frontend answers what another one has forwarded itself.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from contextlib import AbstractAsyncContextManager

import aiohttp
from aiohttp import web

from aserve.errors import AserveError, EngineDead, NotFound
from aserve.http.all_frontends import ask_all
from aserve.http.errors import RequestFailed, info_of, refused
from aserve.http.frontend_requests import (
    BEGIN_S,
    GONE,
    answer_timeout,
    ask,
    body_of,
    headers_for,
    is_silent,
    pass_on,
    session_with,
    silence,
)
from aserve.http.peers import EXPIRES, RAW_BODY, owner_of
from aserve.http.route import METRICS, Route
from aserve.http.sse import LAST_EVENT_ID
from aserve.http.state import HttpContext
from aserve.http.websocket_relay import client_socket, pump_both
from aserve.unread import UnreadAnswer

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
        return await ask_all(route, request, peers)
    if route.path in BY_ID:
        return await _ask_by_id(route, request, context)
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
        async with ask(request, peers, target, data) as answer:
            return await pass_on(answer, request, timeout_s=context.options.write_timeout)
    except GONE as error:
        if is_silent(error):
            raise silence([target], request.path) from None
        if isinstance(error, ConnectionResetError | UnreadAnswer):  # the client has gone
            raise
        if target:
            raise NotFound("The frontend that made this id has ended.") from None
        raise EngineDead("the first frontend does not answer", retry_after_s=5) from None


async def _relay(request: web.Request, context: HttpContext, target: int) -> web.WebSocketResponse:
    peers = context.peers
    async with session_with(peers, target) as session:
        try:
            async with answer_timeout():
                upstream = await session.ws_connect(
                    request.url.with_scheme("http"),
                    headers=headers_for(request, peers),
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


async def _ask_by_id(
    route: Route, request: web.Request, context: HttpContext
) -> web.StreamResponse:
    """Asks the frontend that made the id. An id may also be the client's own, so the others are
    asked if that one does not know it.
    """
    peers, timeout_s = context.peers, context.options.write_timeout
    body = await body_of(request)
    owner = owner_of(request.match_info["id"])
    numbers = sorted(peers.numbers(), key=lambda number: number == owner, reverse=True)
    for number in numbers:
        asked = ask(request, peers, number, body)
        try:
            is_last = number == numbers[-1]
            response = await _known(request, asked, is_last=is_last, timeout_s=timeout_s)
        except (TimeoutError, aiohttp.ClientConnectorError) as error:
            if is_silent(error):
                raise silence([number], route.path) from None
            continue  # it has ended
        if response is not None:
            return response
    raise NotFound("The frontend that made this id has ended.")


async def _known(
    request: web.Request,
    asked: AbstractAsyncContextManager[aiohttp.ClientResponse],
    *,
    is_last: bool,
    timeout_s: float,
) -> web.StreamResponse | None:
    """Returns None if the frontend does not know the id and is not the last one to be asked."""
    async with asked as answer:
        if answer.status == NotFound.status and not is_last:
            return None
        return await pass_on(answer, request, timeout_s=timeout_s)
