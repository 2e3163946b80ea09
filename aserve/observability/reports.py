"""The reports about each tick of the scheduler and about grammars, which metrics and logs read.

The scheduler actor reports a tick after all its effects were performed.
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
class Admitted:
    """A sequence that got a row; step `iteration` is the first with this row."""

    request_id: str
    child: int
    row: int
    iteration: int


@dataclass(frozen=True, slots=True)
class SchedulerTick:
    events: list[SchedulerEvent]
    effects: list[SchedulerEffect]
    admitted: tuple[Admitted, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0
    num_waiting_clients: int = 0


class SchedulerObserver(Protocol):
    def on_tick(self, tick: SchedulerTick) -> None: ...


class LaunchedSteps(Record, frozen=True):
    """The steps launched in one tick. `num_prefill_tokens` is their sum, the rest is of the
    last.
    """

    num_steps: int
    iteration: int
    num_prefill_tokens: int
    num_retracted: int
    total_pages: int


class TickReport(Message, frozen=True):
    """The numbers of one tick. `admitted` are the ids of requests of which a sequence got a row."""

    admitted: tuple[str, ...] = ()
    num_finished: int = 0
    num_failed: int = 0
    launched: LaunchedSteps | None = None
    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0
    num_waiting_clients: int = 0


class RequestState(Message, frozen=True):
    """A timed request entered a state (see latency.py), or got `num_chunks` prefill chunks in it.
    Times are those of time.monotonic.
    """

    request_id: str
    state: str
    at_s: float
    num_chunks: int = 0


class GrammarKnown(Message, frozen=True):
    """The grammar of a request was in the cache, valid or not, or was being compiled."""


class GrammarCompiled(Message, frozen=True):
    """A grammar was compiled. `outcome` is ok or an error code, such as grammar_timeout."""

    outcome: str
    seconds: float


class Beat(Message, frozen=True):
    """A heartbeat of the engine. `backlogs` are the numbers of messages in its actors' inboxes."""

    backlogs: tuple[tuple[str, int], ...] = ()


class StartupStage(Message, frozen=True):
    """The progress of the start. `done` of `total` are bytes of weights or numbers of graphs, and
    0 of 0 in a stage without a measure. The stages in their order: config, kernels, weights, graphs
    (with --cuda-graph-capture eager), warm-up.
    """

    stage: str
    done: int = 0
    total: int = 0


class EngineDown(Message, frozen=True):
    """The engine process has died and is started again."""

    reason: str


class EngineUp(Message, frozen=True):
    """An engine process that was started again goes on with the open requests."""


GrammarReport: TypeAlias = GrammarKnown | GrammarCompiled
EngineReport: TypeAlias = (
    TickReport | GrammarReport | Beat | StartupStage | EngineDown | EngineUp | RequestState
)


class TickReporter:
    """A SchedulerObserver that passes on the numbers of each tick."""

    def __init__(self, report: Callable[[TickReport], None]) -> None:
        self._report = report

    def on_tick(self, tick: SchedulerTick) -> None:
        self._report(report_of(tick))


def report_of(tick: SchedulerTick) -> TickReport:
    num_finished = num_failed = 0
    for event in tick.events:
        match event:
            case StepResult():
                num_finished += 1
            case StepFailed():
                num_failed += 1
            case _:
                pass
    return TickReport(
        admitted=tuple([item.request_id for item in tick.admitted]),
        num_finished=num_finished,
        num_failed=num_failed,
        launched=_launched(tick),
        num_running=tick.num_running,
        num_waiting=tick.num_waiting,
        used_pages=tick.used_pages,
        num_waiting_clients=tick.num_waiting_clients,
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
