"""Logs one line per request, with --access-log: its id, route, status and times.

A line names the route and not the URL, whose query could hold what a client would not see in a log.
Probes and scrapes that succeed are left out, and the frontend that handles a request logs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler

from aserve.http.auth import IDENTITY
from aserve.http.peers import PASSED_ON
from aserve.http.state import REQUEST_ID, STARTED_AT, HttpContext

QUIET = frozenset({"/health", "/livez", "/readyz", "/startupz", "/ping", "/metrics"})
CLIENT_GONE = 499
LINE = (
    "request id=%s method=%s route=%s status=%d client=%s first_byte_ms=%.1f duration_ms=%.1f "
    "times=%s"
)
FIRST_BYTE_AT = web.RequestKey("first_byte_at", float)

logger = logging.getLogger(__name__)


def log_access(app: web.Application, context: HttpContext) -> None:
    """Makes an application tell the times of its requests, and with the option log the requests.
    Call it before the middleware that answers errors.
    """
    app.on_response_prepare.append(timing_header(context))
    if not context.options.access_log:
        return

    @web.middleware
    async def logged(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = CLIENT_GONE  # unless there is an answer
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            _log(request, status, _times_of(request, context) or "-")

    app.middlewares.append(logged)
    app.on_response_prepare.append(_note_first_byte)


def timing_header(
    context: HttpContext,
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Returns what adds the Server-Timing header to answers that are not streamed, if they are
    timed. A stream begins before its times are known.
    """

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        times = _times_of(request, context)
        if times:
            response.headers["Server-Timing"] = times

    return add


def _times_of(request: web.Request, context: HttpContext) -> str | None:
    """Returns the times of the request's first prompt."""
    return context.latency.server_timing(f"{request.get(REQUEST_ID)}-0")


async def _note_first_byte(request: web.Request, _: web.StreamResponse) -> None:
    request[FIRST_BYTE_AT] = time.monotonic()


def _log(request: web.Request, status: int, times: str) -> None:
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown"
    if PASSED_ON in request or (route in QUIET and status < 500):
        return
    now, started_at = time.monotonic(), request[STARTED_AT]
    identity = request.get(IDENTITY)
    logger.info(
        LINE,
        request.get(REQUEST_ID, ""),
        request.method,
        route,
        status,
        identity.client if identity is not None else "",
        1000 * (request.get(FIRST_BYTE_AT, now) - started_at),
        1000 * (now - started_at),
        times.replace(" ", ""),
    )
