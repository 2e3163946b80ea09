"""The engine process, `python -m aserve.processes.engine`; its stdin is a socket to the frontend.

It serves the messages that come through the socket, and ends when the socket closes, so it never
outlives its frontend.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, assert_never

import msgspec

from aserve.actors.base import unexpected
from aserve.actors.supervisor import Supervisor
from aserve.engine_core import EngineCorePorts, LocalEngineCore, LocalExecutor
from aserve.errors import AserveError, ConfigError, ErrorInfo, MachineSilent
from aserve.grammar.compile import Vocabulary
from aserve.grammar.process import CompileProcess, early_worker
from aserve.host.environment import prepare_process
from aserve.host.logs import start_logging, write_stacks, write_stacks_after
from aserve.host.memory import collect_rarely, set_up_collector
from aserve.host.threads import in_thread, new_event_loop
from aserve.load import load_executor, vocabulary_of
from aserve.messages.base import ServerPhase
from aserve.messages.changes import (
    Amend,
    ChangeSettings,
    CheckWeights,
    EngineJob,
    LoadLora,
    LoadWeights,
    Profile,
    Sleep,
    Wake,
)
from aserve.messages.output import Refused, Retired
from aserve.messages.requests import AdmitRequest, Cancel
from aserve.observability.engine_watch import EngineWatch, StageReporter
from aserve.observability.reports import Beat, EngineReport
from aserve.observability.trace import Trace
from aserve.processes.engine_process import socket_of_stdin
from aserve.processes.link import (
    Died,
    JobDone,
    Link,
    LoadFailed,
    Ready,
    Start,
    ToEngine,
    ToFrontend,
)
from aserve.program import end_process
from aserve.progress import OnStage
from aserve.text.load import load_text

Loader: TypeAlias = Callable[[Start, OnStage], LocalExecutor]

BEAT_S = 1.0
SILENT_S = 10.0  # without a heartbeat

logger = logging.getLogger(__name__)
FLUSH_S = 1.0  # for the last messages to a frontend that still reads


def load_from(start: Start, on_stage: OnStage) -> LocalExecutor:
    return load_executor(start.resolved, Path(start.model_dir), on_stage=on_stage)


def main(loader: Loader = load_from) -> int:
    """Returns the exit code: 0 when the frontend has gone, 1 for a failure."""
    collect_rarely()
    sock = socket_of_stdin()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(sock, loader))


async def _run(sock: socket.socket, loader: Loader) -> int:
    return await EngineSide(loader).run(sock)


class EngineSide:
    """The life of the engine process: it starts, loads, serves and ends."""

    def __init__(self, loader: Loader) -> None:
        loop = asyncio.get_running_loop()
        self._loader = loader
        self._start: asyncio.Future[Start] = loop.create_future()
        # Completes when the frontend or a part of the engine has ended.
        self._ended: asyncio.Future[None] = loop.create_future()
        self._link = Link[ToEngine, ToFrontend](
            "frontend",
            kind=ToEngine,
            deliver=self._on_message,
            on_end=lambda _: self._end(),
            on_unsendable=self._send_plain_error,
        )
        self._core: LocalEngineCore | None = None
        self._watch, self._stuck_after_s, self._is_stuck = EngineWatch(), math.inf, False
        self._job_turn = asyncio.Lock()
        self._supervisor = Supervisor((self._link,), requests=NoOpenRequests(), report=self._report)

    async def run(self, sock: socket.socket) -> int:
        code = 0
        await self._link.open(sock)
        try:
            async with asyncio.TaskGroup() as group:
                life = group.create_task(self._live())
                self._ended.add_done_callback(lambda _: life.cancel())
        except* AserveError as errors:
            code = 1
            self._link.write(_failed(errors.exceptions[0]))
        finally:
            await self._close()
        return 1 if self._supervisor.failure else code

    async def _live(self) -> None:
        """Loads and serves until it is cancelled."""
        start = await self._start
        os.chdir(start.directory)
        debug = start.resolved.debug
        start_logging(debug.log_level or "info", debug.log_format)
        prepare_process(start.resolved.machine.threads)
        loop = asyncio.get_running_loop()
        on_stage = StageReporter(self._link.write, call=loop.call_soon_threadsafe)
        num_workers = start.resolved.grammar.grammar_workers
        # PERF: the imports of a grammar worker take as much processor time as those of the engine,
        # for which the open requests wait in a restart. Those with grammars wait a little longer.
        with early_worker(0 if start.is_restart else num_workers) as worker:
            executor = await in_thread(lambda: self._loader(start, on_stage), name="load")
            if num_workers:
                on_stage("grammars")
            core = self._connect(start, executor)
            await core.start(self._supervisor.report_death)
            self._supervisor.start()
            set_up_collector()
            self._link.write(Ready(executor.spec, executor.about))
            if num_workers:
                core.grammars.adopt(worker or CompileProcess())
        self._beat()
        await self._ended

    def _connect(self, start: Start, executor: LocalExecutor) -> LocalEngineCore:
        inbox = self._link.inbox
        self._stuck_after_s = start.resolved.server.watchdog_timeout
        core = self._core = LocalEngineCore(
            executor,
            start.resolved,
            ports=EngineCorePorts(inbox, self._tell, Trace()),
            vocabulary=functools.partial(_vocabulary, start, executor.spec.vocab_size),
        )
        actors = (self._link, *core.actors)
        self._supervisor = Supervisor(actors, requests=NoOpenRequests(), report=self._report)
        return core

    async def _close(self) -> None:
        """Sends the last messages and ends every task and thread."""
        await self._supervisor.stop()
        if self._core is not None:
            await self._core.close()
        await self._link.close(timeout_s=FLUSH_S)

    def _on_message(self, message: ToEngine) -> None:
        match message:
            case AdmitRequest() | Cancel() | Amend() | ChangeSettings():
                assert self._core is not None, "requests come after Ready"
                if isinstance(message, ChangeSettings):
                    logging.getLogger().setLevel(message.log_level.upper())
                self._core.inbox.send(message)
            case LoadLora() | LoadWeights() | Profile() | CheckWeights() | Sleep() | Wake():
                self._link.spawn(self._run_job(message))
            case Start():
                self._start.set_result(message)
            case _:
                assert_never(message)

    async def _run_job(self, job: EngineJob) -> None:
        """NOTE: loads keep their order. The frontend may have given up on one, and used its slot
        for the next one.
        """
        assert self._core is not None, "jobs come after Ready"
        async with self._job_turn:
            error = await self._core.run_job(job)
        self._link.inbox.send(JobDone(job, error))

    def _send_plain_error(self, message: ToFrontend) -> None:
        """Sends the end of a request with a plain error when its own error cannot be encoded."""
        if isinstance(message, Retired | Refused) and message.error is not None:
            error = unexpected(message.request_id).info()
            self._link.inbox.send(msgspec.structs.replace(message, error=error))

    def _tell(self, report: EngineReport) -> None:
        self._watch.on_report(report)
        self._link.inbox.send(report)

    def _beat(self) -> None:
        """Sends a heartbeat with the actors' backlogs every BEAT_S seconds. An engine that is stuck
        writes where its threads stand: the loop, which then does not come here, or a step."""
        write_stacks_after(SILENT_S)
        was_stuck, step_s = self._is_stuck, self._watch.step_age_s()
        self._is_stuck = step_s > self._stuck_after_s
        if self._is_stuck and not was_stuck:
            logger.error("no step has ended for %.0f s; the stacks of all threads follow", step_s)
            write_stacks()
        actors = () if self._core is None else self._core.actors
        backlogs = tuple((actor.name, actor.backlog()) for actor in actors)
        self._link.inbox.send(Beat(backlogs))
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _report(self, phase: ServerPhase, _: str) -> None:
        failure = self._supervisor.failure
        if phase == "dead" and failure is not None:
            reason = f"{type(failure.error).__name__}: {failure.error}"
            is_silent = isinstance(failure.error, MachineSilent)
            self._link.write(Died(failure.name, reason, is_silent))
            self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


class NoOpenRequests:
    """The engine process has no open requests: the frontend ends them when it hears of a death."""

    def end_all(self, error: ErrorInfo) -> None:
        pass

    async def drained(self) -> None:
        pass


def _failed(error: BaseException) -> LoadFailed:
    return LoadFailed(str(error), isinstance(error, ConfigError))


def _vocabulary(start: Start, vocab_size: int) -> Vocabulary:
    text = load_text(Path(start.model_dir), start.resolved.model)
    return vocabulary_of(text.tokenizer, vocab_size)


if __name__ == "__main__":
    end_process(main())
