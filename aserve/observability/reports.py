"""What observers are told about one turn of the scheduler: values, after everything was performed.

Must not know who observes; written by the scheduler actor, once per turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from aserve.messages.base import Message, Record
from aserve.messages.executor import SchedulerEffect, SchedulerEvent
from aserve.messages.results import StepFailed, StepResult
from aserve.messages.step import Launch


@dataclass(frozen=True, slots=True)
class Seat:
    """A sequence got a row, and step `iteration` is the first that names it there."""

    request_id: str
    child: int
    row: int
    iteration: int


@dataclass(frozen=True, slots=True)
class SchedulerTick:
    events: list[SchedulerEvent]
    effects: list[SchedulerEffect]
    seats: tuple[Seat, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0


class SchedulerObserver(Protocol):
    def on_tick(self, tick: SchedulerTick) -> None: ...


class LaunchedSteps(Record, frozen=True):
    """Those of a turn; all but the tokens is as of the last of them."""

    num_steps: int
    iteration: int
    num_prefill_tokens: int
    num_retracted: int
    total_pages: int


class TurnReport(Message, frozen=True):
    """`seated` are the requests of which a sequence got a row."""

    seated: tuple[str, ...] = ()
    num_finished: int = 0
    num_failed: int = 0
    launched: LaunchedSteps | None = None
    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0


class GrammarKnown(Message, frozen=True):
    """A request's grammar was known, good or bad, or just being compiled."""


class GrammarCompiled(Message, frozen=True):
    """`outcome` is ok or an error's code: grammar_timeout, grammar_too_large, ..."""

    outcome: str
    seconds: float


class Beat(Message, frozen=True):
    """An engine's loop turns; `backlogs` are the messages that wait for each of its actors."""

    backlogs: tuple[tuple[str, int], ...] = ()


GrammarReport: TypeAlias = GrammarKnown | GrammarCompiled
EngineReport: TypeAlias = TurnReport | GrammarReport | Beat


class TickReporter:
    """A SchedulerObserver that passes on what metrics need to know."""

    def __init__(self, report: Callable[[TurnReport], None]) -> None:
        self._report = report

    def on_tick(self, tick: SchedulerTick) -> None:
        self._report(report_of(tick))


def report_of(tick: SchedulerTick) -> TurnReport:
    num_finished = num_failed = 0
    for event in tick.events:
        match event:
            case StepResult():
                num_finished += 1
            case StepFailed():
                num_failed += 1
            case _:
                pass
    return TurnReport(
        seated=tuple([seat.request_id for seat in tick.seats]),
        num_finished=num_finished,
        num_failed=num_failed,
        launched=_launched(tick),
        num_running=tick.num_running,
        num_waiting=tick.num_waiting,
        used_pages=tick.used_pages,
    )


def _launched(tick: SchedulerTick) -> LaunchedSteps | None:
    launches = [effect.batches for effect in tick.effects if isinstance(effect, Launch)]
    if not launches:
        return None
    last = launches[-1][0]
    return LaunchedSteps(
        num_steps=len(launches),
        iteration=last.iteration,
        num_prefill_tokens=sum(
            [batch.stats.num_prefill_tokens for batches in launches for batch in batches]
        ),
        num_retracted=last.stats.num_retracted,
        total_pages=last.stats.total_pages,
    )
