"""The engine's condition as its reports tell it: how far the start is, and whether steps come back.

It never asks the engine, so that a health probe costs the same whatever the engine does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from aserve.observability.reports import (
    EngineDown,
    EngineReport,
    EngineUp,
    StartupStage,
    TickReport,
)


class EngineWatch:
    """Reads every report of the engine. `stage` is the present stage of the start, or its last."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.stage = StartupStage("config")
        self.down_reason = ""  # why the engine has died, while it is started again
        self.is_asleep = False  # its process has ended on purpose
        self.waits_for_grammars = False  # in the first start, not in later ones
        self._has_started = False
        self._clock = clock
        self._created_at_s = clock()
        self._num_in_flight = 0  # steps without a result
        self._progress_at_s = 0.0  # the last time that a step came back, or the first was launched

    def on_report(self, report: EngineReport) -> None:
        match report:
            case StartupStage():
                self.stage = report
                self._has_started |= report.stage == "started"
                self.waits_for_grammars = report.stage == "grammars" and not self._has_started
            case TickReport():
                self._count(report)
            case EngineDown():
                self.is_asleep = report.is_asleep
                self.down_reason = "" if report.is_asleep else report.reason
                self._num_in_flight = 0
            case EngineUp():
                self.down_reason, self.is_asleep = "", False
            case _:
                pass

    def startup_age_s(self) -> float:
        return self._clock() - self._created_at_s

    def step_age_s(self) -> float:
        """Returns for how long steps have been in flight without a result of any, or 0."""
        return self._clock() - self._progress_at_s if self._num_in_flight else 0.0

    def _count(self, report: TickReport) -> None:
        num_returned = report.num_finished + report.num_failed
        if num_returned or not self._num_in_flight:
            self._progress_at_s = self._clock()
        if report.launched is not None:
            self._num_in_flight += report.launched.num_steps
        self._num_in_flight -= num_returned


class StageReporter:
    """Sends the stages of a start: each stage once, and again for each full percent of it. It is
    called in the thread that loads, and `call` runs `send` where it belongs.
    """

    def __init__(
        self, send: Callable[[StartupStage], None], *, call: Callable[..., object]
    ) -> None:
        self._send = send
        self._call = call
        self._last = ("", 0)

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        reached = (stage, percent_of(done, total))
        if reached != self._last:
            self._last = reached
            self._call(self._send, StartupStage(stage, done, total))


def percent_of(done: int, total: int) -> int:
    return 100 * min(done, total) // total if total else 0
