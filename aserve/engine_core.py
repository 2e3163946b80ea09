"""The engine's half of the program: scheduler, grammars, masks, the device, and who looks on.

Must not know clients, text or HTTP: what comes out goes to `EngineCorePorts`. Builds its objects,
and decides nothing.
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
from aserve.actors.scheduler import Pump, SchedulerActor, SchedulerPorts, SchedulerWatch
from aserve.actors.supervisor import Supervised
from aserve.channel import Channel, Codec, Sink
from aserve.config import Resolved
from aserve.errors import AserveError, EngineDead
from aserve.grammar.frames import Vocabulary
from aserve.grammar.library import GrammarLibrary
from aserve.grammar.mask_budget import MaskBudget, MaskLimits
from aserve.grammar.matching import constrain
from aserve.grammar.workers import CompileLimits
from aserve.host.threads import in_thread
from aserve.messages.executor import EngineSpec, Executor, SchedulerEvent
from aserve.messages.output import DetokenizerEvent
from aserve.messages.requests import EngineEvent
from aserve.observability.recording import Recorder
from aserve.observability.reports import EngineReport, TickReporter
from aserve.observability.step_log import StepLog
from aserve.observability.trace import Trace
from aserve.scheduling.scheduler import Scheduler

CLOSE_S = 0.5  # what the device may take for its current step when all is over

logger = logging.getLogger(__name__)


class LocalExecutor(Executor, Protocol):
    """An executor with threads of its own."""

    about: str  # what was chosen for this machine, in a few words
    died: asyncio.Future[BaseException]  # completes if its thread ends without `close`

    def start(self, loop: asyncio.AbstractEventLoop) -> None: ...

    async def warm_up(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineCorePorts:
    """Where what comes out of an engine goes. `report` is for metrics."""

    text: Sink[DetokenizerEvent]
    report: Callable[[EngineReport], None]
    trace: Trace


class EngineCore(Protocol):
    """An engine's half, wherever it runs."""

    spec: EngineSpec
    inbox: Sink[EngineEvent]
    actors: tuple[Supervised, ...]

    async def start(self, on_death: DeathReport) -> None:
        """Ready when this returns, but for the actors, which the caller starts."""

    async def close(self) -> None:
        """After the actors have stopped."""

    def age_s(self) -> float:
        """Seconds since it was last heard of."""


class LocalEngineCore:
    """In this process. `vocabulary` is asked for in a thread, when the first grammar comes."""

    def __init__(
        self,
        executor: LocalExecutor,
        resolved: Resolved,
        *,
        ports: EngineCorePorts,
        vocabulary: Callable[[], Vocabulary],
        codec: bool = False,
    ) -> None:
        self.spec = executor.spec
        self._executor = executor
        debug = resolved.debug
        self._recorder = Recorder(Path(debug.record), spec=self.spec) if debug.record else None
        events: Channel[SchedulerEvent] = Channel(codec=Codec(SchedulerEvent) if codec else None)
        pump = Pump(results=events)
        masks = MaskActor(scheduler=events, budget=_mask_budget(resolved))
        observers = (TickReporter(ports.report), StepLog())
        scheduler = SchedulerActor(
            Scheduler(self.spec, debug_checks=debug.debug_checks),
            SchedulerPorts(executor, pump.inbox, ports.text, masks.inbox),
            watch=SchedulerWatch(ports.trace, observers, self._recorder),
            inbox=events,
        )
        self._library = _grammar_library(resolved, vocabulary, ports.report)
        grammars = GrammarActor(
            functools.partial(constrain, self._library),
            GrammarPorts(events, masks.inbox, ports.text),
            codec=Codec(EngineEvent) if codec else None,
        )
        self.inbox: Sink[EngineEvent] = grammars.inbox
        self.actors: tuple[Supervised, ...] = (pump, masks, scheduler, grammars)

    async def start(self, on_death: DeathReport) -> None:
        executor = self._executor
        executor.start(asyncio.get_running_loop())
        executor.died.add_done_callback(functools.partial(_report_death, on_death))
        await _warmed_up(executor)

    async def close(self) -> None:
        await in_thread(self._library.close, name="close")
        await self._close_executor()
        if self._recorder is not None:
            self._recorder.close()

    def age_s(self) -> float:
        """Who can ask shares its loop."""
        return 0.0

    async def _close_executor(self) -> None:
        """Not for ever: a step may be a long one, and its thread doesn't keep the process."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await in_thread(self._executor.close, name="close")
        except TimeoutError:
            logger.warning("the device still runs a step: its thread is left behind")


def _report_death(on_death: DeathReport, died: asyncio.Future[BaseException]) -> None:
    """The executor's future is cancelled by an ordinary end."""
    if not died.cancelled():
        on_death("executor", died.result())


async def _warmed_up(executor: LocalExecutor) -> None:
    """One step, or the executor's death: a thread that has gone would never answer."""
    try:
        async with asyncio.TaskGroup() as group:
            step = group.create_task(executor.warm_up())
            executor.died.add_done_callback(lambda _: step.cancel())
    except* AserveError as errors:
        raise errors.exceptions[0] from None
    if step.cancelled():
        raise EngineDead(f"the executor died in its first step: {executor.died.result()!r}")


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
