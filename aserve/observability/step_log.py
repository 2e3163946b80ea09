"""Logs one line about a step every few seconds, with the step's statistics at its launch.

It never reads the scheduler's state: the line about step N says what N was launched with, however
late its result is and however many steps were launched since.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aserve.messages.base import num_values
from aserve.messages.results import SampleResult, StepFailed, StepResult
from aserve.messages.step import Launch, ScheduleBatch
from aserve.observability.draft_counts import DraftCounts, count_drafts
from aserve.observability.reports import SchedulerTick

logger = logging.getLogger(__name__)

LINE = (
    "step iteration=%d prefill_rows=%d prefill_tokens=%d decode_rows=%d running=%d waiting=%d "
    "cached_tokens=%d retracted=%d pages=%d/%d step_ms=%.1f tok_s=%.0f%s%s%s"
)

MAX_RATES = 8  # in accept_rates


@dataclass(slots=True)
class _Launched:
    batch: ScheduleBatch
    at_s: float
    took_s: float = 0.0
    is_back: bool = False
    failure: str = ""
    ran: str = ""


class StepLog:
    """Logs lines in launch order. With `interval_s` 0 every step has a line.

    tok_s is the number of tokens sampled since the last line, divided by the time in which steps
    were in flight, so idle time does not count. On a device with graphs a line has ran: replayed
    (as one graph), forward or pieces (its forward, as one graph or in pieces), or eager. With
    speculative decoding a line has accept_len, and accept_rates: the part of the windows that
    accepted their first draft, their second, ...
    """

    def __init__(
        self, *, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._launched: deque[_Launched] = deque()
        self._next_line_at_s = clock()
        self._num_sampled = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self._drafts = DraftCounts()  # since the last line

    def on_tick(self, tick: SchedulerTick) -> None:
        now = self._clock()
        if (drafts := count_drafts(tick.effects)) is not None:
            self._drafts += drafts
        for event in tick.events:
            match event:
                case StepResult():
                    self._num_sampled += num_values(event.tokens)
                    self._finish(event.iteration, now, ran=event.ran)
                case SampleResult():
                    self._num_sampled += num_values(event.tokens)
                case StepFailed():
                    self._finish(event.iteration, now, failure=event.error.message)
                case _:
                    pass
        for effect in tick.effects:
            if isinstance(effect, Launch):
                self._launch(effect.batches[0], now)

    def _launch(self, batch: ScheduleBatch, now: float) -> None:
        if not self._launched:
            self._busy_since_s = now
        self._launched.append(_Launched(batch, now))

    def _finish(self, iteration: int, now: float, *, failure: str = "", ran: str = "") -> None:
        for launched in self._launched:
            if launched.batch.iteration == iteration:
                launched.is_back = True
                launched.took_s = now - launched.at_s
                launched.failure = failure
                launched.ran = ran
        while self._launched and self._launched[0].is_back:
            if now >= self._next_line_at_s or self._launched[0].failure:
                self._write(self._launched[0], now)
            self._launched.popleft()
            if not self._launched:
                self._busy_s += now - self._busy_since_s

    def _write(self, step: _Launched, now: float) -> None:
        busy_s = self._busy_s + now - self._busy_since_s
        stats = step.batch.stats
        level = logging.WARNING if step.failure else logging.INFO
        logger.log(
            level,
            LINE,
            step.batch.iteration,
            stats.num_prefill_rows,
            stats.num_prefill_tokens,
            stats.num_decode_rows,
            stats.num_running,
            stats.num_waiting,
            stats.num_cached_tokens,
            stats.num_retracted,
            stats.used_pages,
            stats.total_pages,
            step.took_s * 1000,
            self._num_sampled / busy_s if busy_s > 0 else 0.0,
            f" ran={step.ran}" if step.ran else "",
            _acceptance(self._drafts),
            f" failed={step.failure!r}" if step.failure else "",
        )
        self._next_line_at_s = now + self._interval_s
        self._num_sampled = 0
        self._busy_s = 0.0
        self._busy_since_s = now
        self._drafts = DraftCounts()


def _acceptance(drafts: DraftCounts) -> str:
    """The length counts the window's own sample, too."""
    if not drafts.num_windows:
        return ""
    rates = ",".join([f"{rate:.2f}" for rate in drafts.rates[:MAX_RATES] or [0.0]])
    counts = ",".join(map(str, drafts.histogram))
    return f" accept_len={drafts.accept_len:.2f} accept_rates={rates} accept_counts={counts}"
