"""Cross-origin requests of web pages (CORS), for the origins of --allowed-origins.

A browser lets a page read an answer only if the answer names its origin. Before a request with JSON
or a key it asks with an OPTIONS request, the preflight, whether it may send that one. By default
no origin is named, so pages of other sites can use nothing. Cookies are never used, so
`Access-Control-Allow-Credentials` is never sent.
"""

from __future__ import annotations

import re

from aiohttp import hdrs, web

from aserve.http.hosts import HOSTS

EXPOSED = "X-Request-Id, X-Ignored-Params, Retry-After, Retry-After-Ms, Server-Timing"
PREFLIGHT_AGE_S = 600
HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(\s*,\s*[A-Za-z0-9-]+)*")
MAX_HEADER_CHARS = 4096
PRIVATE_NETWORK = "Access-Control-{}-Private-Network"


def is_preflight(request: web.Request) -> bool:
    """Returns whether a browser asks for an allowed origin if it may send a request. The path must
    be a route's.
    """
    return (
        request.method == hdrs.METH_OPTIONS
        and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        and isinstance(request.match_info.http_exception, web.HTTPMethodNotAllowed)
        and allowed_origin(request) is not None
    )


def preflight_response(request: web.Request) -> web.Response:
    """Allows the methods of the path's routes and the headers that the browser asks for: clients
    send many of their own.
    """
    refusal = request.match_info.http_exception
    assert isinstance(refusal, web.HTTPMethodNotAllowed)
    headers: dict[str, str] = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: ", ".join(sorted(refusal.allowed_methods)),
        hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_AGE_S),
    }
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")[:MAX_HEADER_CHARS]
    if HEADER_NAMES.fullmatch(wanted):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
    if request.headers.get(PRIVATE_NETWORK.format("Request")) == "true":
        headers[PRIVATE_NETWORK.format("Allow")] = "true"
    return web.Response(status=204, headers=headers)


def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Names the page's origin in the answer if it is allowed."""
    if not request.app[HOSTS].has_origins:
        return
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    origin = allowed_origin(request)
    if origin is not None:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED


def allowed_origin(request: web.Request) -> str | None:
    origin = request.headers.get(hdrs.ORIGIN)
    return origin if origin and request.app[HOSTS].allows_origin(origin) else None
