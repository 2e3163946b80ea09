"""A worker that fills grammar masks in a thread of its own, with round robin over requests.

A fill is one call into xgrammar, which cannot be interrupted. A worker that is stuck in one gets a
new thread. The old thread is abandoned: it gets the lowest priority, and ends with its call. Shared
state is written under the lock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

from aserve.fair_queue import FairQueue
from aserve.grammar.mask_budget import RequestEffort
from aserve.grammar.matching import Matcher
from aserve.messages.results import BuildMask, MaskReady

LOWEST_PRIORITY = 19  # a nice value, which Linux has for each thread
ThreadClock: TypeAlias = Callable[[int], float]  # processor seconds of a thread, by its ident


@dataclass(frozen=True, slots=True)
class MaskWork:
    matcher: Matcher
    ask: BuildMask
    effort: RequestEffort  # the account to charge, even if the request has ended meanwhile


@dataclass(frozen=True, slots=True)
class Filled:
    """The outcome of one mask: the mask or an error, and the processor time that it took."""

    work: MaskWork
    outcome: MaskReady | BaseException
    seconds: float


def thread_seconds(ident: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


class _Thread:
    """The state of one thread of a worker: its ids and its current work."""

    __slots__ = ("began_s", "ident", "is_abandoned", "native_id", "work")

    def __init__(self) -> None:
        self.ident = 0
        self.native_id = 0
        self.work: MaskWork | None = None
        self.began_s = 0.0
        self.is_abandoned = False


class MaskWorker:
    """Calls `on_filled(is_all)` in its thread when masks can be taken: with False after the first
    mask, and with True when no other work waits.
    """

    def __init__(
        self,
        name: str,
        *,
        on_filled: Callable[[bool], None],
        niceness: int = 0,
        clock: ThreadClock = thread_seconds,
    ) -> None:
        self._name = name
        self._on_filled = on_filled
        self._niceness = niceness
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: FairQueue[MaskWork] = FairQueue()
        self._filled: list[Filled] = []
        self._thread: _Thread | None = None
        self._is_closed = False

    def submit(self, work: MaskWork) -> None:
        with self._changed:
            self._queue.push(work.ask.request_id, work)
            if self._thread is None:
                self._start()
            self._changed.notify()

    def take(self) -> list[Filled]:
        with self._changed:
            filled, self._filled = self._filled, []
            return filled

    def drop(self, request_id: str) -> None:
        """Drops the work of a request that has not begun."""
        with self._changed:
            self._queue.drop(request_id)

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return not self._queue and (self._thread is None or self._thread.work is None)

    def running(self) -> tuple[MaskWork, float] | None:
        """Returns the work in progress and the processor time that it has taken so far."""
        with self._changed:
            thread = self._thread
            if thread is None or thread.work is None:
                return None
            return thread.work, self._clock(thread.ident) - thread.began_s

    def abandon(self, work: MaskWork) -> None:
        """Abandons the thread that does this work, if it still does, and starts another one."""
        with self._changed:
            thread = self._thread
            if thread is None or thread.work is not work:
                return
            thread.is_abandoned = True
            _lower(thread.native_id, LOWEST_PRIORITY)
            self._start()

    def close(self) -> None:
        """Ends the thread after the current fill. The process may end before."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _start(self) -> None:
        self._thread = _Thread()
        target, args = self._run, (self._thread,)
        threading.Thread(target=target, args=args, name=self._name, daemon=True).start()

    def _run(self, thread: _Thread) -> None:
        thread.ident = threading.get_ident()
        thread.native_id = threading.get_native_id()
        _lower(thread.native_id, self._niceness)
        while (work := self._next(thread)) is not None:
            outcome = _fill(work)
            with self._changed:
                seconds = self._clock(thread.ident) - thread.began_s
                thread.work = None
                if thread.is_abandoned or self._is_closed:
                    return
                self._filled.append(Filled(work, outcome, seconds))
                is_all, is_first = not self._queue, len(self._filled) == 1
            if is_all or is_first:
                self._on_filled(is_all)

    def _next(self, thread: _Thread) -> MaskWork | None:
        with self._changed:
            while not self._queue and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            work = self._queue.pop()
            assert work is not None
            thread.work = work
            thread.began_s = self._clock(thread.ident)
            return work


class _Captured:
    """The result or exception of a fill, as a value. The actor raises it again, which ends the
    request.

    WHY: it is a context manager because `except BaseException` belongs to the loop of an actor.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: MaskReady | BaseException = RuntimeError("the matcher has not answered")

    def __enter__(self) -> _Captured:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is not None:
            self.value = error
        return True


def _fill(work: MaskWork) -> MaskReady | BaseException:
    with _Captured() as outcome:
        outcome.value = work.matcher.fill(work.ask)
    return outcome.value


def _lower(native_id: int, niceness: int) -> None:
    """NOTE: only Linux has priorities of threads."""
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, native_id, niceness)
