"""The HTTP server: it opens the port, routes requests, and turns errors into answers.

Requests enter the engine only through the gateway. frontend.py writes the server's phase, and this
module reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from aserve.errors import AserveError, ConfigError, ErrorInfo
from aserve.http.abort import ABORTS, Aborts
from aserve.http.access_log import log_access
from aserve.http.auth import IDENTITY, Access, read_keys
from aserve.http.batches import handlers as batches
from aserve.http.body import IGNORED
from aserve.http.connection import (
    Join,
    address_of,
    close_after_unsized,
    join_none,
    listen,
    reason_of,
)
from aserve.http.control import profile
from aserve.http.control.info import version
from aserve.http.control.loads import load_reporter
from aserve.http.cors import add_cors_headers, is_preflight, preflight_response
from aserve.http.decompress import broken_body
from aserve.http.errors import (
    ERROR_FORMATS,
    STARTED,
    RequestFailed,
    StartedAnswer,
    error_format_of,
    error_response,
    http_error_info,
    info_of,
    logged_bug,
)
from aserve.http.forwarding import forwarded
from aserve.http.hosts import HOSTS, AllowedHosts
from aserve.http.intake import INTAKE, Intake, check_size, meet_expectation
from aserve.http.openapi import DESCRIPTION, ApiDescription
from aserve.http.peers import PEERS
from aserve.http.responses import websocket
from aserve.http.route import Route, access_of, is_served
from aserve.http.routes import ROUTES
from aserve.http.state import REQUEST_ID, STARTED_AT, HttpContext
from aserve.http.streams import handlers as streams
from aserve.observability.loop_delay import LoopDelay

logger = logging.getLogger(__name__)

UNKNOWN_ROUTE = Access()
# By handler, because the HEAD route that aiohttp adds to each GET route has the same one.
ACCESS = web.AppKey("access", dict[Handler, Access])
CLOSE_TIMEOUT_S = 1.0  # for handlers that still run after the server was drained


class HttpServer:
    """The port and its connections. It starts before the model loads, so that /health answers."""

    def __init__(self, context: HttpContext) -> None:
        self._options = context.options
        self._app = create_app(context)
        self._runner = web.AppRunner(
            self._app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_TIMEOUT_S
        )
        self._listeners: list[asyncio.Server] = []
        self._delay = LoopDelay(context.registry)

    async def start(self, join: Join = join_none) -> str:
        """Opens the port and returns the server's URL. Port 0 takes a free one. `join` is awaited
        when the other frontends reach this one, and before clients do.
        """
        host, port = self._options.host, self._options.port
        await self._runner.setup()
        try:
            self._listeners = await listen(self._runner, self._options, self._app[PEERS], join=join)
        except OSError as error:
            await self.stop()
            where = self._options.uds or f"{host}:{port}"
            raise ConfigError(f"cannot listen on {where}: {reason_of(error)}") from error
        self._delay.start(asyncio.get_running_loop())
        return address_of(self._listeners[0], self._options)

    async def stop(self) -> None:
        """Closes the port and every connection. The caller has ended the open requests before."""
        self._delay.stop()
        for listener in self._listeners:
            listener.close()
        if self._listeners and self._options.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._options.uds)
        await self._runner.cleanup()
        self._app[INTAKE].close()


def create_app(context: HttpContext) -> web.Application:
    options = context.options
    routes = [forwarded(route, context) for route in ROUTES if is_served(route, options)]
    app = web.Application(client_max_size=options.max_body_size)
    app[PEERS] = context.peers
    log_access(app, context)
    app.middlewares.append(border(context))
    app[ERROR_FORMATS] = {(route.method, route.path): route.errors for route in routes}
    app[INTAKE] = Intake(context)
    app[ABORTS] = Aborts(context.gateway, context.calls)
    app[HOSTS] = AllowedHosts(options)
    app[DESCRIPTION] = ApiDescription(routes, options, version=version())
    for part in (websocket, streams, batches, profile):
        part.set_up(app, context)
    handlers = {handler_of(route, context): route for route in routes}
    app.add_routes([web.route(route.method, route.path, h) for h, route in handlers.items()])
    app[ACCESS] = {handler: access_of(route, options) for handler, route in handlers.items()}
    app.on_response_prepare.extend((_add_headers, load_reporter(context), close_after_unsized))
    return app


def handler_of(route: Route, context: HttpContext) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await route.handler(request, context)

    return handle


def border(context: HttpContext) -> Middleware:
    """Returns the middleware that gives every request an id and an answer. The answer to a bug
    shows only that id.
    """
    keys = read_keys(context.options)

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = context.peers.new_id()
        request[STARTED_AT] = time.monotonic()
        try:
            request.app[HOSTS].check_host(request)
            if is_preflight(request):
                return preflight_response(request)
            access = request.app[ACCESS].get(request.match_info.handler, UNKNOWN_ROUTE)
            request[IDENTITY] = keys.identify(request, access)
            check_size(request, context.options.max_body_size)
            await meet_expectation(request)
            return await handler(request)
        except (AserveError, RequestFailed) as error:
            return await answer_error(request, info_of(error))
        except web.HTTPException as error:
            where = f"{request.method} {request.path[:200]}"
            response = await answer_error(request, http_error_info(error, where=where))
            if hdrs.ALLOW in error.headers:
                response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
            return response
        except web.RequestPayloadError:
            return await answer_error(request, broken_body().info)
        except ConnectionError:
            logger.debug("client gone request=%s", request[REQUEST_ID])
            return web.Response(status=499)
        except Exception:
            return await answer_error(request, logged_bug(request, request[REQUEST_ID]))
        finally:
            # WHY: it refers back to the request, and the collector seldom looks for such cycles.
            request.pop(STARTED, None)

    return answer


async def answer_error(request: web.Request, info: ErrorInfo) -> web.StreamResponse:
    started: StartedAnswer | None = request.get(STARTED)
    if started is None:
        return error_response(info, error_format_of(request))
    await started.fail(info)
    return started.response


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the headers of every answer, also of errors."""
    response.headers["X-Request-Id"] = request.get(REQUEST_ID) or uuid.uuid4().hex
    response.headers[hdrs.SERVER] = "aserve"
    add_cors_headers(request, response)
    if ignored := request.get(IGNORED):
        response.headers["X-Ignored-Params"] = ignored
