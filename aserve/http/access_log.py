"""Logs one line per request, with --access-log: its id, route, status and times.

A line names the route and not the URL, whose query could hold what a client would not see in a log.
Probes and scrapes that succeed are left out.
"""

from __future__ import annotations

import logging
import time

from aiohttp import web
from aiohttp.typedefs import Handler

from aserve.http.auth import IDENTITY
from aserve.http.state import REQUEST_ID

QUIET = frozenset({"/health", "/livez", "/readyz", "/startupz", "/ping", "/metrics"})
CLIENT_GONE = 499
LINE = "request id=%s method=%s route=%s status=%d client=%s first_byte_ms=%.1f duration_ms=%.1f"
STARTED_AT = web.RequestKey("started_at", float)
FIRST_BYTE_AT = web.RequestKey("first_byte_at", float)

logger = logging.getLogger(__name__)


def log_access(app: web.Application) -> None:
    """Makes an application log its requests. Call it before the middleware that answers errors."""
    app.middlewares.append(_logged)
    app.on_response_prepare.append(_note_first_byte)


@web.middleware
async def _logged(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[STARTED_AT] = time.monotonic()
    status = CLIENT_GONE  # unless there is an answer
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        _log(request, status)


async def _note_first_byte(request: web.Request, _: web.StreamResponse) -> None:
    request[FIRST_BYTE_AT] = time.monotonic()


def _log(request: web.Request, status: int) -> None:
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown"
    if route in QUIET and status < 500:
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
    )
