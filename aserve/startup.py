"""Launches the engine behind a frontend, in this process or in one of its own.

Every wait of a launch goes through `Waits`, which a signal ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from aserve.config import Resolved
from aserve.frontend import Frontend
from aserve.grammar.process import early_worker
from aserve.host.limits import may_have_cuda
from aserve.host.threads import in_thread
from aserve.load import Loaded, find_model, load
from aserve.messages.executor import EngineSpec
from aserve.observability.engine_watch import StageReporter
from aserve.processes.engine_process import ENGINE, EngineProcess
from aserve.processes.frontends import Frontends
from aserve.processes.link import Start
from aserve.processes.remote import RemoteEngineCore
from aserve.progress import OnStage
from aserve.text.load import load_text

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launched:
    """An engine that is ready; `about` describes what was chosen for this machine."""

    spec: EngineSpec
    about: str


class Stopped(Exception):
    """A signal ended the wait for the engine."""


class Waits:
    """Waits for one future at a time; `end` ends the wait."""

    def __init__(self) -> None:
        self._is_over = False
        self._stop: Callable[[], None] = lambda: None

    async def until(self, future: asyncio.Future[T]) -> T:
        """Waits for the future. Raises Stopped once `end` is called."""
        self._stop = functools.partial(_stop, future)
        if self._is_over:
            self._stop()
        return await future

    def end(self) -> None:
        self._is_over = True
        self._stop()


def _stop(future: asyncio.Future[T]) -> None:
    if not future.done():
        future.set_exception(Stopped())


class Launcher(Protocol):
    async def launch(self, frontend: Frontend, waits: Waits) -> Launched:
        """Returns when the frontend is ready. On an error it ends what it has started."""


class InThisProcess:
    def __init__(self, loader: Callable[[Resolved, OnStage], Loaded] = load) -> None:
        self._loader = loader

    async def launch(self, frontend: Frontend, waits: Waits) -> Launched:
        loop = asyncio.get_running_loop()
        on_stage = StageReporter(frontend.ports.report, call=loop.call_soon_threadsafe)
        work = functools.partial(self._loader, frontend.resolved, on_stage)
        with early_worker(frontend.resolved.grammar.grammar_workers) as worker:
            loaded = await waits.until(in_thread(work, name="load"))
            if worker is not None:
                on_stage("grammars")
            await frontend.start(loaded, worker)
        return Launched(loaded.executor.spec, loaded.executor.about)


class InItsOwnProcess:
    """Starts the engine process with `command`, whose stdin is the socket. `frontends` are the
    further frontends, which use the same engine.
    """

    def __init__(self, command: Sequence[str] = ENGINE, frontends: Frontends | None = None) -> None:
        self._command = command
        self._frontends = frontends

    async def launch(self, frontend: Frontend, waits: Waits) -> Launched:
        resolved = frontend.resolved
        async with contextlib.AsyncExitStack() as undo:
            find = functools.partial(find_model, resolved)
            model_dir = await waits.until(in_thread(find, name="find"))
            start = Start(_without_keys(resolved), str(model_dir), os.getcwd())
            most = resolved.server.max_engine_restarts
            process = EngineProcess(self._command, start, max_restarts=most)
            connect = RemoteEngineCore if self._frontends is None else self._frontends.connect
            core = connect(frontend.ports, process, nap_after_s=resolved.server.sleep_idle_seconds)
            undo.push_async_callback(core.close)
            await core.open()
            read_text = functools.partial(load_text, model_dir, resolved.model)
            text = await waits.until(in_thread(read_text, name="text"))
            ready = await waits.until(core.ready)
            if self._frontends is not None:
                self._frontends.note_ready(start, ready)
            await frontend.join(core, text)
            undo.pop_all()
        return Launched(ready.spec, ready.about)


def _without_keys(resolved: Resolved) -> Resolved:
    """Removes the API keys, which the engine process does not need."""
    server = dataclasses.replace(
        resolved.server, api_key=None, api_key_file=None, admin_api_key=None
    )
    return dataclasses.replace(resolved, server=server)


def launcher_of(resolved: Resolved, frontends: Frontends | None = None) -> Launcher:
    """Chooses one or two processes: on a GPU, text and HTTP would compete with the engine for the
    GIL. Several frontends, and an engine that sleeps, need an engine process. An engine on several
    machines has one, so that it is started again if a machine is lost.
    """
    wish, naps = resolved.server.processes, resolved.server.sleep_idle_seconds is not None
    if wish == "auto":
        is_apart = frontends is not None or naps or not resolved.nodes.is_alone
        is_apart = is_apart or may_have_cuda(resolved.machine.device)
        wish = "2" if is_apart else "1"
    logger.info("processes=%s frontends=%s", wish, resolved.server.frontends)
    return InItsOwnProcess(frontends=frontends) if wish == "2" else InThisProcess()
