"""The sleep of an engine that runs in a process of its own: the process has ended, so that all its
memory is free.

A sleep that the administrator has begun lasts until he ends it. A nap begins when the engine has
had nothing to do for --sleep-idle-seconds, and ends with the next request or job, which waits for
the engine. Only this class writes whether the engine sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from aserve.errors import AserveError, EngineDead, ErrorInfo, InvalidRequest

logger = logging.getLogger(__name__)


class Sleeper(Protocol):
    """The engine, as its sleep uses it."""

    @property
    def is_up(self) -> bool:
        """Whether a process is ready."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is open and no job runs."""

    async def suspend(self) -> None:
        """Ends the process. `is_up` is false at once, and open requests are kept."""

    async def start_again(self) -> None:
        """Starts a process, which continues the open requests. Raises AserveError if it cannot."""

    def end_all(self, error: ErrorInfo) -> None:
        """Ends the open requests."""


class EngineSleep:
    def __init__(self, engine: Sleeper) -> None:
        self._engine = engine
        self.has_profile = False  # the process would lose it; written by the engine
        self._is_asleep = self._is_nap = False
        self._turn = asyncio.Lock()
        self._woken = self._new_future()  # the outcome of the next wake-up from a nap
        self._is_wanted = asyncio.Event()  # something has come that ends a nap
        self._busy_at_s = time.monotonic()  # when the engine was last known to work

    def note_work(self) -> None:
        """A request has come, or the engine has said something about one, or a job has ended."""
        self._busy_at_s = time.monotonic()
        self._is_wanted.set()

    async def begin(self) -> ErrorInfo | None:
        """Begins the administrator's sleep. A nap becomes one."""
        async with self._turn:
            self._end_nap()
            if self._is_asleep:
                return None
            if not self._engine.is_up:
                return self._absent()
            if self.has_profile:
                reason = "A profile runs, which a sleep would lose: end it by /stop_profile first."
                return InvalidRequest(reason, code="profile_running").info()
            await self._suspend()
            return None

    async def end(self) -> ErrorInfo | None:
        """Wakes the engine, whoever let it sleep. If it cannot start, it goes on sleeping."""
        async with self._turn:
            if not self._is_asleep:
                return None
            began_s = time.monotonic()
            try:
                await self._engine.start_again()
            except AserveError as error:
                return error.info()
            self._is_asleep = False
            self._end_nap()
            logger.info("engine awake took_s=%.3f", time.monotonic() - began_s)
            return None

    async def ready_for_job(self) -> ErrorInfo | None:
        """Ends a nap. Returns the error of a job that the engine cannot run now. The wake-up goes
        on when the client of the job goes away.
        """
        if self._is_nap:
            self._is_wanted.set()
            error = await asyncio.shield(self._woken)
            if error is not None:
                return error
        return None if self._engine.is_up else self._absent()

    async def nap_when_idle(self, after_s: float) -> None:
        """Begins a nap whenever the engine was idle for so long, and ends it when it is wanted."""
        self.note_work()
        while True:
            await asyncio.sleep(self._idle_left_s(after_s))
            if self._idle_left_s(after_s) <= 0:
                await self._nap(after_s)

    def _idle_left_s(self, after_s: float) -> float:
        """Returns how long the engine must still be idle before a nap."""
        if self.has_profile or not (self._engine.is_idle and self._engine.is_up):
            return after_s
        return self._busy_at_s + after_s - time.monotonic()

    async def _nap(self, after_s: float) -> None:
        async with self._turn:
            if self._idle_left_s(after_s) > 0:
                return
            self._is_wanted.clear()
            self._is_nap = True
            logger.info("engine naps idle_s=%s", after_s)
            await self._suspend()
        while self._is_nap:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            await self._wake_up()

    async def _wake_up(self) -> None:
        error = await self.end() if self._is_nap else None
        woken, self._woken = self._woken, self._new_future()
        woken.set_result(error)
        if error is not None:
            logger.error("engine cannot wake cause=%r", error.message)
            self._engine.end_all(error)

    async def _suspend(self) -> None:
        self._is_asleep = True
        await self._engine.suspend()

    def _end_nap(self) -> None:
        self._is_nap = False
        self.note_work()

    def _new_future(self) -> asyncio.Future[ErrorInfo | None]:
        return asyncio.get_running_loop().create_future()

    def _absent(self) -> ErrorInfo:
        why = "sleeps: wake it first" if self._is_asleep else "is restarting; try again later"
        return EngineDead(f"the engine {why}", retry_after_s=5).info()
