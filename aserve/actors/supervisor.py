"""The supervisor: it starts the actors, handles the death of one, and stops them in order.

It never infers a death from missing tokens, because a step may take long. Only an exception that
ends a task of an actor, or the executor's thread, is a death. It alone writes `failure`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aserve.actors.base import DeathReport, Heartbeat
from aserve.errors import EngineDead, ErrorInfo, ShuttingDown
from aserve.messages.base import ServerPhase

logger = logging.getLogger(__name__)


class Supervised(Protocol):
    """An actor, whatever the type of its messages."""

    @property
    def name(self) -> str: ...

    def start(self, on_death: DeathReport) -> None: ...

    async def stop(self) -> None: ...

    def backlog(self) -> int: ...

    def heartbeat(self) -> Heartbeat: ...


class OpenRequests(Protocol):
    """The part of the gateway that ends requests."""

    def end_all(self, error: ErrorInfo) -> None: ...

    async def drained(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Failure:
    name: str
    error: BaseException

    def __str__(self) -> str:
        return f"{self.name} died: {type(self.error).__name__}: {self.error}"


class Supervisor:
    """Starts and stops actors. `report(phase, reason)` updates what /health answers."""

    def __init__(
        self,
        actors: Sequence[Supervised],
        *,
        requests: OpenRequests,
        report: Callable[[ServerPhase, str], None],
    ) -> None:
        self._actors = tuple(actors)
        self._requests = requests
        self._report = report
        self.failure: Failure | None = None

    def start(self) -> None:
        for actor in self._actors:
            actor.start(self.report_death)

    def report_death(self, name: str, error: BaseException) -> None:
        """Ends every open request. Only the first death counts: later ones follow from it."""
        if self.failure is not None:
            return
        self.failure = Failure(name, error)
        logger.critical("engine died cause=%s", self.failure)
        for actor in self._actors:
            logger.error("actor name=%s %s", actor.name, actor.heartbeat())
        self._report("dead", str(self.failure))
        self._requests.end_all(EngineDead(f"the engine died ({name}); restart it").info())

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests. Open ones may finish within `grace_s`, then end with an error."""
        if self.failure is None:
            self._report("draining", "the server is shutting down")
        try:
            async with asyncio.timeout(grace_s):
                await self._requests.drained()
        except TimeoutError:
            error = ShuttingDown("the server is shutting down", retry_after_s=5)
            self._requests.end_all(error.info())

    async def stop(self) -> None:
        """Stops the actors in reverse order of their start."""
        for actor in reversed(self._actors):
            await actor.stop()
