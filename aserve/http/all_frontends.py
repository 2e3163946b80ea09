"""Questions to all frontend processes of a server, whose answers are added up."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import hdrs, web
from prometheus_client import CONTENT_TYPE_LATEST

from aserve.http.frontend_requests import (
    GONE,
    answer_timeout,
    ask,
    body_of,
    headers_for,
    is_silent,
    session_with,
    silence,
)
from aserve.http.peers import Peers
from aserve.http.route import METRICS, Route
from aserve.observability.metric_sums import summed

OF_A_BODY = frozenset({"content-length", "content-type", "content-encoding"})
JSON = (hdrs.CONTENT_TYPE, "application/json")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    content_type: str
    body: bytes


async def ask_all(route: Route, request: web.Request, peers: Peers) -> web.Response:
    """Adds up the answers of all frontends. The answer is an error if one of them is."""
    body = await body_of(request)
    ask_one = functools.partial(_whole, request, peers, body=body)
    answers = await _of_all(route.path, peers, ask_one, wait_s=0)
    failed = [answer for answer in answers if answer.status >= 400]
    if failed:
        first = failed[0]
        return web.Response(body=first.body, status=first.status, content_type=first.content_type)
    bodies = [answer.body for answer in answers]
    if route.path == METRICS:
        data = summed(bodies)
        return web.Response(body=data, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE_LATEST})
    data = msgspec.json.encode(merged([msgspec.json.decode(each) for each in bodies]))
    return web.Response(body=data, content_type="application/json")


async def tell_all(
    request: web.Request, peers: Peers, path: str, body: bytes, *, wait_s: float
) -> dict[str, Any]:
    """Posts a JSON body to another path of every frontend, with the key of `request`. Each may wait
    for `wait_s` before it answers. Returns the sum of their answers, or one that is an error.
    """
    given = headers_for(request, peers)
    headers = [pair for pair in given if pair[0].lower() not in OF_A_BODY]
    url = request.url.with_scheme("http").with_path(path)

    async def tell(number: int) -> dict[str, Any]:
        async with (
            session_with(peers, number) as session,
            session.post(url, data=body, headers=[*headers, JSON]) as answer,
        ):
            found: dict[str, Any] = await answer.json()
            return found

    told = await _of_all(path, peers, tell, wait_s=wait_s)
    failed = [each for each in told if "error" in each]
    return failed[0] if failed else merged(told)


async def _of_all(
    path: str, peers: Peers, ask_one: Callable[[int], Awaitable[T]], *, wait_s: float
) -> list[T]:
    """Returns the answers of the frontends that have not ended, and raises if one of them gives
    none in time. The others have done then what they were asked for. What it missed of the state
    that all share, it gets from the first frontend, over the link, when it goes on.
    """
    silent: list[int] = []

    async def within_limit(number: int) -> list[T]:
        try:
            async with answer_timeout(wait_s):
                return [await ask_one(number)]
        except GONE as error:
            if is_silent(error):
                silent.append(number)
        return []

    answers = await asyncio.gather(*map(within_limit, peers.numbers()))
    if silent:
        raise silence(silent, path, wait_s)
    return list(itertools.chain(*answers))


async def _whole(request: web.Request, peers: Peers, number: int, *, body: bytes | None) -> _Answer:
    async with ask(request, peers, number, body) as answer:
        data = await answer.read()
    return _Answer(answer.status, answer.content_type, data)


def merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds up the numbers of JSON objects, and joins their lists. `now_s` is the earliest, up to
    which all of them tell what happened. All else is of the first that has it, as are values whose
    types differ.
    """
    whole = dict(answers[0])
    for answer in answers[1:]:
        for key, value in answer.items():
            if whole.get(key) is None:
                whole[key] = value
            elif type(value) is not type(whole[key]):
                continue
            elif key == "now_s":
                whole[key] = min(whole[key], value)
            elif isinstance(value, int | list) and not isinstance(value, bool):
                whole[key] = whole[key] + value
    return whole
