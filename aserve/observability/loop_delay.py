"""Measures how late the event loop is: the time from when a timer was due to when it fires.

Whatever holds the loop or the interpreter lock shows here, and every client feels it. The timer
fires every INTERVAL_S, so a loop iteration of t seconds is measured as t - INTERVAL_S to t.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge, Histogram

INTERVAL_S = 0.02
BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class LoopDelay:
    def __init__(
        self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._due_s = 0.0
        self._max_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._delay_s = Histogram(
            "aserve_event_loop_delay_seconds",
            "How late a timer of the event loop fired",
            buckets=BUCKETS_S,
            registry=registry,
        )
        longest = Gauge(
            "aserve_event_loop_max_delay_seconds",
            "The longest delay of the event loop since the start",
            registry=registry,
        )
        longest.set_function(lambda: self._max_s)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = self._clock() + INTERVAL_S
        self._timer = loop.call_later(INTERVAL_S, self.fire, loop)

    def fire(self, loop: asyncio.AbstractEventLoop) -> None:
        delay_s = max(0.0, self._clock() - self._due_s)
        self._max_s = max(self._max_s, delay_s)
        self._delay_s.observe(delay_s)
        self.start(loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
