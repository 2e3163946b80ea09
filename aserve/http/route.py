"""One route of the HTTP server: its method and path, its handler, and who may use it.

A route needs an API key if the server has any. A public one never does, and an admin one needs the
administrator's key, and does not exist on a server without one.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec
from aiohttp import web

from aserve.config import ServerOptions
from aserve.http.auth import Access
from aserve.http.body import read_body
from aserve.http.calls import RunningCall
from aserve.http.errors import ErrorFormat, error_body
from aserve.http.state import REQUEST_ID, HttpContext

METRICS = "/metrics"
T = TypeVar("T", bound=msgspec.Struct)
Handler: TypeAlias = Callable[[web.Request, HttpContext], Awaitable[web.StreamResponse]]
BodyHandler: TypeAlias = Callable[[web.Request, HttpContext, T], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """`body` is the record of the request body, for the description of the API and for tests.
    `errors` renders errors as the clients of this endpoint expect them.
    """

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    admin: bool = False
    public: bool = False
    errors: ErrorFormat = error_body


def post(
    path: str,
    kind: type[T],
    handler: BodyHandler[T],
    *,
    admin: bool = False,
    errors: ErrorFormat = error_body,
) -> Route:
    @functools.wraps(handler)
    async def read_and_handle(request: web.Request, context: HttpContext) -> web.StreamResponse:
        body = await read_body(request, kind)
        with context.calls.running(request[REQUEST_ID], RunningCall(handler, body)):
            return await handler(request, context, body)

    return Route("POST", path, read_and_handle, kind, admin=admin, errors=errors)


def get(path: str, handler: Handler, *, admin: bool = False, public: bool = False) -> Route:
    return Route("GET", path, handler, admin=admin, public=public)


def is_served(route: Route, options: ServerOptions) -> bool:
    return not route.admin or bool(options.admin_api_key)


def access_of(route: Route, options: ServerOptions) -> Access:
    is_public = route.public or (route.path == METRICS and options.public_metrics)
    return Access(is_public=is_public, is_admin=route.admin)
