"""POST /v1/requests/{id}/fork: a new answer that begins with the first tokens of a running one.

A fork is a new call of the same endpoint with the same body, and with other sampling parameters
where the client gives them. The prefix cache has most of the tokens that it keeps.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from aserve.errors import InvalidRequest
from aserve.http.calls import BEGINNING, Beginning, RunningCall
from aserve.http.errors import refused
from aserve.http.openai.checks import unsupported
from aserve.http.openai.limits import RANGES, Range, check_range, check_within
from aserve.http.openai.schema import TokenId
from aserve.http.route import post
from aserve.http.running import found_ids
from aserve.http.state import REQUEST_ID, HttpContext
from aserve.messages.base import MAX_INT32, array_i32, pack_i32
from aserve.messages.requests import GenerateRequest

# The fields of bodies that a fork may replace, each with its names in the APIs.
FIELDS = {
    "seed": ("seed",),
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "stream": ("stream",),
    "stop": ("stop", "stop_sequences"),
    "max_tokens": ("max_output_tokens", "max_completion_tokens", "max_tokens"),
}
POSITION = Range(0, MAX_INT32)
SINGLE = ("n", "best_of", "echo", "prompt_logprobs")  # a fork has one choice without its prompt
OF_STREAMS = ("resumable", "stream_options")

Body = TypeVar("Body", bound=msgspec.Struct)


class ForkBody(msgspec.Struct, kw_only=True):
    """The fork keeps the first `token` tokens of choice `index`, and behind them `token_id` if it
    is given. The other fields replace those of the call; what is not given stays.
    """

    token: int
    index: int = 0
    token_id: TokenId | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None


async def fork(request: web.Request, context: HttpContext, body: ForkBody) -> web.StreamResponse:
    """Answers the new call as its endpoint does, with an id of its own."""
    _check(body)
    given = request.match_info["id"]
    request_ids = found_ids(request, given)
    call = context.calls.find(request_ids[0].rpartition("-")[0])
    if call is None or len(request_ids) > 1:
        raise refused(
            409,
            f"The request '{given[:80]}' cannot be forked: it has several prompts, or nobody waits "
            "for its answer.",
        )
    original = context.gateway.requests[request_ids[0]]
    again = RunningCall(call.handler, forked_body(call.body, body, original))
    request[BEGINNING] = await beginning_of(body, original, context)
    with context.calls.running(request[REQUEST_ID], again):
        return await again.handler(request, context, again.body)


def _check(body: ForkBody) -> None:
    """Raises for a number that no request could have."""
    check_within(body.token, POSITION, param="token")
    check_within(body.index, POSITION, param="index")
    for name in FIELDS.keys() & RANGES.keys():
        value = getattr(body, name)
        if value is not None:
            check_range(value, name)


async def beginning_of(
    body: ForkBody, original: GenerateRequest, context: HttpContext
) -> Beginning:
    """Returns the first tokens of the fork, and the seed of the original for a fork of its first
    choice, so that it differs only by what was changed. Raises if the answer has not so many."""
    if not 0 <= body.index < original.sampling.n:
        raise _invalid("index", body.index, f"the request has {original.sampling.n} choices")
    outputs = array_i32(context.gateway.outputs_of(original.request_id, body.index)).tolist()
    if not 0 <= body.token <= len(outputs):
        raise _invalid("token", body.token, f"the answer has {len(outputs)} tokens so far")
    kept = outputs[: body.token] + ([] if body.token_id is None else [body.token_id])
    limit = original.sampling.max_tokens if body.max_tokens is None else body.max_tokens
    if limit is not None and limit < len(kept):
        raise _invalid("max_tokens", limit, f"the fork begins with {len(kept)} tokens")
    if body.token_id is not None:
        await context.tokenize_service.run(
            lambda encoder: encoder.check_ids(kept[-1:], param="token_id")
        )
    return Beginning(pack_i32(kept), None if body.index else original.sampling.seed)


def forked_body(given: Body, changes: ForkBody, original: GenerateRequest) -> Body:
    """Returns the body of the call with the changes. A fork of another choice than the first one
    has no seed of the call's."""
    names = set(given.__struct_fields__)
    sampling = original.sampling
    wanted: dict[str, Any] = {
        "stop": list(sampling.stop) or None,
        "max_tokens": sampling.max_tokens,
    }
    if changes.index:
        wanted["seed"] = None
    asked = {name: getattr(changes, name) for name in FIELDS}
    asked = {name: value for name, value in asked.items() if value is not None}
    dropped = SINGLE if changes.stream is not False else (*SINGLE, *OF_STREAMS)
    fields: dict[str, Any] = {name: None for name in dropped if name in names}
    for name, value in (wanted | asked).items():
        known = [alias for alias in FIELDS[name] if alias in names]
        if not known and name in asked:
            raise unsupported(name, "The API of this request does not have it.")
        used = [alias for alias in known if getattr(given, alias) is not None]
        fields |= dict.fromkeys((used or known)[:1], value)
    return msgspec.structs.replace(given, **fields)


def _invalid(name: str, value: int, why: str) -> InvalidRequest:
    message = f"Invalid '{name}': got {value}, but {why}."
    return InvalidRequest(message, param=name, code="invalid_value")


ROUTES = (post("/v1/requests/{id}/fork", ForkBody, fork),)
