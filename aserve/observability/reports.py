"""What metrics hear of an engine, as values: small, so that they may come from another process.

Must not know metrics. Made of the scheduler's turns, by the grammar library, and by a link's beat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from aserve.messages import Launch, Message, Record, StepFailed, StepResult
from aserve.observability.turn import SchedulerTurn


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


class TurnReporter:
    """A SchedulerObserver that passes on what metrics need to know."""

    def __init__(self, report: Callable[[TurnReport], None]) -> None:
        self._report = report

    def turned(self, turn: SchedulerTurn) -> None:
        self._report(report_of(turn))


def report_of(turn: SchedulerTurn) -> TurnReport:
    num_finished = num_failed = 0
    for event in turn.events:
        match event:
            case StepResult():
                num_finished += 1
            case StepFailed():
                num_failed += 1
            case _:
                pass
    return TurnReport(
        seated=tuple([seat.request_id for seat in turn.seats]),
        num_finished=num_finished,
        num_failed=num_failed,
        launched=_launched(turn),
        num_running=turn.num_running,
        num_waiting=turn.num_waiting,
        used_pages=turn.used_pages,
    )


def _launched(turn: SchedulerTurn) -> LaunchedSteps | None:
    batches = [effect.batch for effect in turn.effects if isinstance(effect, Launch)]
    if not batches:
        return None
    last = batches[-1].stats
    return LaunchedSteps(
        num_steps=len(batches),
        iteration=batches[-1].iteration,
        num_prefill_tokens=sum([batch.stats.num_prefill_tokens for batch in batches]),
        num_retracted=last.num_retracted,
        total_pages=last.total_pages,
    )
