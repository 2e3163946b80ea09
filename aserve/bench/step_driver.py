"""The scheduler's values and an executor, and nothing else: no actors, no text, no queues between.

Tickets are awaited directly, in launch order. It decides nothing, and knows no bench. Steps run as
far ahead as the executor's spec says.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from aserve.errors import ConfigError, StepError
from aserve.messages import (
    AdmitRequest,
    Executor,
    Launch,
    Refused,
    Retired,
    SchedulerEffect,
    SchedulerEvent,
    StepFailed,
    StepStats,
    Ticket,
)
from aserve.scheduling.state import SchedulerState


@dataclass(frozen=True, slots=True)
class StepTime:
    """In seconds of `time.perf_counter`: given to the executor, and back on the loop."""

    stats: StepStats
    launched_s: float
    done_s: float


class StepDriver:
    """Serves one load after the other; the state that lives on is the scheduler's."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._state = SchedulerState(executor.spec)
        self._flights: deque[tuple[StepStats, float, Ticket]] = deque()

    async def run(self, requests: Sequence[AdmitRequest]) -> list[StepTime]:
        """All steps until every request has ended; a refusal and a failed step are raised."""
        times: list[StepTime] = []
        self._step(list(requests))
        while self._flights:
            stats, launched_s, ticket = self._flights.popleft()
            result = await ticket
            times.append(StepTime(stats, launched_s, time.perf_counter()))
            if isinstance(result, StepFailed):
                raise StepError(result.error.message)
            self._step([result])
        return times

    def _step(self, events: list[SchedulerEvent]) -> None:
        for effect in self._state.step(events):
            self._perform(effect)

    def _perform(self, effect: SchedulerEffect) -> None:
        match effect:
            case Launch(batch=batch):
                flight = batch.stats, time.perf_counter(), self._executor.launch(batch)
                self._flights.append(flight)
            case Refused():
                raise ConfigError(effect.error.message)
            case Retired(error=error) if error is not None:
                raise StepError(error.message)
            case _:
                pass
