"""`StepThreads`: the two threads of an executor, which torch's and MLX's have in common.

The event loop's thread launches steps. The executor thread runs them in order, and the waiter
thread completes their tickets (waiter.py). gpu/executor.py explains how steps fail, and `Resync`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import sys
from collections.abc import Callable

from aserve.errors import AserveError, BugError, ErrorInfo, StepError
from aserve.gpu.step.ticket import StepTicket
from aserve.gpu.waiter import Waiter
from aserve.host.threads import SWITCH_INTERVAL_S, Worker
from aserve.messages.results import StepFailed

Job = Callable[[], None]


class StepThreads:
    """Attributes that two threads use are written by one of them, which `__init__` names."""

    def __init__(self, run: Job, *, land_after_all: Callable[[Job], None]) -> None:
        """`run` is the body of the executor thread: it runs `jobs` until one is None.
        `land_after_all` takes a callback for the event loop, which runs once the device has
        finished all that it was given. It raises if the device has become unusable.
        """
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._land_after_all = land_after_all
        self._has_failed = False  # written by the executor thread
        self._good_from = 0  # iteration of the last Resync; written by the executor thread
        self._invalid_at = -1  # iteration of an invalid result; written by the waiter
        self._is_closed = False
        self._worker = Worker("aserve-executor", run, on_end=self._ended)

    # ------------------------------------------------------------ the event loop's thread

    def start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[BaseException]:
        """Returns a future of the error that ends one of the threads before they are closed."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop = loop
        self._died: asyncio.Future[BaseException] = loop.create_future()
        self.waiter = Waiter(loop, on_end=self._ended)
        self.waiter.start()
        self._worker.start()
        return self._died

    def launch(self, iteration: int, work: Callable[[StepTicket], None]) -> StepTicket:
        """`work` gets the ticket that is returned, and sees to it that the ticket is completed."""
        ticket = StepTicket(iteration, self._loop)
        self.jobs.put(functools.partial(self._try, ticket, work))
        return ticket

    def resync(self, iteration: int, forget: Job) -> None:
        """Lets steps run again. `forget` drops what the steps that failed have left."""
        self.jobs.put(functools.partial(self._resync, iteration, forget))

    def close(self) -> None:
        """Runs what was launched to its end, then ends both threads."""
        if self._is_closed:
            return
        self._is_closed = True
        self.jobs.put(None)
        self._worker.join()
        self.waiter.close()

    # ------------------------------------------------------------ the executor thread

    def _try(self, ticket: StepTicket, work: Callable[[StepTicket], None]) -> None:
        """Runs a step's work, and completes its ticket with StepFailed if that raises."""
        if self._has_failed or self._invalid_at >= self._good_from:
            self._fail(ticket, StepError("an earlier step failed").info())
            return
        try:
            work(ticket)
        except AserveError as error:
            self._fail(ticket, error.info())
        except Exception as error:
            self._fail(ticket, StepError(f"{type(error).__name__}: {error}").info())

    def _fail(self, ticket: StepTicket, error: ErrorInfo) -> None:
        self._has_failed = True
        failed = StepFailed(ticket.iteration, error)
        self._land_after_all(functools.partial(ticket.complete, failed))

    def _resync(self, iteration: int, forget: Job) -> None:
        self._has_failed = False
        self._good_from = iteration
        forget()

    # ------------------------------------------------------------ the waiter thread

    def refuse(self, ticket: StepTicket, error: AserveError) -> Job:
        """An invalid result fails its step, and every later step up to the Resync. Returns what
        completes the ticket.
        """
        self._invalid_at = ticket.iteration
        return functools.partial(ticket.complete, StepFailed(ticket.iteration, error.info()))

    def _ended(self, error: BaseException | None) -> None:
        """Called when one of the two threads has ended, for whatever reason."""
        if self._is_closed and error is None:
            return
        reason = error or BugError("a device thread ended by itself")
        with contextlib.suppress(RuntimeError):  # the loop is closed as well
            self._loop.call_soon_threadsafe(self._report_death, reason)

    def _report_death(self, reason: BaseException) -> None:
        if not self._died.done():
            self._died.set_result(reason)
