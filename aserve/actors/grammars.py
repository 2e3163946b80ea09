"""The grammar actor: a request with a grammar waits here until it is compiled, others pass at once.

Must not know how grammars are compiled, steps or rows. Which requests wait is written here alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from aserve.actors.base import Actor
from aserve.actors.masks import MaskEvent
from aserve.channel import Channel, Codec, Sink
from aserve.errors import AserveError, Cancelled, DeadlineExceeded
from aserve.grammar.matching import Constraint
from aserve.messages import (
    AdmitRequest,
    Cancel,
    DetokenizerEvent,
    EngineEvent,
    Refused,
    SchedulerEvent,
)

# Takes its time, and raises the AserveError of a grammar that is no good.
Constrain: TypeAlias = Callable[[AdmitRequest], Awaitable[Constraint]]


@dataclass(frozen=True, slots=True)
class GrammarPorts:
    """Where requests go: to the scheduler, and before it their matchers to `masks`, or to `text`
    with what is wrong.
    """

    scheduler: Channel[SchedulerEvent]
    masks: Channel[MaskEvent]
    text: Sink[DetokenizerEvent]


class GrammarActor(Actor[EngineEvent]):
    """The engine's entrance. What passes does so in order of arrival, and a cancel follows its
    request: the scheduler never meets a request whose cancel it has already dropped.
    """

    def __init__(
        self, constrain: Constrain, ports: GrammarPorts, *, codec: Codec | None = None
    ) -> None:
        super().__init__("grammars", codec=codec)
        self._constrain = constrain
        self._ports = ports
        self._waiting: dict[str, Cancel | None] = {}  # with the cancel that came meanwhile

    def handle(self, events: list[EngineEvent]) -> None:
        for event in events:
            match event:
                case AdmitRequest() if event.sampling.grammar is not None:
                    self._waiting[event.request_id] = None
                    self.spawn(self._wait(event))
                case Cancel() if event.request_id in self._waiting:
                    self._waiting[event.request_id] = event
                case AdmitRequest() | Cancel():
                    self._ports.scheduler.send(event)
                case _:
                    assert_never(event)

    async def _wait(self, request: AdmitRequest) -> None:
        outcome: Constraint | AserveError
        try:
            left_s = None if request.deadline_s is None else request.deadline_s - time.monotonic()
            async with asyncio.timeout(left_s):
                outcome = await self._constrain(request)
        except AserveError as error:
            outcome = error
        except TimeoutError:
            outcome = DeadlineExceeded("the request's timeout ran out before its first step")
        if self._waiting.pop(request.request_id) is not None:
            outcome = Cancelled("the client went away before its grammar was compiled")
        if isinstance(outcome, AserveError):
            self._ports.text.send(Refused(request.request_id, outcome.info()))
            return
        self._ports.masks.send(outcome)
        self._ports.scheduler.send(request)
