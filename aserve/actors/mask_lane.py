"""A lane of mask work: a thread that fills masks, serving requests in turn.

A fill is one call into xgrammar, which cannot be interrupted. A lane that is stuck in one therefore
gets a new thread; the old one is left behind at the lowest priority and ends with its call.
What both sides share is written under the lock; it must not know budgets.
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

from aserve.grammar.fair_queue import FairQueue
from aserve.grammar.mask_budget import RequestEffort
from aserve.grammar.matching import Matcher
from aserve.messages.results import BuildMask, MaskReady

LOWEST = 19  # of Linux's priorities, which there belong to threads
# Processor seconds of a thread, by its ident.
ThreadClock: TypeAlias = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class MaskWork:
    """`effort` is what the mask is charged to, even if its request has gone meanwhile."""

    matcher: Matcher
    ask: BuildMask
    effort: RequestEffort


@dataclass(frozen=True, slots=True)
class Filled:
    """The outcome of one mask: the mask or an error, and the processor time that it took."""

    work: MaskWork
    outcome: MaskReady | BaseException
    seconds: float


def thread_seconds(ident: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


class _Seat:
    """One thread of a lane, and what it is at."""

    __slots__ = ("began_s", "ident", "is_left", "native_id", "work")

    def __init__(self) -> None:
        self.ident = 0
        self.native_id = 0
        self.work: MaskWork | None = None
        self.began_s = 0.0
        self.is_left = False


class MaskLane:
    """`on_filled` is called by the lane's thread when masks are there to be taken: as soon as the
    first one is (`is_all` False), and when nothing else waits (True).
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
        self._seat: _Seat | None = None
        self._is_closed = False

    def submit(self, work: MaskWork) -> None:
        with self._changed:
            self._queue.push(work.ask.request_id, work)
            if self._seat is None:
                self._start()
            self._changed.notify()

    def take(self) -> list[Filled]:
        with self._changed:
            filled, self._filled = self._filled, []
            return filled

    def drop(self, request_id: str) -> None:
        """Drops the masks that the request still waits for."""
        with self._changed:
            self._queue.drop(request_id)

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return not self._queue and (self._seat is None or self._seat.work is None)

    def running(self) -> tuple[MaskWork, float] | None:
        """The mask that is being filled, and the processor time it took so far."""
        with self._changed:
            seat = self._seat
            if seat is None or seat.work is None:
                return None
            return seat.work, self._clock(seat.ident) - seat.began_s

    def abandon(self, work: MaskWork) -> None:
        """Gives up a mask that is being filled, if it still is."""
        with self._changed:
            seat = self._seat
            if seat is None or seat.work is not work:
                return
            seat.is_left = True
            _lower(seat.native_id, LOWEST)
            self._start()

    def close(self) -> None:
        """Its thread ends after the current fill, and does not keep the process from ending."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _start(self) -> None:
        self._seat = _Seat()
        thread = threading.Thread(target=self._run, args=(self._seat,), daemon=True)
        thread.name = self._name
        thread.start()

    def _run(self, seat: _Seat) -> None:
        seat.ident = threading.get_ident()
        seat.native_id = threading.get_native_id()
        _lower(seat.native_id, self._niceness)
        while (work := self._next(seat)) is not None:
            outcome = _fill(work)
            with self._changed:
                seconds = self._clock(seat.ident) - seat.began_s
                seat.work = None
                if seat.is_left or self._is_closed:
                    return
                self._filled.append(Filled(work, outcome, seconds))
                is_all, is_first = not self._queue, len(self._filled) == 1
            if is_all or is_first:
                self._on_filled(is_all)

    def _next(self, seat: _Seat) -> MaskWork | None:
        with self._changed:
            while not self._queue and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            work = self._queue.pop()
            assert work is not None
            seat.work = work
            seat.began_s = self._clock(seat.ident)
            return work


class _Outcome:
    """WHY: not an `except`, because whatever the matcher raises becomes a value here; the actor
    raises it again where it ends that request.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: MaskReady | BaseException = RuntimeError("the matcher has not answered")

    def __enter__(self) -> _Outcome:
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
    with _Outcome() as outcome:
        outcome.value = work.matcher.fill(work.ask)
    return outcome.value


def _lower(native_id: int, niceness: int) -> None:
    """NOTE: only Linux has priorities of threads."""
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, native_id, niceness)
