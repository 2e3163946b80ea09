"""Runs requests on a scheduler and an executor directly, without actors."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError, StepError
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import Executor, SchedulerEffect, SchedulerEvent, Ticket
from aserve.messages.output import Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest
from aserve.messages.results import SampleResult, StepFailed, StepResult
from aserve.messages.step import Launch, ScheduleBatch, StepStats
from aserve.scheduling.scheduler import Scheduler


@contextlib.asynccontextmanager
async def running(executor: LocalExecutor) -> AsyncIterator[None]:
    """Starts and warms up an executor, and closes it at the end, after the steps in flight."""
    executor.start(asyncio.get_running_loop())
    try:
        await executor.warm_up()
        yield
    finally:
        executor.close()


@dataclass(frozen=True, slots=True)
class StepTime:
    """The times at which a step was launched and its result was back on the loop, in seconds of
    `time.perf_counter`.
    """

    stats: StepStats
    launched_s: float
    done_s: float
    num_tokens: int  # that its rows got
    windows: tuple[tuple[int, int], ...]  # of each row with drafts: drafts, and tokens that it got


class StepDriver:
    """Runs one load after the other with the same scheduler. `outputs` has the tokens of the last
    load by request id."""

    def __init__(self, executor: Executor) -> None:
        self.outputs: dict[str, list[int]] = {}
        self._executor = executor
        self._scheduler = Scheduler(executor.spec)
        self._flights: deque[tuple[ScheduleBatch, float, Ticket]] = deque()

    def prepare(self, events: Sequence[SchedulerEvent]) -> None:
        """Gives the scheduler what an engine gives its own at the start."""
        self._step([*events])

    def fix_drafts(self, num_rows: int, num_drafts: int) -> None:
        """See `DraftChoice.fix`."""
        self._scheduler.state.draft_choice.fix(num_rows, num_drafts)

    async def run(self, requests: Sequence[AdmitRequest]) -> list[StepTime]:
        """Runs until every request has ended, and returns the times of all steps. Raises if a
        request is refused or a step fails.
        """
        times: list[StepTime] = []
        self.outputs.clear()
        self._step(list(requests))
        while self._flights:
            batch, launched_s, ticket = self._flights.popleft()
            result = await ticket
            done_s = time.perf_counter()
            if isinstance(result, StepFailed):
                raise StepError(result.error.message)
            num_tokens = len(result.tokens) // 4
            windows = _windows(batch, result)
            times.append(StepTime(batch.stats, launched_s, done_s, num_tokens, windows))
            self._step([result])
        while self._scheduler.has_more:
            self._step([])
        return times

    def _step(self, events: list[SchedulerEvent]) -> None:
        for effect in self._scheduler.step(events):
            self._perform(effect)

    def _perform(self, effect: SchedulerEffect) -> None:
        match effect:
            case Launch(batches=(batch,)):
                flight = batch, time.perf_counter(), self._executor.launch(batch)
                self._flights.append(flight)
            case StepOutput():
                for each in effect.outputs():
                    tokens = self.outputs.setdefault(each.request_id, [])
                    tokens += array_i32(each.token_ids).tolist()
            case Refused():
                raise ConfigError(effect.error.message)
            case Retired(error=error) if error is not None:
                raise StepError(error.message)
            case _:
                pass


def _windows(
    batch: ScheduleBatch, result: StepResult | SampleResult
) -> tuple[tuple[int, int], ...]:
    if batch.verify is None:
        return ()
    rows, num_drafts = array_i32(batch.rows), array_i32(batch.verify.num_drafts)
    drafts = dict(zip(rows.tolist(), num_drafts.tolist(), strict=True))
    counts = zip(array_i32(result.rows).tolist(), array_i32(result.counts).tolist(), strict=True)
    return tuple((drafts[row], count) for row, count in counts if drafts[row])


def result_of(batch: ScheduleBatch, *, vocab_size: int) -> StepResult:
    """Returns a result with one token for each row that samples."""
    num_samples = len(array_i32(batch.sample_rows))
    return StepResult(
        iteration=batch.iteration,
        rows=batch.sample_rows,
        counts=pack_i32([1] * num_samples),
        tokens=pack_i32([batch.iteration % vocab_size] * num_samples),
    )
