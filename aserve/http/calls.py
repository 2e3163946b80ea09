"""The calls that run: the handler and the body of each, so that a fork can make the call again, and
what a fork has of its original.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from aserve.http.openai.call import Origin, Requests
from aserve.http.openai.schema import GenerationBody


@dataclass(frozen=True, slots=True)
class Beginning:
    """Has what a fork takes from its original. A seed that the fork names counts before it."""

    outputs: bytes  # int32: the first tokens of each choice
    seed: int | None


BEGINNING = web.RequestKey("beginning", Beginning)


@dataclass(frozen=True, slots=True)
class RunningCall:
    handler: Callable[[web.Request, Any, Any], Awaitable[web.StreamResponse]]
    body: msgspec.Struct


class RunningCalls:
    """By the id of their HTTP requests. `running` alone writes it."""

    def __init__(self) -> None:
        self._running: dict[str, RunningCall] = {}

    @contextmanager
    def running(self, request_id: str, call: RunningCall) -> Iterator[None]:
        """Knows the call while it runs."""
        self._running[request_id] = call
        try:
            yield
        finally:
            self._running.pop(request_id, None)

    def ids_of(self, rid: str) -> set[str]:
        """Returns the ids of the calls whose bodies have this id of the client."""
        return {
            request_id
            for request_id, call in self._running.items()
            if isinstance(call.body, GenerationBody)
            and rid in (call.body.rid, call.body.request_id)
        }

    def find(self, request_id: str) -> RunningCall | None:
        return self._running.get(request_id)


def begin_with(beginning: Beginning, origin: Origin) -> Origin:
    """Returns the origin of a fork."""
    outputs, seed = beginning.outputs, beginning.seed
    if seed is not None:
        origin = replace(origin, draw_seed=lambda: seed)
    return origin if not outputs else replace(origin, completed=partial(_begin, outputs, origin))


def _begin(outputs: bytes, origin: Origin, model: str | None, requests: Requests) -> Requests:
    return tuple(
        msgspec.structs.replace(each, outputs=(outputs,) * each.sampling.n, sends_outputs=True)
        for each in origin.completed(model, requests)
    )
