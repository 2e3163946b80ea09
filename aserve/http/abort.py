"""Finds running requests by id, and ends them: by the client's own id (`rid`), by the X-Request-Id
of an answer, or by the answer's own id.

An id is matched exactly, and only among the requests of the same client: an id of one client never
means a request of another. The administrator may end any request. `Aborts` alone writes which `rid`
stands for which requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web

from aserve.errors import Cancelled, InvalidRequest
from aserve.http.auth import IDENTITY, Identity
from aserve.http.calls import RunningCalls
from aserve.http.delivery import json_response
from aserve.http.errors import refused
from aserve.http.openai.limits import check_length
from aserve.http.route import post
from aserve.http.state import HttpContext
from aserve.messages.requests import GenerateRequest
from aserve.request_stream import Gateway

ABORTED = "request_aborted"
PREFIX = re.compile("^(chatcmpl-|cmpl-|resp_|msg_)")  # of the id of an answer
MAX_MESSAGE_CHARS = 200
MAX_ABORTED_IDS = 128  # each is looked for among all open requests


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None
    abort_message: str | None = None


class AbortRequestsBody(AbortBody, kw_only=True):
    """vLLM's body, whose `request_ids` may come with or instead of a `rid`."""

    request_ids: list[str] | None = None


class AbortedAnswer(msgspec.Struct):
    num_aborted: int


class Aborts:
    def __init__(self, gateway: Gateway, calls: RunningCalls) -> None:
        self._gateway = gateway
        self._calls = calls
        self._named: dict[str, list[GenerateRequest]] = {}  # by the client's id of each prompt

    @contextmanager
    def named(self, rids: Iterable[str], requests: Iterable[GenerateRequest]) -> Iterator[None]:
        """Knows the requests by these ids while they run."""
        pairs = list(zip(rids, requests, strict=True))
        for rid, request in pairs:
            self._named.setdefault(rid, []).append(request)
        try:
            yield
        finally:
            for rid, request in pairs:
                self._named[rid].remove(request)
                if not self._named[rid]:
                    del self._named[rid]

    def find(self, identity: Identity, rid: str | None) -> list[str]:
        """Returns the ids of the engine's requests that this id means, or of all with None."""
        given = self._named.get(rid or "", ())
        meant = {request.request_id for request in given}
        call_ids = set() if rid is None else {PREFIX.sub("", rid), *self._calls.ids_of(rid)}
        return [
            request_id
            for request_id, request in self._gateway.requests.items()
            if (rid is None or request_id in meant or request_id.rpartition("-")[0] in call_ids)
            and (identity.is_admin or request.client == identity.client)
        ]

    def abort(self, identity: Identity, rid: str | None, message: str) -> int:
        """Ends the requests with this id, or all with None, and returns their number."""
        request_ids = self.find(identity, rid)
        for request_id in request_ids:
            self._gateway.abort(request_id, Cancelled(message, code=ABORTED).info())
        return len(request_ids)


async def abort_request(request: web.Request, _: HttpContext, body: AbortBody) -> web.Response:
    return _abort(request, body, [body.rid], param="rid")


async def abort_requests(
    request: web.Request, _: HttpContext, body: AbortRequestsBody
) -> web.Response:
    """Ends several running requests, under vLLM's name."""
    return _abort(request, body, [body.rid, *(body.request_ids or ())], param="request_ids")


def _abort(
    request: web.Request, body: AbortBody, given: Iterable[str | None], *, param: str
) -> web.Response:
    identity = request[IDENTITY]
    if body.abort_all and not identity.is_admin:
        raise refused(403, "To abort the requests of all clients, send the admin API key.")
    rids: list[str | None] = [None] if body.abort_all else [rid for rid in given if rid]
    if not rids:
        raise InvalidRequest(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    check_length(rids, MAX_ABORTED_IDS, param=param)
    message = (body.abort_message or "The request was aborted.")[:MAX_MESSAGE_CHARS]
    aborts = request.app[ABORTS]
    return json_response(AbortedAnswer(sum(aborts.abort(identity, rid, message) for rid in rids)))


ABORTS = web.AppKey("aborts", Aborts)
ROUTES = (
    post("/abort_request", AbortBody, abort_request),
    post("/abort_requests", AbortRequestsBody, abort_requests),
)
