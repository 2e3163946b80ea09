"""A request whose answer has begun: its status line is out, so a failure must go the answer's way.

Must not know what the answer looks like. Set by the handler that began it, read by the border.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from aserve.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class StartedAnswer:
    """`fail` tells the client and ends the answer."""

    response: web.StreamResponse
    fail: Callable[[ErrorInfo], Awaitable[None]]


STARTED = web.RequestKey("started", StartedAnswer)
