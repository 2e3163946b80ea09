"""A further frontend process, `python -m aserve.processes.frontend`; its stdin is a socket to the
first frontend.

It has HTTP, the tokenizer and the detokenizer, and the first frontend is its engine. It ends when
the socket closes, so it never outlives the first frontend.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import socket
from functools import partial
from pathlib import Path
from typing import assert_never

from aserve.actors.base import DeathReport
from aserve.actors.supervisor import Supervised
from aserve.channel import Sink
from aserve.config import LoraOptions, Resolved
from aserve.errors import EngineDead, ErrorInfo, InvalidRequest, ShuttingDown
from aserve.frontend import Frontend
from aserve.host.logs import start_logging
from aserve.host.memory import collect_rarely, set_up_collector
from aserve.host.threads import in_thread, new_event_loop
from aserve.messages.changes import Amend, Amended, ChangeSettings, EngineJob
from aserve.messages.executor import EngineSpec
from aserve.messages.output import Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel, EngineEvent, OpenText
from aserve.observability.reports import RequestState, TickReport
from aserve.processes.frontends import (
    FromFrontendProcess,
    Join,
    Reachable,
    Serving,
    SharedState,
    Stop,
    ToFrontendProcess,
)
from aserve.processes.link import Died, Link
from aserve.program import end_process
from aserve.server import connect_http, connect_tracing, end_tracing
from aserve.text.load import load_text


def main() -> int:
    """Returns the exit code: 0 for an ordinary end."""
    collect_rarely()
    sock = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(sock))


async def _run(sock: socket.socket) -> int:
    return await FurtherFrontend().run(sock)


class FurtherFrontend:
    """The life of the process: it joins, serves, drains and ends."""

    def __init__(self) -> None:
        self._joined: asyncio.Future[Join] = asyncio.get_running_loop().create_future()
        self._knows_state = asyncio.Event()  # or it is ending
        self._ending = asyncio.Event()
        self._is_closing = False
        self._directory = ""  # of the sockets
        self._frontend: Frontend | None = None
        self._core: SharedEngineCore | None = None
        self._link = Link[ToFrontendProcess, FromFrontendProcess](
            "first frontend",
            kind=ToFrontendProcess,
            deliver=self._on_message,
            on_end=self._on_end,
            on_unsendable=self._refuse,
        )

    async def run(self, sock: socket.socket) -> int:
        await self._link.open(sock)
        join = await self._joined
        os.chdir(join.start.directory)
        self._directory = join.peers.directory
        resolved = options_of(join)
        start_logging(resolved.debug.log_level or "info", resolved.debug.log_format)
        frontend = self._frontend = Frontend(resolved, on_death=self._ending.set)
        tracing = connect_tracing(frontend)
        read_text = partial(load_text, Path(join.start.model_dir), resolved.model)
        text = await in_thread(read_text, name="text")
        self._core = SharedEngineCore(self._link, join.ready.spec)
        await frontend.join(self._core, text)
        http = connect_http(frontend, join.peers)
        await http.start(self._learn_state)
        set_up_collector()
        self._link.inbox.send(Serving())
        await self._ending.wait()
        await frontend.drain(resolved.server.drain_timeout)
        await http.stop()
        self._is_closing = True
        await frontend.close()
        await end_tracing(tracing)
        await self._link.close(timeout_s=1)
        return 1 if frontend.failure else 0

    async def _learn_state(self) -> None:
        self._link.inbox.send(Reachable())
        await self._knows_state.wait()

    def _on_message(self, message: ToFrontendProcess) -> None:
        if isinstance(message, Join):
            self._joined.set_result(message)
            return
        if isinstance(message, Stop | Died):
            self._stop(message)
            return
        if self._frontend is None:
            return  # it is told the state when it is reachable
        match message:
            case StepOutput() | Retired() | Refused() | Amended() | OpenText():
                self._frontend.ports.text.send(message)
            case TickReport() | RequestState():
                self._frontend.ports.report(message)
            case SharedState():
                state = self._frontend.state
                state.cache_epoch, state.is_paused = message.cache_epoch, message.is_paused
                state.is_updating, state.is_asleep = message.is_updating, message.is_asleep
                state.weights, state.weight_version = message.weights, message.weight_version
                self._knows_state.set()
            case ChangeSettings():
                self._frontend.state.settings.follow(message)
            case _:
                assert_never(message)

    def _stop(self, message: Stop | Died) -> None:
        if self._core is not None and isinstance(message, Died):
            self._core.die(message.reason)
        elif self._frontend is not None and self._ending.is_set():
            self._frontend.end_all(ShuttingDown("the server was stopped").info())
        self._end()

    def _on_end(self, error: Exception | None) -> None:
        """The first frontend has ended, and the engine with it."""
        if self._is_closing:
            return
        if self._core is None:
            end_process(1)
        self._core.die("the first frontend has ended")
        self._end()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _end(self) -> None:
        self._ending.set()
        self._knows_state.set()

    def _refuse(self, message: FromFrontendProcess) -> None:
        if isinstance(message, AdmitRequest) and self._frontend is not None:
            error = InvalidRequest("the request cannot be sent to the engine").info()
            self._frontend.ports.text.send(Refused(message.request_id, error))


def options_of(join: Join) -> Resolved:
    """The stores and the adapters belong to the first frontend, and other seeds are drawn."""
    resolved = join.start.resolved
    server = dataclasses.replace(resolved.server, port=join.port, files_dir=None)
    seed = resolved.debug.seed
    debug = dataclasses.replace(
        resolved.debug, seed=None if seed is None else seed + join.peers.number
    )
    return dataclasses.replace(resolved, server=server, debug=debug, lora=LoraOptions())


class SharedEngineCore:
    """Implements EngineCore with the engine of the first frontend."""

    spec: EngineSpec
    inbox: Sink[EngineEvent]
    actors: tuple[Supervised, ...]

    def __init__(
        self, link: Link[ToFrontendProcess, FromFrontendProcess], spec: EngineSpec
    ) -> None:
        self.spec = spec
        self.inbox = self
        self.actors = (link,)
        self._link = link
        self._on_death: DeathReport | None = None

    async def start(self, on_death: DeathReport) -> None:
        self._on_death = on_death

    def send(self, message: EngineEvent) -> None:
        match message:
            case AdmitRequest() | Cancel() | Amend():
                self._link.inbox.send(message)
            case ChangeSettings():
                raise AssertionError("the first frontend changes the settings")
            case _:
                assert_never(message)

    def die(self, reason: str) -> None:
        if self._on_death is not None:
            self._on_death("engine", EngineDead(reason))

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        return EngineDead("the first frontend runs the jobs of the engine").info()

    async def close(self) -> None:
        pass

    def age_s(self) -> float:
        """Returns 0, because the first frontend answers the probes."""
        return 0.0


if __name__ == "__main__":
    end_process(main())
