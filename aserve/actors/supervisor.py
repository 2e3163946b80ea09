"""The supervisor: starts the actors, hears of deaths, and brings everything to an end in order.

Must not know what the actors do, and never infers life from tokens: a long step is not a death, and
only an exception that ended an actor's task or the executor's thread is one. Writes `failure`.
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
    """An actor, whatever it reads."""

    @property
    def name(self) -> str: ...

    def start(self, on_death: DeathReport) -> None: ...

    async def stop(self) -> None: ...

    def backlog(self) -> int: ...

    def heartbeat(self) -> Heartbeat: ...


class OpenRequests(Protocol):
    """The gateway, as far as ends go."""

    def end_all(self, error: ErrorInfo) -> None: ...

    async def drained(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Failure:
    name: str
    error: BaseException

    def __str__(self) -> str:
        return f"{self.name} died: {type(self.error).__name__}: {self.error}"


class Supervisor:
    """`report(phase, reason)` tells /health."""

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
        """Ends every open request; the first death is the cause, later ones follow from it."""
        if self.failure is not None:
            return
        self.failure = Failure(name, error)
        logger.critical("engine died cause=%s", self.failure)
        for actor in self._actors:
            logger.error("actor name=%s %s", actor.name, actor.heartbeat())
        self._report("dead", str(self.failure))
        self._requests.end_all(EngineDead(f"the engine died ({name}); restart it").info())

    async def drain(self, grace_s: float) -> None:
        """No new requests; what is open may finish within `grace_s`, then ends with an error."""
        if self.failure is None:
            self._report("draining", "the server is shutting down")
        try:
            async with asyncio.timeout(grace_s):
                await self._requests.drained()
        except TimeoutError:
            error = ShuttingDown("the server is shutting down", retry_after_s=5)
            self._requests.end_all(error.info())

    async def stop(self) -> None:
        """In reverse order of the start."""
        for actor in reversed(self._actors):
            await actor.stop()
