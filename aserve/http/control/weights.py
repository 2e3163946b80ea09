"""The administrator's update of weights from disk, in SGLang's form.

New requests are refused while the requests that run end on the old weights, for at most `timeout`
seconds, or are aborted. Then the engine reads the checkpoint and writes it between two steps, the
namespace of the prefix cache changes, and requests are accepted again. The answer is an error, and
nothing has changed, if requests still run after the timeout, or if the checkpoint does not fit the
model. An update goes on when its client goes away, because its end must not be missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from aserve.http.abort import ABORTS
from aserve.http.auth import IDENTITY
from aserve.http.delivery import json_response
from aserve.http.errors import RequestFailed, refused
from aserve.http.openai.checks import check_unsupported
from aserve.http.openai.limits import check_range
from aserve.http.route import Route, get, post
from aserve.http.state import HttpContext
from aserve.messages.requests import LoadWeights
from aserve.request_stream import Gateway

MAX_VERSION_CHARS = 128
NEUTRAL: dict[str, tuple[object, ...]] = {
    "load_format": ("auto", "safetensors"),
    "flush_cache": (True,),
    "is_async": (False,),
}

logger = logging.getLogger(__name__)


class UpdateWeightsBody(msgspec.Struct, kw_only=True):
    """`model_path` is a directory on the server. `timeout` is in seconds, for the requests that
    run. With `keep_pause` the server stays paused until /continue_generation. The fields from
    `load_format` on are SGLang's, and have one possible value each.
    """

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    keep_pause: bool | None = None
    timeout: float = 60.0
    load_format: str | None = None
    flush_cache: bool | None = None
    is_async: bool | None = None
    torch_empty_cache: bool | None = None
    recapture_cuda_graph: bool | None = None


class VersionBody(msgspec.Struct, kw_only=True):
    new_version: str
    abort_all_requests: bool | None = None


class UpdateAnswer(msgspec.Struct):
    success: bool
    message: str
    new_version: str
    num_paused_requests: int = 0


async def _update(
    context: HttpContext, body: UpdateWeightsBody, version: str, abort: Callable[[], object]
) -> None:
    """Raises if the weights are still the old ones. `abort` ends the requests that run."""
    state = context.state
    was_paused, state.is_paused = state.is_paused, True
    try:
        if body.abort_all_requests:
            abort()
        await _drained(context.gateway, body.timeout)
        state.num_updates += 1
        load = LoadWeights(state.num_updates, body.model_path)
        error = await context.loras.load_on_device(load)
        if error is not None:
            raise RequestFailed(error)
        state.flush_cache()
        state.weight_version = version
        if context.receipts is not None:
            context.receipts.use(Path(body.model_path))
        was_paused = was_paused or bool(body.keep_pause)
        logger.info("weights updated path=%s version=%s", body.model_path, version)
    finally:
        state.is_paused = was_paused
        state.update = None


async def _drained(gateway: Gateway, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await gateway.drained()
    except TimeoutError:
        raise refused(
            400,
            f"{gateway.num_open} requests still ran after {timeout_s:g} s. The weights are the old "
            "ones: send 'abort_all_requests', or a longer 'timeout'.",
        ) from None


async def update_from_disk(
    request: web.Request, context: HttpContext, body: UpdateWeightsBody
) -> web.Response:
    check_unsupported(body, NEUTRAL)
    check_range(body.timeout, "timeout")
    if context.state.phase != "ready":
        refusal = context.state.refusal()
        assert refusal is not None
        raise refusal
    version = _checked(body.weight_version or "default")
    if context.peers.are_several:
        raise refused(400, "The weights cannot be updated on a server with several frontends.")
    if context.state.update is not None:
        raise refused(400, "Another update of the weights is running.")
    aborts, identity = request.app[ABORTS], request[IDENTITY]
    abort = partial(aborts.abort, identity, None, "The weights of the model are replaced.")
    update = asyncio.ensure_future(_update(context, body, version, abort))
    context.state.update = update
    await asyncio.shield(update)
    return json_response(UpdateAnswer(True, "Succeeded to update model weights.", version))


async def name_version(_: web.Request, context: HttpContext, body: VersionBody) -> web.Response:
    context.state.weight_version = _checked(body.new_version)
    return json_response(
        UpdateAnswer(True, "The weight version is updated.", context.state.weight_version)
    )


async def read_version(_: web.Request, context: HttpContext) -> web.Response:
    return json_response({"weight_version": context.state.weight_version})


def _checked(version: str) -> str:
    if len(version) > MAX_VERSION_CHARS:
        raise refused(400, f"A weight version has at most {MAX_VERSION_CHARS} characters.")
    return version


ROUTES: tuple[Route, ...] = (
    post("/update_weights_from_disk", UpdateWeightsBody, update_from_disk, admin=True),
    post("/update_weight_version", VersionBody, name_version, admin=True),
    get("/get_weight_version", read_version),
    get("/weight_version", read_version),
)
