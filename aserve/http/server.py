"""The HTTP server: routes, the error border, and the port.

Must not know tokens or the scheduler; a request enters the engine through the gateway alone. The
server's phase is read here and written by app.py.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from pathlib import Path

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from aserve.errors import AserveError, BugError, ConfigError, ErrorInfo
from aserve.http.auth import check_key
from aserve.http.body import read_body
from aserve.http.errors import (
    RequestFailed,
    error_response,
    http_error_info,
    info_of,
    refused,
)
from aserve.http.health import health_response, metrics_response
from aserve.http.openai.call import Origin
from aserve.http.openai.chat import ChatDialect, chat_call
from aserve.http.openai.completions import CompletionDialect, completion_call
from aserve.http.openai.models import model_list
from aserve.http.openai.respond import STREAM, respond
from aserve.http.openai.schema import ChatBody, CompletionBody
from aserve.http.sse import SseWriter
from aserve.http.state import HttpContext

logger = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
CLOSE_TIMEOUT_S = 1.0  # for what still runs when the caller has drained the server


class HttpServer:
    """Bound first, so that /health answers while the model loads."""

    def __init__(self, context: HttpContext) -> None:
        self._options = context.options
        self._runner = web.AppRunner(
            create_app(context),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_TIMEOUT_S,
        )

    async def start(self) -> str:
        """The address that it answers at; port 0 takes a free one."""
        host, port = self._options.host, self._options.port
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"cannot listen on {host}:{port}: {reason_of(error)}") from error
        bound = self._runner.addresses[0]
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        return f"http://{shown}:{bound[1]}"

    async def stop(self) -> None:
        """Closes the port and every connection; the caller has ended the open requests."""
        await self._runner.cleanup()


def reason_of(error: OSError) -> str:
    """WHY: the loop puts a sentence of its own around the system's, but keeps the number, which is
    negative where a name was not found.
    """
    number = error.errno or 0
    return os.strerror(number).lower() if number > 0 else error.strerror or str(error)


def create_app(context: HttpContext) -> web.Application:
    app = web.Application(
        middlewares=[border(context)], client_max_size=context.options.max_body_size
    )
    page = (Path(__file__).parent / "static" / "index.html").read_bytes()

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await read_body(request, CompletionBody)
        call = completion_call(body, origin_of(request, context))
        return await respond(request, context, CompletionDialect(call))

    async def chat_completions(request: web.Request) -> web.StreamResponse:
        body = await read_body(request, ChatBody)
        call = chat_call(body, origin_of(request, context))
        return await respond(request, context, ChatDialect(call))

    async def models(_: web.Request) -> web.Response:
        return web.Response(body=model_list(context), content_type="application/json")

    async def health(_: web.Request) -> web.Response:
        return health_response(context.state)

    async def metrics(_: web.Request) -> web.Response:
        return metrics_response(context.registry)

    async def index(_: web.Request) -> web.Response:
        return web.Response(body=page, content_type="text/html", charset="utf-8")

    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/", index)
    app.on_response_prepare.append(_name_request)
    return app


def origin_of(request: web.Request, context: HttpContext) -> Origin:
    return Origin(
        request_id=request[REQUEST_ID],
        created=int(time.time()),
        model_names=context.model_names,
        draw_seed=context.draw_seed,
    )


def border(context: HttpContext) -> Middleware:
    """Every request gets an id and an answer; a bug shows nothing of itself but that id."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = uuid.uuid4().hex
        try:
            check_key(request, context.options.api_key)
            check_size(request, context.options.max_body_size)
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
            broken = refused(400, "The request body ended early or is not encoded as it says.")
            return error_response(broken.info)
        except ConnectionError:
            logger.debug("client gone request=%s", request[REQUEST_ID])
            return web.Response(status=499)
        except Exception:
            logger.exception("request failed request=%s path=%s", request[REQUEST_ID], request.path)
            bug = BugError(f"internal error; the request id is {request[REQUEST_ID]}")
            return await answer_error(request, bug.info())

    return answer


def check_size(request: web.Request, max_body_size: int) -> None:
    """Refused by its header before anything is read; a body without one is counted by aiohttp."""
    size = request.content_length
    if size is not None and size > max_body_size:
        raise refused(413, f"The request body has {size} bytes, more than {max_body_size}.")


async def answer_error(request: web.Request, info: ErrorInfo) -> web.StreamResponse:
    stream: SseWriter | None = request.get(STREAM)
    if stream is None:
        return error_response(info)
    await stream.fail(info)
    return stream.response


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    """Also on errors, so that a client can say which answer it means.

    A request that aiohttp refuses for its headers never came to the border, which names the rest.
    """
    response.headers["X-Request-Id"] = request.get(REQUEST_ID) or uuid.uuid4().hex
    response.headers[hdrs.SERVER] = "aserve"
