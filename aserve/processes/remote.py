"""The frontend's view of an engine that runs in a process of its own.

It starts the process, reports whether the engine is ready or has failed, and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

from aserve.actors.base import DeathReport, unexpected
from aserve.actors.supervisor import Supervised
from aserve.channel import Sink
from aserve.engine_core import EngineCorePorts
from aserve.errors import AserveError, ConfigError, EngineDead, ErrorInfo, InvalidRequest
from aserve.host.threads import SWITCH_INTERVAL_S, in_thread
from aserve.messages.executor import EngineSpec
from aserve.messages.output import Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel, EngineEvent, LoadLora, OpenText
from aserve.observability.reports import (
    Beat,
    GrammarCompiled,
    GrammarKnown,
    StartupStage,
    TickReport,
)
from aserve.processes.link import (
    Died,
    Link,
    LoadFailed,
    LoraLoaded,
    Ready,
    Start,
    ToEngine,
    ToFrontend,
)

ENGINE = (sys.executable, "-m", "aserve.processes.engine")
ROOT = Path(__file__).parents[2]  # where `aserve` lies: nothing of the user's is imported instead
FLUSH_S = 1.0  # for the last messages to an engine that is to end
END_S = 5.0  # for its step, its memory and its exit; afterwards it is killed
DEATH_S = 1.0  # from a socket's end to the exit code
SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class RemoteEngineCore:
    """Implements EngineCore. `ready` completes once the model is loaded, or fails."""

    spec: EngineSpec
    inbox: Sink[EngineEvent]
    actors: tuple[Supervised, ...]

    def __init__(self, ports: EngineCorePorts) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._ports = ports
        self._link = Link[ToFrontend, ToEngine](
            "engine",
            kind=ToFrontend,
            deliver=self._on_message,
            on_end=self._on_link_end,
            on_unsendable=self._refuse,
        )
        self.inbox = self._link.inbox
        self.actors = (self._link,)
        self._process: subprocess.Popen[bytes] | None = None
        self._on_death: DeathReport | None = None
        self._loads: dict[int, asyncio.Future[ErrorInfo | None]] = {}  # by lora_id
        self._is_up = False
        self._is_closing = False
        self._heard_at_s = time.monotonic()

    async def open(self, command: Sequence[str], start: Start) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in the engine: long texts have threads
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawned(command, theirs)
        await self._link.open(ours)
        self._link.write(start)

    async def start(self, on_death: DeathReport) -> None:
        """Call it after `ready`."""
        self._on_death = on_death
        if self._process is not None and self._process.poll() is not None:
            raise EngineDead("the engine's process ended as soon as it was ready; its log says why")

    async def load_lora(self, load: LoadLora) -> ErrorInfo | None:
        answer: asyncio.Future[ErrorInfo | None] = asyncio.get_running_loop().create_future()
        self._loads[load.lora_id] = answer
        self._link.inbox.send(load)
        return await answer

    async def close(self) -> None:
        """Ends a loaded engine in order, within END_S; kills one that has not loaded yet."""
        process = self._process
        if process is None or self._is_closing:
            return
        self._is_closing = True
        await self._link.stop()
        await self._link.close(timeout_s=FLUSH_S)
        if not self._is_up:
            process.kill()
        if await _exit_code(process, timeout_s=END_S) is None:
            process.kill()
            process.wait()

    def age_s(self) -> float:
        return time.monotonic() - self._heard_at_s

    def _on_message(self, message: ToFrontend) -> None:
        match message:
            case StepOutput() | Retired() | Refused() | OpenText():
                self._ports.text.send(message)
            case TickReport() | GrammarKnown() | GrammarCompiled() | StartupStage():
                self._ports.report(message)
            case Beat():
                self._heard_at_s = time.monotonic()
                self._ports.report(message)
            case LoraLoaded():
                self._answer_load(message.lora_id, message.error)
            case Ready():
                self.spec = message.spec
                self._is_up = True
                self._heard_at_s = time.monotonic()
                self._settle(message)
            case LoadFailed():
                kind = ConfigError if message.is_config else EngineDead
                self._settle(kind(message.message))
            case Died():
                self._report_death(message.name, EngineDead(message.reason))
            case _:
                assert_never(message)

    def _settle(self, outcome: Ready | AserveError) -> None:
        if self.ready.done():
            return
        if isinstance(outcome, Ready):
            self.ready.set_result(outcome)
        else:
            self.ready.set_exception(outcome)

    def _answer_load(self, lora_id: int, error: ErrorInfo | None) -> None:
        answer = self._loads.pop(lora_id)
        if not answer.done():  # the client may have gone
            answer.set_result(error)

    def _refuse(self, message: ToEngine) -> None:
        """Ends a request whose message cannot be encoded. A Cancel can always be encoded."""
        match message:
            case AdmitRequest():
                error = unexpected(message.request_id).info()
                self._ports.text.send(Refused(message.request_id, error))
            case Start():
                self._settle(EngineDead("the options cannot be sent to the engine's process"))
            case LoadLora():
                error = InvalidRequest("the adapter's path cannot be sent to the engine").info()
                self._answer_load(message.lora_id, error)
            case Cancel():
                pass
            case _:
                assert_never(message)

    def _on_link_end(self, error: Exception | None) -> None:
        if not self._is_closing:
            self._link.spawn(self._report_exit(error))

    async def _report_exit(self, error: Exception | None) -> None:
        assert self._process is not None
        code = await _exit_code(self._process, timeout_s=DEATH_S)
        how = "closed its socket" if code is None else _described(code)
        because = f" ({error})" if error and not isinstance(error, OSError) else ""
        self._report_death(
            "engine", EngineDead(f"the engine's process {how}{because}; its log says why")
        )

    def _report_death(self, name: str, error: AserveError) -> None:
        """Fails `ready` while the engine loads, else tells the supervisor, which counts the first
        death.
        """
        self._settle(error)
        for lora_id in list(self._loads):
            self._answer_load(lora_id, error.info())
        if self._on_death is not None:
            self._on_death(name, error)


def _spawned(command: Sequence[str], stdin: socket.socket) -> subprocess.Popen[bytes]:
    """Starts the engine process with the ending signals blocked.

    WHY: a terminal sends Ctrl-C, and a service manager SIGTERM, to both processes, but the frontend
    alone decides when each of them ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(command, stdin=stdin.fileno(), cwd=ROOT)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _exit_code(process: subprocess.Popen[bytes], *, timeout_s: float) -> int | None:
    """Returns None if the process has not ended in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await in_thread(process.wait, name="wait")
    return None


def _described(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
