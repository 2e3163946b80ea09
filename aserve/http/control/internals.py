"""The administrator's changes of a running server under SGLang's names: its settings, its collector
of garbage, and the spans that it exports.

On a server with several frontends, each of them does what concerns its own process.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from aserve.host.memory import freeze_collector
from aserve.http.body import parse_query
from aserve.http.delivery import json_response
from aserve.http.errors import refused
from aserve.http.live_settings import Settings, SettingsBody
from aserve.http.route import Route, get, post
from aserve.http.state import HttpContext

# SGLang's names of settings.
NAMES = {
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_queued_requests": "max_queue",
}


class ServerArgs(SettingsBody, kw_only=True, forbid_unknown_fields=True):
    """The settings under their own names, and two of them under SGLang's as well."""

    chunked_prefill_size: int | UnsetType = UNSET
    max_queued_requests: int | UnsetType = UNSET


class InternalStateBody(msgspec.Struct, kw_only=True):
    server_args: ServerArgs


class InternalState(msgspec.Struct):
    """`server_args` are all settings, as they are now."""

    updated: bool
    server_args: Settings


class CollectorAnswer(msgspec.Struct):
    success: bool
    message: str
    num_frozen: int  # objects that collections skip


class TraceQuery(msgspec.Struct, kw_only=True):
    """0 exports no spans, 1 those of requests, and 2 and 3 also those of their phases."""

    level: Literal[0, 1, 2, 3]


class TraceAnswer(msgspec.Struct):
    success: bool
    message: str


async def set_internal_state(
    _: web.Request, context: HttpContext, body: InternalStateBody
) -> web.Response:
    """Changes settings, all of them or none. Other options of a running server cannot change."""
    given = msgspec.structs.asdict(body.server_args)
    for theirs, ours in NAMES.items():
        value = given.pop(theirs)
        given[ours] = given[ours] if value is UNSET else value
    now = context.state.settings.change(SettingsBody(**given))
    return json_response(InternalState(True, now))


async def freeze_gc(_: web.Request, __: HttpContext) -> web.Response:
    """Lets later collections of garbage skip what lives now, as after the server's start."""
    message = "Collections skip the objects that live now."
    return json_response(CollectorAnswer(True, message, freeze_collector()))


async def set_trace_level(request: web.Request, context: HttpContext) -> web.Response:
    """Says which spans of requests are exported from now on."""
    level = parse_query(request, TraceQuery).level
    if context.latency.on_end is None:
        raise refused(
            400, "This server exports no spans: start it with --otlp-traces-endpoint URL."
        )
    context.latency.trace_level = level
    return json_response(TraceAnswer(True, f"The trace level is {level}."))


ROUTES: tuple[Route, ...] = (
    post("/set_internal_state", InternalStateBody, set_internal_state, admin=True),
    get("/freeze_gc", freeze_gc, admin=True),
    Route("POST", "/freeze_gc", freeze_gc, admin=True),
    get("/set_trace_level", set_trace_level, admin=True),
    Route("POST", "/set_trace_level", set_trace_level, admin=True),
)
