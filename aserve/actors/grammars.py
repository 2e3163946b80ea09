"""The grammar actor: it holds back a request until its grammar is compiled. Others pass at once.

It alone writes which requests wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from aserve.actors.admission import too_early
from aserve.actors.base import Actor
from aserve.actors.deadlines import deadlines_of
from aserve.actors.masks import MaskEvent
from aserve.channel import Channel, Sink
from aserve.errors import Cancelled, ErrorInfo
from aserve.grammar.matching import Constraint
from aserve.messages.changes import Amend, Amended, ChangeSettings
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import DetokenizerEvent, Refused
from aserve.messages.requests import AdmitRequest, Cancel, EngineEvent

# Waits for the grammar of a request. Raises the AserveError of an invalid one.
Constrain: TypeAlias = Callable[[AdmitRequest], Awaitable[Constraint]]


@dataclass(frozen=True, slots=True)
class GrammarPorts:
    """The receivers. A request goes to `scheduler` after its matchers have gone to `masks`; the
    error of one that is refused goes to `text`.
    """

    scheduler: Sink[SchedulerEvent]
    masks: Channel[MaskEvent]
    text: Sink[DetokenizerEvent]


class GrammarActor(Actor[EngineEvent]):
    """The first actor of the engine core. Requests that need not wait keep their order, and a
    cancel never overtakes its request: the scheduler would ignore it.
    """

    def __init__(self, constrain: Constrain, ports: GrammarPorts) -> None:
        super().__init__("grammars")
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
                case Amend() if event.request_id in self._waiting:
                    self._ports.text.send(Amended(event, error=too_early().info()))
                case AdmitRequest() | Cancel() | Amend() | ChangeSettings():
                    self._ports.scheduler.send(event)
                case _:
                    assert_never(event)

    def end_request(self, request_id: str, error: ErrorInfo) -> None:
        """Refuses the request, which the scheduler does not know yet."""
        self._waiting.pop(request_id, None)
        self._ports.text.send(Refused(request_id, error))

    async def _wait(self, request: AdmitRequest, waiting: _Wait) -> None:
        """Waits for the grammar and passes the request on. An exception ends the request. A cancel
        raises Cancelled, and removes the grammar from the queue at once.
        """
        deadlines = deadlines_of(request)
        try:
            async with asyncio.timeout(deadlines.left_s()) as waiting.timeout:
                if waiting.is_cancelled:  # before this task began
                    waiting.cancel()
                constraint = await self._constrain(request)
        except TimeoutError:
            if not waiting.is_cancelled:
                raise deadlines.error("its first step") from None
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
