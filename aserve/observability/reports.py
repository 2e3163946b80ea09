"""The reports about each tick of the scheduler and about grammars, which metrics and logs read.

The scheduler actor reports a tick after all its effects were performed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from aserve.messages.base import Message, Record
from aserve.messages.executor import SchedulerEffect, SchedulerEvent
from aserve.messages.results import StepFailed, StepResult
from aserve.messages.step import Launch
from aserve.observability.draft_counts import DraftCounts, count_drafts


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
    cached_pages: int = 0  # which no sequence uses
    num_waiting_clients: int = 0
    began_s: float = 0.0  # on the clock of time.monotonic, 0 if it is not known


class SchedulerObserver(Protocol):
    def on_tick(self, tick: SchedulerTick) -> None: ...


class LaunchedSteps(Record, frozen=True):
    """The steps launched in one tick. `num_prefill_tokens` and `num_decodes` are their sums, the
    numbers of rows are the largest of one step, and the rest is of the last.
    """

    num_steps: int
    iteration: int
    num_prefill_tokens: int
    num_retracted: int
    total_pages: int
    num_prefill_rows: int = 0
    num_decode_rows: int = 0
    num_decodes: int = 0  # of all rows


class TickReport(Message, frozen=True):
    """The numbers of one tick. `admitted` are the ids of requests of which a sequence got a row.

    `host_s` is how long the tick took the scheduler. `device_s` is the time of the steps that came
    back in it: of each, from its launch or from the end of the step before it, whichever was later.
    """

    admitted: tuple[str, ...] = ()
    num_finished: int = 0
    num_failed: int = 0
    launched: LaunchedSteps | None = None
    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0
    num_waiting_clients: int = 0
    cached_pages: int = 0
    host_s: float = 0.0
    device_s: float = 0.0
    drafts: DraftCounts | None = None
    ran: tuple[str, ...] = ()  # of each step that came back, on devices with graphs


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


class KvTransferred(Message, frozen=True):
    """A transfer of KV has ended. `direction` is sent or received, `outcome` ok, failed or
    cancelled; `transport` is tcp, shm, nixl, or none if it was not agreed on.
    """

    direction: str
    outcome: str
    transport: str
    num_bytes: int
    seconds: float


class TierUsed(Message, frozen=True):
    """Pages of KV went down to a tier below the prefix cache, or came up from it."""

    tier: str
    direction: str  # down or up
    num_bytes: int
    held_bytes: int | None  # by the tier now; None: others use it, too


class Beat(Message, frozen=True):
    """A heartbeat of the engine. `backlogs` are the numbers of messages in its actors' inboxes."""

    backlogs: tuple[tuple[str, int], ...] = ()


class StartupStage(Message, frozen=True):
    """The progress of the start. `done` of `total` are bytes of weights or numbers of graphs, and
    0 of 0 in a stage without a measure. The stages in their order: config, kernels, weights, graphs
    (with --cuda-graph-capture eager), warm-up, grammars (the engine serves, and waits for the
    imports of its grammar worker), started.
    """

    stage: str
    done: int = 0
    total: int = 0


class EngineDown(Message, frozen=True):
    """The engine process has closed its socket, and then `is_restart`: it is started again. Or it
    has ended because the engine sleeps.
    """

    reason: str
    is_asleep: bool = False
    is_restart: bool = False


class EngineUp(Message, frozen=True):
    """An engine process that was started again goes on with the open requests."""


GrammarReport: TypeAlias = GrammarKnown | GrammarCompiled
EngineReport: TypeAlias = (
    TickReport
    | GrammarReport
    | KvTransferred
    | TierUsed
    | Beat
    | StartupStage
    | EngineDown
    | EngineUp
    | RequestState
)


class TickReporter:
    """A SchedulerObserver that passes on the numbers of each tick, and measures its steps."""

    def __init__(
        self, report: Callable[[TickReport], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._clock = clock
        self._launched_at_s: dict[int, float] = {}  # of steps in flight, by iteration
        self._ended_at_s = 0.0  # of the last step that came back

    def on_tick(self, tick: SchedulerTick) -> None:
        now = self._clock()
        device_s = sum([self._device_s(event, now) for event in tick.events])
        for effect in tick.effects:
            if isinstance(effect, Launch):
                self._launched_at_s[effect.batches[0].iteration] = now
        host_s = now - tick.began_s if tick.began_s else 0.0
        self._report(report_of(tick, host_s=host_s, device_s=device_s))

    def _device_s(self, event: SchedulerEvent, now: float) -> float:
        if not isinstance(event, StepResult | StepFailed):
            return 0.0
        launched_at_s = self._launched_at_s.pop(event.iteration, now)
        began_s, self._ended_at_s = max(launched_at_s, self._ended_at_s), now
        return now - began_s


def report_of(tick: SchedulerTick, *, host_s: float = 0.0, device_s: float = 0.0) -> TickReport:
    num_finished = num_failed = 0
    ran: list[str] = []
    for event in tick.events:
        match event:
            case StepResult():
                num_finished += 1
                ran += [event.ran] if event.ran else []
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
        cached_pages=tick.cached_pages,
        num_waiting_clients=tick.num_waiting_clients,
        host_s=host_s,
        device_s=device_s,
        drafts=count_drafts(tick.effects),
        ran=tuple(ran),
    )


def _launched(tick: SchedulerTick) -> LaunchedSteps | None:
    launches = [effect.batches for effect in tick.effects if isinstance(effect, Launch)]
    if not launches:
        return None
    last = launches[-1][0]
    stats = [batch.stats for batches in launches for batch in batches]
    return LaunchedSteps(
        num_steps=len(launches),
        iteration=last.iteration,
        num_prefill_tokens=sum([step.num_prefill_tokens for step in stats]),
        num_retracted=last.stats.num_retracted,
        total_pages=last.stats.total_pages,
        num_prefill_rows=max([step.num_prefill_rows for step in stats]),
        num_decode_rows=max([step.num_decode_rows for step in stats]),
        num_decodes=sum([step.num_decode_rows for step in stats]),
    )
