"""The times of a request: its end, and the longest wait for its first step.

Times are those of time.monotonic, which all processes of a machine share. `RequestTimers` alone
owns the timers of the scheduler actor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from aserve.actors.wait_forecast import WaitForecast
from aserve.errors import AserveError, Cancelled, DeadlineExceeded, QueueTimeout
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import Refused, Retired
from aserve.messages.requests import AdmitRequest, Cancel, FailRequest, GenerateRequest
from aserve.observability.reports import SchedulerTick
from aserve.scheduling.state import SchedulerState


class Deadlines(NamedTuple):
    """`end_s` is the end of a request's timeout, `strict_s` that of its strict timeout, and
    `queue_s` that of its longest wait.
    """

    end_s: float | None
    strict_s: float | None
    queue_s: float | None
    is_timed: bool = False

    def left_s(self) -> float | None:
        """The seconds until the first of them."""
        times = [each for each in (self.end_s, self.queue_s) if each is not None]
        return max(min(times) - time.monotonic(), 0) if times else None

    def error(self, before: str) -> AserveError:
        """Returns the error of a request one of whose times ran out before something happened."""
        if self.end_s is None or (self.queue_s is not None and self.queue_s < self.end_s):
            return QueueTimeout(
                f"the request's max_queue_ms ran out before {before}", param="max_queue_ms"
            )
        return DeadlineExceeded(f"the request's timeout ran out before {before}", param="timeout")

    def set_in(self, request: AdmitRequest) -> AdmitRequest:
        """Returns the request, which is tokenized now, with these times."""
        return msgspec.structs.replace(
            request,
            deadline_s=self.end_s,
            strict_deadline_s=self.strict_s,
            queue_deadline_s=self.queue_s,
            tokenized_s=time.monotonic() if self.is_timed else None,
        )


def deadlines_from_now(request: GenerateRequest) -> Deadlines:
    now = time.monotonic()
    limits = (request.timeout_s, request.strict_timeout_s, request.max_queue_s)
    end_s, strict_s, queue_s = (None if limit is None else now + limit for limit in limits)
    return Deadlines(end_s, strict_s, queue_s, request.started_s is not None)


def deadlines_of(request: AdmitRequest) -> Deadlines:
    return Deadlines(request.deadline_s, request.strict_deadline_s, request.queue_deadline_s)


@asynccontextmanager
async def until_left(gone: asyncio.Future[None], deadlines: Deadlines) -> AsyncIterator[None]:
    """Cancels what a block awaits when the client leaves, which completes `gone`, or a time of its
    request runs out. Then it raises the error with which the request ends.
    """
    task = asyncio.current_task()
    assert task is not None

    def cancel(_: asyncio.Future[None]) -> None:
        task.cancel()

    gone.add_done_callback(cancel)
    limit = asyncio.timeout(deadlines.left_s())
    try:
        async with limit:
            yield
    except asyncio.CancelledError:
        if not gone.done():
            raise
        task.uncancel()
    except TimeoutError:
        if not limit.expired():
            raise
        raise deadlines.error("its prompt was tokenized") from None
    finally:
        gone.remove_done_callback(cancel)
    if gone.done():
        raise Cancelled("the client went away before its request was prepared")


class RequestTimers:
    """Refuses a request that cannot keep its times. Sends a Cancel at the end of a request's
    timeout, and a FailRequest at the end of its wait, if it has no row by then.
    """

    def __init__(
        self,
        state: SchedulerState,
        send: Callable[[Cancel | FailRequest], None],
    ) -> None:
        self.forecast = WaitForecast(state)
        self._state = state
        self._send = send
        self._ends: dict[str, asyncio.TimerHandle] = {}
        self._waits: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._ends) + len(self._waits)

    def start(self, request: AdmitRequest, earlier: Iterable[SchedulerEvent]) -> None:
        """Raises if the forecast says that the request cannot keep its times. Those `earlier` are
        received in the same tick.
        """
        self.forecast.check(request, earlier)
        loop, now = asyncio.get_running_loop(), time.monotonic()
        request_id = request.request_id
        if request.deadline_s is not None:
            cancel = Cancel(request_id, None, 0, "deadline")
            left_s = max(request.deadline_s - now, 0)
            self._ends[request_id] = loop.call_later(left_s, self._send, cancel)
        if request.queue_deadline_s is not None and not request.is_resumed:
            left_s = max(request.queue_deadline_s - now, 0)
            self._waits[request_id] = loop.call_later(left_s, self._end_wait, request_id)

    def on_tick(self, tick: SchedulerTick) -> None:
        """Stops the wait of requests of which a sequence got a row, and all timers of those whose
        last child has ended.
        """
        self.forecast.on_tick(tick)
        for admitted in tick.admitted:
            self._stop(self._waits, admitted.request_id)
        for effect in tick.effects:
            match effect:
                case Retired(request_id=name) | Refused(request_id=name):
                    if name not in self._state.groups:
                        self.clear(name)
                case _:
                    pass

    def clear(self, request_id: str) -> None:
        """Stops the timers of a request that has ended."""
        self._stop(self._waits, request_id)
        self._stop(self._ends, request_id)

    def close(self) -> None:
        for request_id in {*self._ends, *self._waits}:
            self.clear(request_id)

    def _stop(self, timers: dict[str, asyncio.TimerHandle], request_id: str) -> None:
        timer = timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _end_wait(self, request_id: str) -> None:
        del self._waits[request_id]
        self._send(FailRequest(request_id, self.forecast.late()))
