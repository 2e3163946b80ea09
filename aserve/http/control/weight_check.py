"""POST /weights_checker, in SGLang's form: whether the weights are what the administrator expects.

`snapshot` and `compare` are about the values on the device: an update that wrote other values, or
memory that was damaged, is found. `checksum` is about the files that the weights came from, and has
the hash of the checkpoint that receipts have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from aserve.errors import ConfigError
from aserve.http.delivery import json_response
from aserve.http.errors import RequestFailed, refused
from aserve.http.openai.checks import unsupported
from aserve.http.route import post
from aserve.http.state import HttpContext
from aserve.messages.changes import CheckWeights

NO_RESET = (
    "Weights are never made up on a server that serves. To see that an update arrives, send "
    "'snapshot', update the weights, and expect an error of 'compare'."
)
NO_TOLERANCE = "Snapshots are hashes, which are equal or not."
MESSAGES = {
    "snapshot": "A snapshot of the weights was taken.",
    "compare": "The weights are those of the snapshot.",
    "checksum": "The files of the weights were hashed.",
}


class WeightsCheckerBody(msgspec.Struct, kw_only=True):
    """Without an `action` it is `checksum`. `allow_quant_error` is SGLang's, and must be false."""

    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    allow_quant_error: bool = False


class Checksum(msgspec.Struct):
    """The hash of the files of the checkpoint, and those of the files that replace its tensors."""

    weights: str
    tensors: list[str]


class WeightsCheckerAnswer(msgspec.Struct):
    success: bool
    message: str
    payload: Checksum | UnsetType = UNSET


async def check_weights(
    _: web.Request, context: HttpContext, body: WeightsCheckerBody
) -> web.Response:
    """Takes a snapshot of the weights, compares them with it, or hashes their files."""
    if body.action == "reset_tensors":
        raise unsupported("action", NO_RESET)
    if body.allow_quant_error:
        raise unsupported("allow_quant_error", NO_TOLERANCE)
    state = context.state
    if (refusal := state.refusal()) is not None and not state.is_held:
        raise refusal
    state.check_not_updating()
    answer = WeightsCheckerAnswer(True, MESSAGES[body.action])
    if body.action == "checksum":
        answer.payload = await _checksum(context)
        return json_response(answer)
    check = CheckWeights(state.next_job(), compares=body.action == "compare")
    error = await context.loras.run_on_device(check)
    if error is not None:
        raise RequestFailed(error)
    return json_response(answer)


async def _checksum(context: HttpContext) -> Checksum:
    """Hashes the files that the last update named, or those that the server began with."""
    if context.receipts is None:
        raise unsupported("action", "This server makes no hashes of files.")
    weights = context.state.weights
    if weights is not None and weights.path:
        context.receipts.use(Path(weights.path))
    files = () if weights is None else tuple(map(Path, weights.tensors))
    try:
        return Checksum(*await context.receipts.weight_hashes(files))
    except (OSError, ConfigError) as error:
        raise refused(400, f"The files of the weights cannot be read: {error}") from None


ROUTES = (post("/weights_checker", WeightsCheckerBody, check_weights, admin=True),)
