"""The administrator's endpoints for sleep: the process of the engine ends, which frees all memory
of the device, and a later call starts it again.

A running request is not lost: its tokens are in the journal of the frontend, so it goes on where it
stopped, as after the death of an engine. Requests that come meanwhile are refused. Wake-up takes as
long as a start of the engine: it reads the weights, and loads the adapters.

With --sleep-idle-seconds an idle engine naps. A nap ends with the next request, and these endpoints
see it as any other sleep. A sleep or a wake-up goes on when its client goes away.
"""

from __future__ import annotations

import logging
from typing import Literal

import msgspec
from aiohttp import web

from aserve.http.body import parse_query, read_body
from aserve.http.delivery import json_response
from aserve.http.errors import RequestFailed, refused
from aserve.http.route import Route, get
from aserve.http.state import HttpContext
from aserve.messages.changes import Sleep, Wake

logger = logging.getLogger(__name__)

PARTS = frozenset({"weights", "kv_cache", "cuda_graph"})


class SleepQuery(msgspec.Struct, kw_only=True):
    """vLLM's parameters. Both levels free everything, and requests are kept."""

    level: Literal[1, 2] = 1
    mode: Literal["keep"] = "keep"


class MemoryBody(msgspec.Struct, kw_only=True):
    """SGLang's parameters: the memory that is freed, which is all of it."""

    tags: list[str] | None = None


class SleepAnswer(msgspec.Struct):
    is_sleeping: bool
    num_running: int  # requests, which go on after the wake-up


async def sleep(request: web.Request, context: HttpContext) -> web.Response:
    parse_query(request, SleepQuery)
    return await _set_asleep(context, is_asleep=True)


async def release_memory(request: web.Request, context: HttpContext) -> web.Response:
    await _check_tags(request)
    return await _set_asleep(context, is_asleep=True)


async def wake(request: web.Request, context: HttpContext) -> web.Response:
    """Returns when the engine is ready."""
    await _check_tags(request)
    return await _set_asleep(context, is_asleep=False)


async def read_sleep(_: web.Request, context: HttpContext) -> web.Response:
    is_sleeping = context.state.is_asleep or context.state.watch.is_asleep
    return json_response(SleepAnswer(is_sleeping, context.gateway.num_open))


async def _set_asleep(context: HttpContext, *, is_asleep: bool) -> web.Response:
    state, num_nodes = context.state, context.settings.get("nnodes", 1)
    if is_asleep and num_nodes != 1:
        raise refused(400, f"An engine on {num_nodes} nodes cannot sleep: the others would end.")
    if state.phase != "ready":
        refusal = state.refusal()
        assert refusal is not None
        raise refusal
    state.check_not_updating()
    await state.carry_out(_change(context, is_asleep=is_asleep))
    return json_response(SleepAnswer(is_asleep, context.gateway.num_open))


async def _change(context: HttpContext, *, is_asleep: bool) -> None:
    """Refuses new requests from the beginning of the sleep to the end of the wake-up. Those of a
    nap wait for the engine.
    """
    state = context.state
    async with state.sleep_turn:
        becomes, state.is_asleep = state.is_asleep, is_asleep or state.is_asleep
        state.share()
        try:
            error = await context.loras.run_on_device(Sleep() if is_asleep else Wake())
            if error is not None:
                raise RequestFailed(error)
            becomes = is_asleep
        finally:
            state.is_asleep = becomes
            state.share()
    logger.info("engine asleep=%s open_requests=%s", is_asleep, context.gateway.num_open)


async def _check_tags(request: web.Request) -> None:
    body = await read_body(request, MemoryBody) if request.can_read_body else MemoryBody()
    tags = {*(body.tags or ()), *request.query.getall("tags", ())}
    if tags and not {"weights", "kv_cache"} <= tags <= PARTS:
        raise refused(400, "Invalid 'tags': the memory of an engine is freed as a whole.")


ROUTES = (
    Route("POST", "/sleep", sleep, admin=True),
    Route("POST", "/wake_up", wake, admin=True),
    get("/is_sleeping", read_sleep, admin=True),
    Route("POST", "/release_memory_occupation", release_memory, MemoryBody, admin=True),
    Route("POST", "/resume_memory_occupation", wake, MemoryBody, admin=True),
)
