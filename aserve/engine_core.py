"""The engine half of the program: it connects the scheduler, grammars, masks and the executor.

Its outputs go to `EngineCorePorts`. It builds and connects objects, and decides nothing.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aserve.actors.base import DeathReport
from aserve.actors.grammars import GrammarActor, GrammarPorts
from aserve.actors.masks import MaskActor
from aserve.actors.request_states import RequestStates
from aserve.actors.scheduler import Pump, SchedulerActor, SchedulerPorts, SchedulerWatch
from aserve.actors.supervisor import Supervised
from aserve.channel import Channel, Sink
from aserve.config import Resolved
from aserve.disagg.connect import open_transfers
from aserve.errors import AserveError, EngineDead, ErrorInfo
from aserve.grammar.compile import Vocabulary
from aserve.grammar.library import GrammarLibrary
from aserve.grammar.mask_budget import MaskBudget, MaskLimits
from aserve.grammar.matching import constrain
from aserve.grammar.workers import CompileLimits
from aserve.host.threads import in_thread
from aserve.measure_steps import warm_up
from aserve.messages.changes import EngineJob
from aserve.messages.executor import EngineSpec, Executor, SchedulerEvent
from aserve.messages.output import DetokenizerEvent
from aserve.messages.requests import EngineEvent
from aserve.messages.results import StepTimes
from aserve.observability.recording import Recorder
from aserve.observability.reports import EngineReport, TickReporter
from aserve.observability.step_log import StepLog
from aserve.observability.trace import Trace
from aserve.scheduling.scheduler import Scheduler
from aserve.tiers.connect import open_tiers

CLOSE_S = 0.5  # how long `close` waits for the current step of the device

logger = logging.getLogger(__name__)


class LocalExecutor(Executor, Protocol):
    """An executor with threads of its own."""

    about: str  # describes what was chosen for this machine
    died: asyncio.Future[BaseException]  # completes if its thread ends without `close`

    def start(self, loop: asyncio.AbstractEventLoop) -> None: ...

    async def warm_up(self) -> None: ...

    async def run_job(self, job: EngineJob) -> ErrorInfo | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineCorePorts:
    """The receivers of an engine's outputs. `report` is for metrics."""

    text: Sink[DetokenizerEvent]
    report: Callable[[EngineReport], None]
    trace: Trace


class EngineCore(Protocol):
    """The engine half, in this process or in another one."""

    spec: EngineSpec
    inbox: Sink[EngineEvent]
    actors: tuple[Supervised, ...]

    async def start(self, on_death: DeathReport) -> None:
        """Returns when the engine is ready, except for the actors, which the caller starts."""

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        """Returns None when the job is done, or else the reason why it could not be."""

    async def close(self) -> None:
        """Call it after the actors have stopped."""

    def age_s(self) -> float:
        """Returns the seconds since the last sign of life."""


class LocalEngineCore:
    """The engine half in this process. It calls `vocabulary` in a thread for the first grammar."""

    def __init__(
        self,
        executor: LocalExecutor,
        resolved: Resolved,
        *,
        ports: EngineCorePorts,
        vocabulary: Callable[[], Vocabulary],
    ) -> None:
        self.spec = executor.spec
        self._executor = executor
        debug = resolved.debug
        self._recorder = Recorder(Path(debug.record), spec=self.spec) if debug.record else None
        events: Channel[SchedulerEvent] = Channel()
        pump = Pump(results=events)
        transfers = self._transfers = open_transfers(
            executor, resolved, events=events, text=ports.text, report=ports.report
        )
        tiers = open_tiers(executor, resolved, transfers, events=events, report=ports.report)
        masks = MaskActor(scheduler=events, budget=_mask_budget(resolved))
        machine = Scheduler(self.spec, debug_checks=debug.debug_checks)
        states = RequestStates(machine.state, ports.report)
        observers = (states, TickReporter(ports.report), StepLog())
        scheduler = SchedulerActor(
            machine,
            SchedulerPorts(executor, pump.inbox, transfers.text, masks.inbox, tiers.kv),
            watch=SchedulerWatch(ports.trace, observers, self._recorder),
            inbox=events,
        )
        self.grammars = _grammar_library(resolved, vocabulary, ports.report)
        grammars = GrammarActor(
            functools.partial(constrain, self.grammars),
            GrammarPorts(tiers.requests, masks.inbox, ports.text),
        )
        self._events = events
        self.inbox: Sink[EngineEvent] = grammars.inbox
        self.actors: tuple[Supervised, ...] = (
            *(pump, masks, scheduler, grammars),
            *tiers.actors,
        )

    async def start(self, on_death: DeathReport) -> None:
        executor = self._executor
        executor.start(asyncio.get_running_loop())
        executor.died.add_done_callback(functools.partial(_report_death, on_death))
        for event in await _warmed_up(executor):
            self._events.send(event)

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        return await self._transfers.run_job(job, self._executor.run_job(job))

    async def close(self) -> None:
        await in_thread(self.grammars.close, name="close")
        await self._close_executor()
        if self._recorder is not None:
            self._recorder.close()

    def age_s(self) -> float:
        """Returns 0, because a caller shares its loop."""
        return 0.0

    async def _close_executor(self) -> None:
        """Waits CLOSE_S at most. A longer step is left behind in its daemon thread."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await in_thread(self._executor.close, name="close")
        except TimeoutError:
            logger.warning("the device still runs a step: its thread is left behind")


def _report_death(on_death: DeathReport, died: asyncio.Future[BaseException]) -> None:
    """Reports a death, unless the future was cancelled, as it is by an ordinary end."""
    if not died.cancelled():
        on_death("executor", died.result())


async def _warmed_up(executor: LocalExecutor) -> list[StepTimes]:
    """Runs the first steps. Raises EngineDead if the executor dies, as it would never answer."""
    try:
        async with asyncio.TaskGroup() as group:
            step = group.create_task(warm_up(executor))
            executor.died.add_done_callback(lambda _: step.cancel())
    except* AserveError as errors:
        raise errors.exceptions[0] from None
    if step.cancelled():
        raise EngineDead(f"the executor died in its first step: {executor.died.result()!r}")
    return step.result()


def _mask_budget(resolved: Resolved) -> MaskBudget:
    options = resolved.grammar
    return MaskBudget(MaskLimits(options.grammar_mask_time, options.grammar_client_mask_time))


def _grammar_library(
    resolved: Resolved,
    vocabulary: Callable[[], Vocabulary],
    report: Callable[[EngineReport], None],
) -> GrammarLibrary:
    options = resolved.grammar
    return GrammarLibrary(
        vocabulary,
        CompileLimits(
            timeout_s=options.grammar_timeout,
            memory_bytes=options.grammar_memory,
            num_workers=options.grammar_workers,
        ),
        cache_bytes=options.grammar_cache,
        report=report,
    )
