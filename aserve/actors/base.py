"""The base of all actors: an inbox, the task that reads it, and the tasks that the actor spawns.

Only actors have tasks. An actor reports its death to whoever started it. Its own loop writes its
heartbeat, which is logged when any actor has died, to show which one was stuck.

The rule about exceptions: work that belongs to one request runs in `attempt` or `spawn_for`.
Whatever it raises ends that request with one final message, and the actor continues with the
others. An exception anywhere else means that the actor itself is broken, and ends the engine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeAlias, TypeVar

from aserve.channel import Channel
from aserve.errors import AserveError, BugError, ErrorInfo

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

DeathReport: TypeAlias = Callable[[str, BaseException], None]
Story: TypeAlias = Callable[[str], str]  # returns the past events of a request, for the log

# These end the task or the process, whatever was being worked on. NOTE: a panic of a Rust library
# is a BaseException as well, but belongs to the request that caused it.
ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The progress of an actor's loop. An idle actor does not beat, so a high age is bad only
    together with a backlog.
    """

    num_beats: int
    age_s: float
    backlog: int

    def __str__(self) -> str:
        return f"beats={self.num_beats} age_s={self.age_s:.3f} backlog={self.backlog}"


class Actor(Generic[T]):
    """A subclass implements `handle`, which runs within one iteration of the event loop and may not
    block. Work that must wait goes into `spawn`. An actor that awaits between two messages
    overrides `run`.
    """

    def __init__(
        self,
        name: str,
        *,
        inbox: Channel[T] | None = None,
        story: Story | None = None,
    ) -> None:
        """`inbox` is given where two actors write to each other, because one is made first. `story`
        returns what the log says about a request whose work raised.
        """
        self.name = name
        self._story = story
        self.inbox: Channel[T] = Channel() if inbox is None else inbox
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_death: DeathReport | None = None
        self._num_beats = 0
        self._beat_at_s = time.monotonic()

    def handle(self, events: list[T]) -> None:
        """Handles all messages that came since the last call, in order of arrival."""
        raise NotImplementedError(f"{type(self).__name__} has neither a handle nor its own run")

    def end_request(self, request_id: str, error: ErrorInfo) -> None:
        """Sends the final message of a request whose work raised, and forgets the request. Actors
        that use `attempt` or `spawn_for` implement it. The request may be unknown.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot end a request")

    def attempt(
        self, request_id: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R | None:
        """Runs the work of one request and returns its result. If it raises, only that request
        ends, and the result is None.
        """
        try:
            return work(*args, **kwargs)
        except ENDS:
            raise
        except BaseException as error:
            self._fail(request_id, error)
            return None

    def spawn_for(self, request_id: str, work: Coroutine[None, None, None]) -> None:
        """Like `spawn`, for the work of one request. If it raises, only that request ends."""
        self._run_beside(work, functools.partial(self._ended_for, request_id))

    async def run(self) -> None:
        async for events in self.inbox.batches():
            self.beat()
            self.handle(events)

    def start(self, on_death: DeathReport) -> None:
        """Calls `on_death(name, error)` at most once, as soon as one of the tasks fails."""
        self._on_death = on_death
        self.spawn(self.run())

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs the work in a task beside the loop. Its exception ends the actor."""
        self._run_beside(work, self._ended)

    async def stop(self) -> None:
        """Cancels every task of the actor.

        NOTE: the inbox stays open, because actors stop one after the other. A message that another
        actor still sends is lost, and does not end that actor.
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

    def _run_beside(
        self,
        work: Coroutine[None, None, None],
        on_end: Callable[[asyncio.Task[None]], None],
    ) -> None:
        task = asyncio.create_task(work, name=self.name)
        self._tasks.add(task)
        task.add_done_callback(on_end)

    def _ended_for(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(request_id, error)

    def _fail(self, request_id: str, error: BaseException) -> None:
        """Ends the request. The client gets an error that it can act on; an unexpected one goes to
        the log only.

        WHY: an exception of `end_request` itself is only logged, because the other requests of the
        batch continue.
        """
        info = self._client_error(request_id, error)
        try:
            self.end_request(request_id, info)
        except Exception:
            logger.critical("actor=%s request_id=%s could not be ended", self.name, request_id)
            logger.exception("actor=%s request_id=%s", self.name, request_id)

    def _client_error(self, request_id: str, error: BaseException) -> ErrorInfo:
        if isinstance(error, AserveError) and not isinstance(error, BugError):
            return error.info()
        story = self._story(request_id) if self._story else f"request {request_id}"
        logger.error(
            "request failed actor=%s request_id=%s error=%r\n%s",
            self.name,
            request_id,
            error,
            story,
            exc_info=error,
        )
        return unexpected(request_id).info()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        report, self._on_death = self._on_death, None
        logger.error("actor failed name=%s error=%r", self.name, error, exc_info=error)
        if report is not None:
            report(self.name, error)


def unexpected(request_id: str) -> BugError:
    """Returns the error that a client gets for an unexpected exception; it reveals no internals."""
    return BugError(
        f"the server met an unexpected error while it worked on request {request_id}, and goes on; "
        "the server's log has the details under this id"
    )
