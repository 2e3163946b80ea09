"""The administrator's pause, and the flush of the prefix cache.

On a server with several frontends each of them pauses, and the answer is about all of them.

Flushing the prefix cache changes the namespace of all later requests, so that none of them finds a
page of an earlier one. The old pages are evicted when their room is needed. WHY: so the engine need
not be idle, and no message to it has to be awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

import msgspec
from aiohttp import web

from aserve.http.abort import ABORTS
from aserve.http.all_frontends import tell_all
from aserve.http.auth import IDENTITY
from aserve.http.body import parse_query
from aserve.http.delivery import json_response
from aserve.http.errors import refused
from aserve.http.openai.limits import check_range
from aserve.http.route import Route, get, post
from aserve.http.state import HttpContext

PAUSE = "/pause_generation"


class PauseBody(msgspec.Struct, kw_only=True):
    """`abort` ends the running requests; `wait` waits for them, at most `timeout` seconds. With
    `until_updated` the pause is one of an update of the weights, which ends with it.
    """

    mode: Literal["abort", "wait"] = "abort"
    timeout: float = 60.0
    until_updated: bool = False


class PauseAnswer(msgspec.Struct):
    is_paused: bool
    num_running: int  # requests


async def pause(request: web.Request, context: HttpContext, body: PauseBody) -> web.Response:
    """Refuses new requests until /continue_generation."""
    check_range(body.timeout, "timeout")
    if context.peers.is_forwarded(request):
        return json_response(await _pause(request, context, body))
    if body.until_updated:
        raise refused(400, "Only an update of the weights pauses the frontends until it is done.")
    return json_response(PauseAnswer(True, await pause_all(request, context, body)))


async def pause_by_query(request: web.Request, context: HttpContext) -> web.Response:
    """The same with vLLM's name and parameters."""
    return await pause(request, context, parse_query(request, PauseBody))


async def pause_all(request: web.Request, context: HttpContext, body: PauseBody) -> int:
    """Pauses every frontend, and returns the number of requests that still run."""
    if not context.peers.are_several:
        return (await _pause(request, context, body)).num_running
    wait_s = body.timeout if body.mode == "wait" else 0
    order = msgspec.json.encode(body)
    answer = await tell_all(request, context.peers, PAUSE, order, wait_s=wait_s)
    if "num_running" not in answer:
        raise refused(400, f"A frontend could not be paused: {answer}")
    num_running: int = answer["num_running"]
    return num_running


async def _pause(request: web.Request, context: HttpContext, body: PauseBody) -> PauseAnswer:
    if body.until_updated:
        context.state.is_updating = True
    else:
        _set_paused(context, is_paused=True)
    gateway = context.gateway
    if body.mode == "abort":
        request.app[ABORTS].abort(request[IDENTITY], None, "The server was paused.")
    else:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(body.timeout):
                await gateway.drained()
    return PauseAnswer(is_paused=True, num_running=gateway.num_open)


async def resume(request: web.Request, context: HttpContext) -> web.Response:
    _set_paused(context, is_paused=False)
    return await read_pause(request, context)


def _set_paused(context: HttpContext, *, is_paused: bool) -> None:
    """The first frontend tells the others as well. WHY: what it shared last, such as a flush, may
    reach them behind their own pause, and has the state from before it.
    """
    context.state.is_paused = is_paused
    context.state.share()


async def read_pause(_: web.Request, context: HttpContext) -> web.Response:
    return json_response(PauseAnswer(context.state.is_held, context.gateway.num_open))


async def flush_cache(_: web.Request, context: HttpContext) -> web.Response:
    context.state.flush_cache()
    return json_response({"success": True, "message": "The prefix cache is flushed."})


ROUTES = (
    get("/flush_cache", flush_cache, admin=True),
    Route("POST", "/flush_cache", flush_cache, admin=True),
    Route("POST", "/reset_prefix_cache", flush_cache, admin=True),
    post(PAUSE, PauseBody, pause, admin=True),
    Route("POST", "/continue_generation", resume, admin=True),
    Route("POST", "/pause", pause_by_query, admin=True),
    Route("POST", "/resume", resume, admin=True),
    get("/is_paused", read_pause, admin=True),
)
