"""Makes the errors that clients get if their replica fails or refuses them, or the router ends."""

from __future__ import annotations

import aiohttp
from aiohttp import hdrs, web
from multidict import MultiMapping

from aserve.errors import ErrorInfo, ShuttingDown
from aserve.router.replica_connection import Answer

RETRY_AFTER_S = 2.0
BROKEN = ErrorInfo(
    "The replica ended within its answer.", type="server_error", code="replica_failed", status=502
)
UNKNOWN = ErrorInfo(
    "No replica knows this id.", type="invalid_request_error", code="not_found", status=404
)


class NotAnswered(Exception):
    """A replica has failed before the first byte of its answer. `was_open` says that it closed the
    connection, which it may have done while the request was on its way: it is asked once more if
    there is no other replica.
    """

    def __init__(self, info: ErrorInfo, *, may_repeat: bool = True, was_open: bool = False) -> None:
        super().__init__(info.message)
        self.info = info
        self.may_repeat = may_repeat
        self.was_open = was_open


class RouterEnds(ShuttingDown):
    """The router takes no request any more, or ends those that are open."""

    def __init__(self) -> None:
        super().__init__("The router shuts down.", retry_after_s=5)


def refused_upgrade(error: aiohttp.WSServerHandshakeError) -> ErrorInfo:
    """Returns the error of a replica that does not open a websocket. One that has not even refused
    it has sent what is no answer to an upgrade.
    """
    is_refusal = error.status >= web.HTTPBadRequest.status_code
    return ErrorInfo(
        f"The replica has answered {error.status} instead of opening a websocket.",
        type="invalid_request_error" if is_refusal else "server_error",
        code="websocket_refused",
        status=error.status if is_refusal else web.HTTPBadGateway.status_code,
        retry_after_s=None if error.headers is None else _waiting_time(error.headers),
    )


async def refused_by(answer: Answer) -> ErrorInfo:
    """Returns an error with the text and the waiting time of a replica that is not ready."""
    waiting_s = _waiting_time(answer.headers)
    text = (await answer.read(1024)).decode("utf-8", "replace")
    return ErrorInfo(
        f"No other replica is ready; the last one said: {text}",
        type="overloaded_error",
        code="replica_not_ready",
        status=answer.status,
        retry_after_s=RETRY_AFTER_S if waiting_s is None else waiting_s,
    )


def _waiting_time(headers: MultiMapping[str]) -> float | None:
    """Returns the seconds of Retry-After, None if it has none: it may also be a date."""
    text = headers.get(hdrs.RETRY_AFTER, "")
    return float(text) if text.isdigit() else None
