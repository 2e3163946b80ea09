"""An actor: one inbox, one task that reads it, and what it spawned; the only place with tasks.

Must not know what a message means, nor who else exists: a death is reported to whoever started the
actor. The beat is written by the actor's own loop, and read when one has died: who was stuck then?
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from aserve.channel import Channel, Codec

T = TypeVar("T")

DeathReport: TypeAlias = Callable[[str, BaseException], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """How far a loop is; an idle actor does not beat, so age counts only beside a backlog."""

    num_beats: int
    age_s: float
    backlog: int

    def __str__(self) -> str:
        return f"beats={self.num_beats} age_s={self.age_s:.3f} backlog={self.backlog}"


class Actor(Generic[T]):
    """Subclasses write `handle`, which runs to its end in one turn of the loop and may not block.

    What has to wait goes into `spawn`; an actor that awaits between two messages overrides `run`.
    """

    def __init__(
        self, name: str, *, codec: Codec | None = None, inbox: Channel[T] | None = None
    ) -> None:
        """`inbox` is given where neighbours write to each other: one of them must come first."""
        self.name = name
        self.inbox: Channel[T] = Channel(codec=codec) if inbox is None else inbox
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_death: DeathReport | None = None
        self._num_beats = 0
        self._beat_at_s = time.monotonic()

    def handle(self, events: list[T]) -> None:
        """All messages that came since the last call, in arrival order."""
        raise NotImplementedError(f"{type(self).__name__} has neither a handle nor its own run")

    async def run(self) -> None:
        async for events in self.inbox.batches():
            self.beat()
            self.handle(events)

    def start(self, on_death: DeathReport) -> None:
        """`on_death(name, error)` is called at most once, as soon as one of the tasks failed."""
        self._on_death = on_death
        self.spawn(self.run())

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs beside the loop, ends with the actor at the latest; its exception kills it."""
        task = asyncio.create_task(work, name=self.name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Ends every task of the actor, whatever it waits for.

        NOTE: the inbox stays open, because actors stop one after the other: what a neighbour still
        sends goes nowhere, and does not kill the neighbour.
        """
        self._on_death = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def beat(self) -> None:
        self._num_beats += 1
        self._beat_at_s = time.monotonic()

    def backlog(self) -> int:
        return len(self.inbox)

    def heartbeat(self) -> Heartbeat:
        age_s = time.monotonic() - self._beat_at_s
        return Heartbeat(num_beats=self._num_beats, age_s=age_s, backlog=self.backlog())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        report, self._on_death = self._on_death, None
        logger.error("actor failed name=%s error=%r", self.name, error, exc_info=error)
        if report is not None:
            report(self.name, error)
