"""GET and POST /v1/requests/{id}: the state of a running request, and changes to it.

The id is that of the answer, of its X-Request-Id header, or the client's own `rid`. As in
/abort_request, a client finds its own requests only, and the administrator all.
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from aserve.amendments import amended
from aserve.errors import InvalidRequest, NotFound
from aserve.http.abort import ABORTS
from aserve.http.auth import IDENTITY
from aserve.http.delivery import json_response
from aserve.http.errors import RequestFailed, refused
from aserve.http.openai.answer_size import check_answer_size
from aserve.http.openai.limits import Range, check_range, check_stops, check_within
from aserve.http.route import get, post
from aserve.http.state import HttpContext, caller_for, origin_of
from aserve.messages.base import MAX_INT32
from aserve.messages.changes import Amend, Amended, SequenceState

MAX_TOKENS = Range(1, MAX_INT32)
NOTHING = Amend("", 0)
PREPARING = "request_not_queued"


class AmendBody(msgspec.Struct, kw_only=True):
    """`end_thinking` ends the reasoning now. `stop` are further stop strings, which count in the
    text from here on. `max_tokens` below the tokens that are out ends the answer there.
    """

    end_thinking: bool | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    priority: int | None = None


class ChoiceState(msgspec.Struct):
    """`queue_position` is the number of choices that are admitted before it, while it waits."""

    index: int
    phase: str
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int
    priority: int
    queue_position: int | None


class RunningRequest(msgspec.Struct, kw_only=True):
    """`choices` leaves out those that have ended."""

    id: str
    object: str = "request"
    status: str
    choices: list[ChoiceState]


class RunningList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[str]


async def list_running(request: web.Request, context: HttpContext) -> web.Response:
    """Lists the ids of the client's running requests."""
    found = request.app[ABORTS].find(request[IDENTITY], None)
    ids = dict.fromkeys(request_id.rpartition("-")[0] for request_id in found)
    return json_response(RunningList(data=list(ids)))


async def read_running(request: web.Request, context: HttpContext) -> web.Response:
    """Tells the phase, the tokens and the place in the queue of each choice."""
    return await _answer(request, context, NOTHING)


async def amend_running(
    request: web.Request, context: HttpContext, body: AmendBody
) -> web.Response:
    """Changes all choices of a running request."""
    return await _answer(request, context, change_of(body, request, context))


def change_of(body: AmendBody, request: web.Request, context: HttpContext) -> Amend:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    check_stops(stops)
    if body.max_tokens is not None:
        check_within(body.max_tokens, MAX_TOKENS, param="max_tokens")
    if body.priority is not None:
        check_range(body.priority, "priority")
    caller_for(request, context).check_priority(body.priority)
    change = Amend("", 0, bool(body.end_thinking), body.max_tokens, body.priority, tuple(stops))
    if change == NOTHING:
        raise InvalidRequest(
            "Nothing to change: send 'end_thinking', 'stop', 'max_tokens' or 'priority'.",
            code="missing_required_parameter",
        )
    return change


async def _answer(request: web.Request, context: HttpContext, change: Amend) -> web.Response:
    given = request.match_info["id"]
    return json_response(await amend_request(request, context, given, change))


async def amend_request(
    request: web.Request, context: HttpContext, given_id: str, change: Amend
) -> RunningRequest:
    """Changes the requests of the call with this id, and returns their state. Raises if there is
    none, or if the change is refused.
    """
    request_ids = found_ids(request, given_id)
    _check(request, context, request_ids, change)
    ask = context.gateway.amendments.ask
    answers = await asyncio.gather(*(ask(request_id, change) for request_id in request_ids))
    errors = [answer.error for answer in answers if answer.error is not None]
    is_preparing = change == NOTHING and any(error.code == PREPARING for error in errors)
    if errors and not is_preparing:
        raise RequestFailed(errors[0])
    choices = [choice for answer in answers for choice in _choices(context, answer)]
    if not choices and not is_preparing:
        raise refused(409, f"The request '{given_id[:80]}' has just ended.")
    status = "preparing" if is_preparing else "running"
    if choices and all(choice.queue_position is not None for choice in choices):
        status = "queued"
    return RunningRequest(id=given_id, status=status, choices=choices)


def found_ids(request: web.Request, given_id: str) -> list[str]:
    request_ids = request.app[ABORTS].find(request[IDENTITY], given_id)
    if not request_ids:
        raise NotFound(
            f"You have no running request with the id '{given_id[:80]}'.",
            param="id",
            code="request_not_found",
        )
    return request_ids


def _check(
    request: web.Request, context: HttpContext, request_ids: list[str], change: Amend
) -> None:
    """Applies the limits of new requests to the changed ones."""
    requests = context.gateway.requests
    changed = [amended(requests[each], change) for each in request_ids]
    check_stops(list(changed[0].sampling.stop))
    if change.max_tokens is not None:
        check_answer_size(changed, origin_of(request, context).answer_limits, is_whole=True)


def _choices(context: HttpContext, answer: Amended) -> list[ChoiceState]:
    """Returns the states in the order of an answer's choices."""
    _, _, prompt = answer.amend.request_id.rpartition("-")
    asked = context.gateway.requests.get(answer.amend.request_id)
    num_children = 1 if asked is None else asked.sampling.n
    return [_choice(state, int(prompt) * num_children) for state in answer.sequences]


def _choice(state: SequenceState, first: int) -> ChoiceState:
    return ChoiceState(
        first + state.child,
        state.phase,
        state.prompt_len,
        state.num_outputs,
        state.max_tokens,
        state.priority,
        state.num_ahead,
    )


ROUTES = (
    get("/v1/requests", list_running),
    get("/v1/requests/{id}", read_running),
    post("/v1/requests/{id}", AmendBody, amend_running),
)
