"""The events that end a stream whose server process has failed, or ends, within it."""

from __future__ import annotations

import re

import msgspec
from aiohttp import hdrs
from multidict import MultiMapping

from aserve.errors import ErrorInfo
from aserve.http.anthropic.messages import anthropic_error
from aserve.http.errors import error_body

EVENT_STREAM = "text/event-stream"
# The last event of a stream of each API.
LAST_EVENT = re.compile(
    rb'data: \[DONE\]|"type": ?"(message_stop|error|response\.(completed|incomplete|failed))"'
)


def last_events(
    path: str, headers: MultiMapping[str], sent: bytes, info: ErrorInfo
) -> bytes | None:
    """Returns the events that end an answer with these headers by an error: none behind its last
    one. Returns None for an answer that is no event stream, or that was cut within an event. `sent`
    is the piece of it that was sent last.
    """
    if media_type(headers) != EVENT_STREAM or hdrs.CONTENT_ENCODING in headers:
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


def media_type(headers: MultiMapping[str]) -> str:
    return headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()


def _responses_error(info: ErrorInfo) -> bytes:
    """OpenAI's error event of /v1/responses."""
    event = {"type": "error", "code": info.code, "message": info.message}
    return msgspec.json.encode({**event, "param": None, "sequence_number": 0})
