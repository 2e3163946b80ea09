"""Estimates how long a request will wait, and refuses what cannot be served in its time.

The scheduler reads no clock, so the rates are measured here, from the steps of each tick: seconds
per step, prompt tokens per second (cached ones included), and tokens per answer. Each is an
exponentially weighted mean. A sample counts at most 4 times the mean, so that one step that stood
still for seconds does not lead to refusals. There is no estimate before the first steps and
answers, and without an estimate nobody is refused; nor is a request that nothing comes before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import msgspec

from aserve.errors import (
    CapacityError,
    DeadlineUnreachable,
    ErrorInfo,
    ExpectedWait,
    QueueFull,
    QueueTimeout,
)
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import Refused, Retired
from aserve.messages.requests import AdmitRequest
from aserve.messages.results import StepResult
from aserve.messages.step import Launch, StepStats
from aserve.observability.reports import SchedulerTick
from aserve.scheduling.ahead import (
    Ahead,
    Snapshot,
    ahead_of,
    everything,
    num_cached,
    place_of,
    snapshot_of,
)
from aserve.scheduling.state import SchedulerState

WEIGHT = 0.1  # of a new sample
MIN_SAMPLES = 4
MOST_TIMES = 4.0  # the mean that a sample counts at most
MIN_RETRY_S, MAX_RETRY_S = 1.0, 3600.0


class Mean:
    """An exponentially weighted mean of positive samples; None before MIN_SAMPLES of them."""

    __slots__ = ("_mean", "_num_samples")

    def __init__(self) -> None:
        self._mean = 0.0
        self._num_samples = 0

    @property
    def value(self) -> float | None:
        return self._mean if self._num_samples >= MIN_SAMPLES else None

    def add(self, sample: float) -> None:
        self._num_samples += 1
        if self._num_samples > MIN_SAMPLES:
            sample = min(sample, MOST_TIMES * self._mean)
        self._mean += (sample - self._mean) * max(WEIGHT, 1 / self._num_samples)


class WaitForecast:
    """`on_tick` alone writes the means. PERF: the queue is looked through, and the wait at its end
    computed, at most once in a tick, since many requests of a flood may be judged in it.
    """

    def __init__(self, state: SchedulerState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._launched: dict[int, tuple[float, StepStats]] = {}  # by iteration, with the time
        self._last_result_s = 0.0
        self._step_s = Mean()
        self._prompt_token_s = Mean()
        self._num_outputs = Mean()
        self._at_end: ExpectedWait | None = None
        self._queue: Snapshot | None = None

    def on_tick(self, tick: SchedulerTick) -> None:
        now = self._clock()
        self._at_end = self._queue = None
        for event in tick.events:
            if isinstance(event, StepResult):
                self._note_result(event.iteration, now)
        for effect in tick.effects:
            match effect:
                case Launch():
                    batch = effect.batches[0]
                    self._launched[batch.iteration] = (now, batch.stats)
                case Retired(reason="stop" | "length", num_outputs=num_outputs) if num_outputs:
                    self._num_outputs.add(num_outputs)
                case _:
                    pass

    def check(self, request: AdmitRequest, earlier: Iterable[SchedulerEvent]) -> None:
        """Raises if the request cannot keep its longest wait or its strict deadline. Those
        `earlier` are received in the same tick.
        """
        has_limits = request.strict_deadline_s is not None or request.queue_deadline_s is not None
        if not has_limits or request.is_resumed:
            return
        before = [event for event in earlier if isinstance(event, AdmitRequest)]
        ahead = ahead_of(self._snapshot(), request, earlier=before)
        wait_s = self.wait_s(ahead)
        if wait_s == 0.0:
            return
        now = self._clock()
        expected = _expected(ahead, wait_s)
        if request.queue_deadline_s is not None and now + (wait_s or 0) > request.queue_deadline_s:
            raise queue_timeout(expected)
        if request.strict_deadline_s is None or wait_s is None:
            return
        needed_s = wait_s + self._answer_s(request)
        if now + needed_s > request.strict_deadline_s:
            raise _with_retry(
                DeadlineUnreachable,
                f"The request waits at position {expected.queue_position} of the queue, and its "
                f"answer would need at least {needed_s:.3f} s, more than the "
                f"{max(request.strict_deadline_s - now, 0):.3f} s that its deadline leaves.",
                expected,
                param="deadline_ms",
            )

    def wait_s(self, ahead: Ahead) -> float | None:
        """Returns the seconds until the first step of a request, None if they cannot be known."""
        if ahead.is_nothing:
            return 0.0
        num_steps = ahead.steps_to_row(self._num_outputs.value)
        token_s, step_s = self._prompt_token_s.value, self._step_s.value
        if num_steps is None or token_s is None or step_s is None:
            return None
        return max(num_steps * step_s, ahead.num_tokens * token_s)

    def late(self) -> ErrorInfo:
        """Returns the error of a request whose longest wait has passed."""
        return queue_timeout(self.at_end()).info()

    def at_end(self) -> ExpectedWait:
        """The wait at the end of the queue."""
        if self._at_end is None:
            ahead = everything(self._snapshot())
            self._at_end = _expected(ahead, self.wait_s(ahead))
        return self._at_end

    def explained(self, end: Retired | Refused) -> Retired | Refused:
        """Adds the expected wait to the refusal by a full queue."""
        error = end.error
        if error is None or error.code != QueueFull.code or error.wait is not None:
            return end
        wait = self.at_end()
        error = msgspec.structs.replace(error, retry_after_s=_retry_after_s(wait), wait=wait)
        return msgspec.structs.replace(end, error=error)

    def _snapshot(self) -> Snapshot:
        if self._queue is None:
            self._queue = snapshot_of(self._state)
        return self._queue

    def _note_result(self, iteration: int, now: float) -> None:
        """Notes how long the device took for the step, which began after the one before it."""
        for number in [each for each in self._launched if each < iteration]:
            del self._launched[number]  # dropped after a failure
        launched = self._launched.pop(iteration, None)
        if launched is not None:
            launched_s, stats = launched
            took_s = now - max(launched_s, self._last_result_s)
            num_tokens = stats.num_prefill_tokens + stats.num_cached_tokens
            if num_tokens:
                self._prompt_token_s.add(took_s / num_tokens)
            self._step_s.add(took_s)
        self._last_result_s = now

    def _answer_s(self, request: AdmitRequest) -> float:
        """The least time that the answer can take once it has begun."""
        place = place_of(request)
        num_tokens = place.num_tokens - num_cached(self._state, request)
        least = place.max_tokens if place.runs_to_max else request.sampling.min_tokens
        token_s, step_s = self._prompt_token_s.value or 0.0, self._step_s.value or 0.0
        return num_tokens * token_s + max(least - place.num_outputs - 1, 0) * step_s


def queue_timeout(expected: ExpectedWait) -> CapacityError:
    wait_ms = expected.expected_wait_ms
    about = "" if wait_ms is None else f", and is expected to wait {wait_ms} ms more"
    return _with_retry(
        QueueTimeout,
        f"The request's max_queue_ms does not suffice: it stands at position "
        f"{expected.queue_position} of the queue{about}.",
        expected,
        param="max_queue_ms",
    )


def _expected(ahead: Ahead, wait_s: float | None) -> ExpectedWait:
    wait_ms = None if wait_s is None else math.ceil(1000 * wait_s)
    return ExpectedWait(len(ahead.places) + 1, wait_ms)


def _with_retry(
    kind: type[CapacityError], message: str, expected: ExpectedWait, *, param: str
) -> CapacityError:
    return kind(message, param=param, retry_after_s=_retry_after_s(expected), wait=expected)


def _retry_after_s(expected: ExpectedWait) -> float:
    """Returns the expected wait, after which the place that the request asked for is free."""
    wait_s = (expected.expected_wait_ms or 0) / 1000
    return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)
