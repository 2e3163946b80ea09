"""The administrator's updates of the weights: from a checkpoint, in SGLang's form, or of tensors.

New requests are refused while the requests that run end on the old weights, for at most `timeout`
seconds, or are aborted. Then the engine reads the weights and writes them between two steps, the
namespace of the prefix cache changes, and requests are accepted again. The answer is an error, and
nothing has changed, if requests still run after the timeout, or if the weights do not fit the
model. An update goes on when its client goes away, because its end must not be missed.

An update of tensors names a safetensors file. The engine reads the checkpoint with the tensors of
all such files in the place of its own, at each update and when it is started again, so the files
must stay where they are until an update from a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import TypeAlias

import msgspec
from aiohttp import web

from aserve.errors import InvalidRequest
from aserve.http.control.pause import PauseBody, pause_all
from aserve.http.delivery import json_response
from aserve.http.errors import RequestFailed, refused
from aserve.http.openai.checks import check_unsupported
from aserve.http.openai.limits import check_range
from aserve.http.route import Route, get, post
from aserve.http.state import HttpContext
from aserve.messages.changes import LoadWeights

MAX_VERSION_CHARS = 128
MAX_FILES = 256  # of tensors that replace those of one checkpoint
NEUTRAL: dict[str, tuple[object, ...]] = {
    "load_format": ("auto", "safetensors"),
    "flush_cache": (True,),
    "is_async": (False,),
}
# Ways of SGLang and vLLM to move weights, and what to use instead.
FILES = "write a safetensors file, in /dev/shm for example, and use /update_weights_from_tensor."
WHOLE = "each update is whole or not at all; send 'keep_pause' with all but the last of several."
ELSEWHERE = {
    "/begin_weight_update": WHOLE,
    "/end_weight_update": WHOLE,
    "/start_weight_update": WHOLE,
    "/finish_weight_update": WHOLE,
    "/init_weight_transfer_engine": FILES,
    "/update_weights": FILES,
    "/update_weights_from_distributed": FILES,
    "/update_weights_from_ipc": FILES,
    "/init_weights_update_group": FILES,
    "/destroy_weights_update_group": FILES,
    "/get_weights_by_name": "weights are packed for the device; a receipt has the hash of the "
    "checkpoint that they came from.",
}

MakeLoad: TypeAlias = Callable[[int, LoadWeights | None], LoadWeights]

logger = logging.getLogger(__name__)


class UpdateBody(msgspec.Struct, kw_only=True):
    """`timeout` is in seconds, for the requests that run. With `keep_pause` the server stays paused
    until /continue_generation. The fields from `load_format` on are SGLang's, and have one possible
    value each.
    """

    weight_version: str | None = None
    abort_all_requests: bool | None = None
    keep_pause: bool | None = None
    timeout: float = 60.0
    load_format: str | None = None
    flush_cache: bool | None = None
    is_async: bool | None = None
    torch_empty_cache: bool | None = None
    recapture_cuda_graph: bool | None = None


class UpdateFromDiskBody(UpdateBody, kw_only=True):
    """`model_path` is a directory on the server."""

    model_path: str


class UpdateFromTensorBody(UpdateBody, kw_only=True):
    """`path` is a safetensors file on the server. It has some tensors of the checkpoint, under the
    same names. SGLang's pickled `serialized_named_tensors` are never read.
    """

    path: str


class VersionBody(msgspec.Struct, kw_only=True):
    new_version: str
    abort_all_requests: bool | None = None


class UpdateAnswer(msgspec.Struct):
    success: bool
    message: str
    new_version: str
    num_paused_requests: int = 0


async def update_from_disk(
    request: web.Request, context: HttpContext, body: UpdateFromDiskBody
) -> web.Response:
    await _check_path(body.model_path, param="model_path")

    def make_load(number: int, _: LoadWeights | None) -> LoadWeights:
        return LoadWeights(number, body.model_path)

    return await _updated(request, context, body, make_load)


async def update_from_tensor(
    request: web.Request, context: HttpContext, body: UpdateFromTensorBody
) -> web.Response:
    await _check_path(body.path, param="path")

    def make_load(number: int, last: LoadWeights | None) -> LoadWeights:
        base, earlier = ("", ()) if last is None else (last.path, last.tensors)
        others = tuple(path for path in earlier if path != body.path)
        if len(others) >= MAX_FILES:
            raise refused(
                400, f"{MAX_FILES} files of tensors are in use: update from a checkpoint instead."
            )
        return LoadWeights(number, base, (*others, body.path))

    return await _updated(request, context, body, make_load)


async def _updated(
    request: web.Request, context: HttpContext, body: UpdateBody, make_load: MakeLoad
) -> web.Response:
    check_unsupported(body, NEUTRAL)
    check_range(body.timeout, "timeout")
    state = context.state
    if state.phase != "ready" or state.is_asleep:
        refusal = state.refusal()
        assert refusal is not None
        raise refusal
    version = _checked(body.weight_version or "default")
    state.check_not_updating()
    load = make_load(state.next_job(), state.weights)
    state.is_updating = True  # before the other frontends are told, by whatever message
    await state.carry_out(_update(request, context, body, load, version))
    return json_response(UpdateAnswer(True, "Succeeded to update model weights.", version))


async def _update(
    request: web.Request, context: HttpContext, body: UpdateBody, load: LoadWeights, version: str
) -> None:
    """Raises if the weights are still the old ones."""
    state = context.state
    try:
        mode = PauseBody(
            mode="abort" if body.abort_all_requests else "wait",
            timeout=body.timeout,
            until_updated=True,
        )
        if num_running := await pause_all(request, context, mode):
            raise refused(
                400,
                f"{num_running} requests still ran after {body.timeout:g} s. The weights are the "
                "old ones: send 'abort_all_requests', or a longer 'timeout'.",
            )
        error = await context.loras.run_on_device(load)
        if error is not None:
            raise RequestFailed(error)
        state.weights, state.weight_version = load, version
        state.flush_cache()
        state.is_paused |= bool(body.keep_pause)
        path, tensors = load.path, load.tensors[-1:]
        logger.info("weights updated path=%s tensors=%s version=%s", path, tensors, version)
    finally:
        state.is_updating = False
        state.share()


async def name_version(_: web.Request, context: HttpContext, body: VersionBody) -> web.Response:
    context.state.weight_version = _checked(body.new_version)
    context.state.share()
    return json_response(
        UpdateAnswer(True, "The weight version is updated.", context.state.weight_version)
    )


async def read_version(_: web.Request, context: HttpContext) -> web.Response:
    return json_response({"weight_version": context.state.weight_version})


async def _check_path(path: str, *, param: str) -> None:
    """Raises before any request has to end for an update that cannot be."""
    if not await asyncio.to_thread(os.path.exists, path):
        raise InvalidRequest(
            f"Invalid '{param}': {path[:500]!r} does not exist on the server.",
            param=param,
            code="invalid_value",
        )


def _checked(version: str) -> str:
    if len(version) > MAX_VERSION_CHARS:
        raise refused(400, f"A weight version has at most {MAX_VERSION_CHARS} characters.")
    return version


async def refuse(request: web.Request, _: HttpContext) -> web.Response:
    raise refused(400, f"{request.path} is not supported: {ELSEWHERE[request.path]}")


ROUTES: tuple[Route, ...] = (
    *(Route("POST", path, refuse, admin=True) for path in ELSEWHERE),
    get("/get_weights_by_name", refuse, admin=True),
    post("/update_weights_from_disk", UpdateFromDiskBody, update_from_disk, admin=True),
    post("/update_weights_from_tensor", UpdateFromTensorBody, update_from_tensor, admin=True),
    post("/update_weight_version", VersionBody, name_version, admin=True),
    get("/get_weight_version", read_version),
    get("/weight_version", read_version),
    get("/weight_info", read_version),
)
