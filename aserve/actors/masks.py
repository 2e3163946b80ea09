"""The mask actor: keeps a matcher for each running sequence with a grammar, and has masks filled.

The actor alone writes which sequences have a matcher. The thread of a worker writes the matchers.
"""

# Theory of operation
#
# Filling a mask usually takes microseconds, but an ambiguous grammar of 30 characters slows its
# matcher down with each token, up to seconds per token. Hence:
#
# - There are two workers, each with one thread. A request starts with the fast worker. When its
#   masks have taken SLOW_S more than their allowance, it continues with the slow worker, whose
#   thread has a low priority. So an ordinary request never waits for more than one fill of a
#   request that is becoming slow.
# - A worker serves its requests by round robin, whatever number of children they have.
# - The masks of the fast worker are delivered together when no other work waits there, and at the
#   latest SLICE_S after the first: one Sample for 64 rows is much cheaper than 64. The slow worker
#   delivers each mask at once.
# - Processor time is charged to the request and its client. A request over its limit ends as a
#   whole with an error for the client. A fill cannot be interrupted, so the time of a running one
#   is checked every WATCH_S, and the worker abandons its thread when the limit is reached.
# - The scheduler is told which masks belong to a slow request: such requests get few rows
#   (scheduling/grammar_rows.py).

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, assert_never

import msgspec

from aserve.actors.base import Actor
from aserve.actors.mask_worker import Filled, MaskWork, MaskWorker, ThreadClock, thread_seconds
from aserve.channel import Channel
from aserve.errors import AserveError, BugError, ErrorInfo
from aserve.grammar.mask_budget import MaskBudget, MaskLimits, RequestEffort
from aserve.grammar.matching import Constraint, Matcher
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import Refused, Retired
from aserve.messages.requests import FailRequest
from aserve.messages.results import BuildMask

MaskEvent: TypeAlias = Constraint | BuildMask | Retired | Refused

SLICE_S = 0.002
WATCH_S = 0.1
SLOW_NICENESS = 10
# The outcome of a fill that was abandoned. The client gets the error of the exceeded limit instead.
ABANDONED = BugError("the mask was abandoned")


@dataclass(slots=True)
class _Request:
    matchers: dict[int, Matcher]  # by child, of those that still run
    effort: RequestEffort
    is_over: bool = False  # it has ended with an error, and Retired of its children will follow


class MaskActor(Actor[MaskEvent]):
    """`clock` gives the processor time of a thread, by its ident."""

    def __init__(
        self,
        *,
        scheduler: Channel[SchedulerEvent],
        budget: MaskBudget | None = None,
        clock: ThreadClock = thread_seconds,
    ) -> None:
        super().__init__("masks")
        self._scheduler = scheduler
        self._budget = budget or MaskBudget(MaskLimits())
        self._requests: dict[str, _Request] = {}
        self._fast = MaskWorker("masks", on_filled=self._fast_filled, clock=clock)
        self._slow = MaskWorker(
            "slow masks", on_filled=self._slow_filled, niceness=SLOW_NICENESS, clock=clock
        )
        self._watching: dict[MaskWorker, asyncio.TimerHandle] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await super().run()

    async def stop(self) -> None:
        await super().stop()
        for timer in self._watching.values():
            timer.cancel()
        self._watching.clear()
        self._fast.close()
        self._slow.close()

    def handle(self, events: list[MaskEvent]) -> None:
        for event in events:
            match event:
                case Constraint():
                    self._open(event)
                case BuildMask():
                    self.attempt(event.request_id, self._ask, event)
                case Retired():
                    self._retire(event)
                case Refused():
                    self._forget(event.request_id)
                case _:
                    assert_never(event)

    def end_request(self, request_id: str, error: ErrorInfo) -> None:
        """The scheduler ends all children. Until then their BuildMask messages are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            request.is_over = True
            self._drop(request_id)
        self._scheduler.send(FailRequest(request_id, error))

    def _open(self, constraint: Constraint) -> None:
        effort = RequestEffort(
            client=constraint.client, param=constraint.param, is_slow=constraint.is_slow
        )
        matchers = dict(enumerate(constraint.matchers))
        self._requests[constraint.request_id] = _Request(matchers, effort)

    def _ask(self, ask: BuildMask) -> None:
        request = self._requests.get(ask.request_id)
        if request is None or ask.child not in request.matchers:
            raise BugError(f"no matcher for child {ask.child} of {ask.request_id}")
        if request.is_over:
            return
        self._budget.check_client(request.effort)
        worker = self._slow if request.effort.is_slow else self._fast
        worker.submit(MaskWork(request.matchers[ask.child], ask, request.effort))
        if worker not in self._watching:
            self._watch_later(worker)

    def _retire(self, event: Retired) -> None:
        """Most sequences have no grammar, and so no matcher."""
        request = self._requests.get(event.request_id)
        if request is None:
            return
        request.matchers.pop(event.child, None)
        if not request.matchers:
            self._forget(event.request_id)

    def _forget(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        for worker in (self._fast, self._slow):
            worker.drop(request_id)

    def _fast_filled(self, is_all: bool) -> None:
        """Called in the worker's thread."""
        self._call(partial(self._deliver, self._fast) if is_all else self._deliver_soon)

    def _slow_filled(self, is_all: bool) -> None:
        """Called in the worker's thread."""
        self._call(partial(self._deliver, self._slow))

    def _call(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(call)

    def _deliver_soon(self) -> None:
        assert self._loop is not None
        self._loop.call_later(SLICE_S, self._deliver, self._fast)

    def _deliver(self, worker: MaskWorker) -> None:
        for filled in worker.take():
            self.attempt(filled.work.ask.request_id, self._send, filled)

    def _send(self, filled: Filled) -> None:
        """Charges the time, even if the request has ended meanwhile, and delivers the mask."""
        effort = filled.work.effort
        over = self._charged(effort, filled.seconds)
        request = self._requests.get(filled.work.ask.request_id)
        if request is None or request.is_over:
            return
        if over is not None:
            raise over
        if isinstance(filled.outcome, BaseException):
            raise filled.outcome
        ready = filled.outcome
        if effort.is_slow:
            ready = msgspec.structs.replace(ready, is_slow=True)
        self._scheduler.send(ready)

    def _charged(self, effort: RequestEffort, seconds: float) -> AserveError | None:
        try:
            self._budget.charge(effort, seconds)
        except AserveError as error:
            return error
        return None

    def _watch_later(self, worker: MaskWorker) -> None:
        assert self._loop is not None
        self._watching[worker] = self._loop.call_later(WATCH_S, self._watch, worker)

    def _watch(self, worker: MaskWorker) -> None:
        """Ends a request whose unfinished fill takes it over its limit. It repeats until the worker
        is idle.
        """
        del self._watching[worker]
        if (running := worker.running()) is not None:
            work, seconds = running
            if self._budget.is_over(work.effort, seconds):
                worker.abandon(work)
                self.attempt(work.ask.request_id, self._send, Filled(work, ABANDONED, seconds))
        if not worker.is_idle:
            self._watch_later(worker)
