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
from aserve.errors import Cancelled, DeadlineExceeded, ErrorInfo
from aserve.grammar.matching import Constraint
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import DetokenizerEvent, Refused
from aserve.messages.requests import AdmitRequest, Cancel, EngineEvent

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
        self._waiting: dict[str, _Wait] = {}

    def handle(self, events: list[EngineEvent]) -> None:
        for event in events:
            match event:
                case AdmitRequest() if event.sampling.grammar is not None:
                    self._waiting[event.request_id] = waiting = _Wait()
                    self.spawn_for(event.request_id, self._wait(event, waiting))
                case Cancel() if event.request_id in self._waiting:
                    self._waiting[event.request_id].cancel()
                case AdmitRequest() | Cancel():
                    self._ports.scheduler.send(event)
                case _:
                    assert_never(event)

    def end_request(self, request_id: str, error: ErrorInfo) -> None:
        """The scheduler has not heard of it."""
        self._waiting.pop(request_id, None)
        self._ports.text.send(Refused(request_id, error))

    async def _wait(self, request: AdmitRequest, waiting: _Wait) -> None:
        """What it raises ends the request; so does a cancel, which takes its grammar out of the
        queue at once.
        """
        left_s = None if request.deadline_s is None else request.deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s) as waiting.timeout:
                if waiting.is_cancelled:  # before this task began
                    waiting.cancel()
                constraint = await self._constrain(request)
        except TimeoutError:
            if not waiting.is_cancelled:
                late = "the request's timeout ran out before its first step"
                raise DeadlineExceeded(late) from None
        if waiting.is_cancelled:
            raise Cancelled("the client went away before its grammar was compiled")
        del self._waiting[request.request_id]
        self._ports.masks.send(constraint)
        self._ports.scheduler.send(request)


class _Wait:
    """A request whose grammar is being compiled."""

    __slots__ = ("is_cancelled", "timeout")

    def __init__(self) -> None:
        self.is_cancelled = False
        self.timeout: asyncio.Timeout | None = None  # once its task has begun

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.timeout is not None:
            self.timeout.reschedule(asyncio.get_running_loop().time())
