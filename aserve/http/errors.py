"""Converts errors to the error bodies of the endpoint's API, also after the answer has begun.

Once the status line is sent, a failure must be reported within the answer. The handler that begins
the answer registers a StartedAnswer for this, and the border middleware calls it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from aserve.errors import AserveError, BugError, ErrorInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedAnswer:
    """An answer whose status line is sent. `fail` sends the error and ends the answer."""

    response: web.StreamResponse
    fail: Callable[[ErrorInfo], Awaitable[None]]


STARTED = web.RequestKey("started", StartedAnswer)

# Renders an error in the JSON of one API.
ErrorFormat: TypeAlias = Callable[[ErrorInfo], bytes]
# by method and path of the route
ERROR_FORMATS = web.AppKey("error_formats", dict[tuple[str, str], ErrorFormat])
# A handler sets this if the body decides to which API its request belongs.
ERROR_FORMAT: web.RequestKey[ErrorFormat] = web.RequestKey("error_format")


# Failures that a retry would repeat. OpenAI's clients retry 408 and 5xx unless told not to.
NO_RETRY_STATUSES = frozenset({408, 500})

CODES = {
    400: "bad_request",
    403: "forbidden",
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    410: "events_gone",
    413: "request_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
    426: "upgrade_required",
    431: "headers_too_large",
}


class RequestFailed(Exception):
    """Carries the error of one request up to the border middleware."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class ErrorFields(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str
    queue_position: int | UnsetType = UNSET
    expected_wait_ms: int | UnsetType | None = UNSET


class ErrorBody(msgspec.Struct):
    error: ErrorFields


def error_body(info: ErrorInfo) -> bytes:
    return msgspec.json.encode(ErrorBody(error_fields(info)))


def error_fields(info: ErrorInfo) -> ErrorFields:
    fields = ErrorFields(info.message, info.type, info.param, info.code)
    if info.wait is not None:
        fields.queue_position = info.wait.queue_position
        fields.expected_wait_ms = info.wait.expected_wait_ms
    return fields


def error_format_of(request: web.Request) -> ErrorFormat:
    """Returns the error format of the matched route, or OpenAI's for a URL without a route."""
    chosen = request.get(ERROR_FORMAT)
    route = request.match_info.route
    path = "" if route.resource is None else route.resource.canonical
    return chosen or request.app[ERROR_FORMATS].get((route.method, path), error_body)


def error_response(info: ErrorInfo, render: ErrorFormat | None = None) -> web.Response:
    """`render` is the error format; the default is OpenAI's."""
    headers = {}
    if info.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(info.retry_after_s))
        headers["Retry-After-Ms"] = str(math.ceil(1000 * info.retry_after_s))
    if info.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if info.status in NO_RETRY_STATUSES:
        headers["X-Should-Retry"] = "false"
    return web.Response(
        body=(render or error_body)(info),
        status=info.status,
        content_type="application/json",
        headers=headers,
    )


def refused(status: int, message: str) -> RequestFailed:
    return RequestFailed(ErrorInfo(message, "invalid_request_error", CODES[status], status))


def info_of(error: AserveError | RequestFailed) -> ErrorInfo:
    return error.info if isinstance(error, RequestFailed) else error.info()


def logged_bug(request: web.Request, request_id: str) -> ErrorInfo:
    """Logs the exception that is being handled. The error that it returns shows only the id."""
    logger.exception("request failed request=%s path=%s", request_id, request.path)
    return BugError(f"internal error; the request id is {request_id}").info()


def http_error_info(error: web.HTTPException, *, where: str) -> ErrorInfo:
    """Converts the errors that aiohttp raises: unknown routes, wrong methods, large bodies."""
    message = {
        404: f"Unknown request URL: {where}. Please check the URL for typos.",
        405: f"Method not allowed for this URL: {where}.",
        413: f"The request body is too large: {error.text}",
    }.get(error.status, error.reason)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return ErrorInfo(message, kind, CODES.get(error.status, "http_error"), error.status)
