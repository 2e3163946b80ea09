"""Makes the errors that clients get if their replica fails or refuses them, or the router ends."""

from __future__ import annotations

import re

import aiohttp
import msgspec
from aiohttp import hdrs, web
from multidict import MultiMapping

from aserve.errors import ErrorInfo, ShuttingDown
from aserve.http.anthropic.messages import anthropic_error
from aserve.http.errors import error_body
from aserve.router.replica_connection import Answer, media_type

RETRY_AFTER_S = 2.0
EVENT_STREAM = "text/event-stream"
# The last event of a stream of each API.
LAST_EVENT = re.compile(
    rb'data: \[DONE\]|"type": ?"(message_stop|error|response\.(completed|incomplete|failed))"'
)
BROKEN = ErrorInfo(
    "The replica ended within its answer.", type="server_error", code="replica_failed", status=502
)
UNKNOWN = ErrorInfo(
    "No replica knows this id.", type="invalid_request_error", code="not_found", status=404
)


class RouterEnds(ShuttingDown):
    """The router takes no request any more, or ends those that are open."""

    def __init__(self) -> None:
        super().__init__("The router shuts down.", retry_after_s=5)


def last_events(path: str, answer: Answer, sent: bytes, info: ErrorInfo) -> bytes | None:
    """Returns the events that end a stream by an error: none behind its replica's last one. Returns
    None for an answer that is no event stream, or that was cut within an event.
    """
    if media_type(answer.headers) != EVENT_STREAM or hdrs.CONTENT_ENCODING in answer.headers:
        return None
    if not sent.endswith(b"\n\n"):
        return None
    if LAST_EVENT.search(sent[:-2].rpartition(b"\n\n")[2]):
        return b""
    if path.startswith("/v1/messages"):
        return b"event: error\ndata: %b\n\n" % anthropic_error(info)
    if path.startswith("/v1/responses"):
        return b"event: error\ndata: %b\n\n" % _responses_error(info)
    return b"data: %b\n\ndata: [DONE]\n\n" % error_body(info)


def _responses_error(info: ErrorInfo) -> bytes:
    """OpenAI's error event of /v1/responses."""
    event = {"type": "error", "code": info.code, "message": info.message}
    return msgspec.json.encode({**event, "param": None, "sequence_number": 0})


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
