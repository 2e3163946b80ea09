"""The frontend's view of an engine that runs in a process of its own.

It starts the process, reports whether the engine is ready or has failed, and ends it. If the
process dies, another one is started and continues every open request where it stopped, from the
journal. Requests that come meanwhile wait in the journal, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TypeGuard, assert_never

import msgspec

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
    EngineDown,
    EngineUp,
    GrammarCompiled,
    GrammarKnown,
    StartupStage,
    TickReport,
)
from aserve.processes.child import Restarts, describe, exit_code, spawn
from aserve.processes.journal import Journal
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
FLUSH_S = 1.0  # for the last messages to an engine that is to end
END_S = 5.0  # for its step, its memory and its exit; afterwards it is killed
DEATH_S = 1.0  # from a socket's end to the exit code; afterwards the process is killed

logger = logging.getLogger(__name__)


class RemoteEngineCore:
    """Implements EngineCore. `ready` completes once the model is loaded, or fails.

    NOTE: an engine that dies before `start` was called is not started again, because a server that
    cannot come up must say so.
    """

    spec: EngineSpec
    inbox: Sink[EngineEvent]
    actors: tuple[Supervised, ...]

    def __init__(self, ports: EngineCorePorts, *, max_restarts: int = 0) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._ports = ports
        self._link = Link[ToFrontend, ToEngine](
            "engine",
            kind=ToFrontend,
            deliver=self._on_message,
            on_end=self._on_link_end,
            on_unsendable=self._refuse,
        )
        self.inbox = self
        self.actors = (self._link,)
        self._journal = Journal()
        self._restarts = Restarts(max_restarts)
        self._num_starts = 0
        self._command: Sequence[str] = ()
        self._start: Start | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words: Died | None = None
        self._on_death: DeathReport | None = None
        self._loras: dict[int, LoadLora] = {}  # by slot: what the engine has loaded
        self._lost_slots: dict[int, ErrorInfo] = {}  # whose adapter could not be loaded again
        self._loads: dict[int, tuple[LoadLora, asyncio.Future[ErrorInfo | None]]] = {}  # by lora_id
        self._is_up = False  # an engine is ready, and gets messages
        self._is_closing = False
        self._heard_at_s = time.monotonic()

    async def open(self, command: Sequence[str], start: Start) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in the engine: long texts have threads
        self._command, self._start = command, start
        await self._start_process()

    async def start(self, on_death: DeathReport) -> None:
        """Call it after `ready`."""
        if not self._link.is_open:
            raise EngineDead("the engine's process ended as soon as it was ready; its log says why")
        self._on_death = on_death

    def send(self, message: EngineEvent) -> None:
        """Notes the message in the journal, and sends it to the engine if there is one."""
        match message:
            case AdmitRequest():
                self._journal.admit(message, is_sent=self._is_up)
            case Cancel():
                for retired in self._journal.cancel(message):
                    self._ports.text.send(retired)
            case _:
                assert_never(message)
        if self._is_up:
            self._submit(message)

    async def load_lora(self, load: LoadLora) -> ErrorInfo | None:
        if not self._is_up:
            return EngineDead("the engine is restarting; try again later", retry_after_s=5).info()
        return await self._load(load)

    async def close(self) -> None:
        """Ends a loaded engine in order, within END_S; kills one that has not loaded yet."""
        process = self._process
        if process is None or self._is_closing:
            return
        self._is_closing, was_up = True, self._is_up
        await self._link.stop()
        await self._link.close(timeout_s=FLUSH_S)
        if not was_up:
            process.kill()
        await _ended(process, timeout_s=END_S)

    def age_s(self) -> float:
        """An engine that is being restarted sends nothing, and is not stuck."""
        return 0.0 if self._is_restarting else time.monotonic() - self._heard_at_s

    @property
    def _is_restarting(self) -> bool:
        return self._on_death is not None and not self._is_up

    async def _start_process(self) -> None:
        assert self._start is not None
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = spawn(self._command, theirs)
        await self._link.open(ours)
        self._link.write(_numbered(self._start, self._num_starts))
        self._num_starts += 1

    def _on_message(self, message: ToFrontend) -> None:
        match message:
            case StepOutput() | Retired() | Refused():
                self._pass_on(message)
            case OpenText():
                self._ports.text.send(message)
            case TickReport() | GrammarKnown() | GrammarCompiled() | StartupStage():
                self._ports.report(message)
            case EngineDown() | EngineUp():
                self._ports.report(message)
            case Beat():
                self._heard_at_s = time.monotonic()
                self._ports.report(message)
            case LoraLoaded():
                self._answer_load(message.lora_id, message.error)
            case Ready():
                self.spec = message.spec
                self._heard_at_s = time.monotonic()
                self._is_up = self._on_death is None  # a restarted one loads its adapters first
                self._settle(message)
            case LoadFailed():
                kind = ConfigError if message.is_config else EngineDead
                self._settle(kind(message.message))
            case Died():
                self._last_words = message
            case _:
                assert_never(message)

    def _pass_on(self, message: StepOutput | Retired | Refused) -> None:
        news = self._journal.receive(message)
        if news is not None:
            self._ports.text.send(news)
        if self._journal.has_suspects:
            self._send_again(self._journal.next_trial())

    def _settle(self, outcome: Ready | AserveError) -> None:
        if self.ready.done():
            return
        if isinstance(outcome, Ready):
            self.ready.set_result(outcome)
        else:
            self.ready.set_exception(outcome)

    def _refuse(self, message: ToEngine) -> None:
        """Ends a request whose message cannot be encoded. A Cancel can always be encoded."""
        match message:
            case AdmitRequest():
                self._end(message.request_id, unexpected(message.request_id).info())
            case Start():
                self._settle(EngineDead("the options cannot be sent to the engine's process"))
            case LoadLora():
                error = InvalidRequest("the adapter's path cannot be sent to the engine").info()
                self._answer_load(message.lora_id, error)
            case Cancel():
                pass
            case _:
                assert_never(message)

    def _end(self, request_id: str, error: ErrorInfo) -> None:
        refused = Refused(request_id, error)
        self._journal.end(refused)
        self._ports.text.send(refused)

    # ------------------------------------------------------------ the death of the process

    def _on_link_end(self, error: Exception | None) -> None:
        was_up, self._is_up = self._is_up, False
        if not self._is_closing:
            self._link.discard()
            self._link.spawn(self._bury(error, was_up=was_up))

    async def _bury(self, error: Exception | None, *, was_up: bool) -> None:
        """Waits for the end of the process, and answers all who wait for it. It restarts an engine
        that was up; one that was starting has somebody who waits for `ready`.
        """
        assert self._process is not None
        code = await _ended(self._process, timeout_s=DEATH_S)
        how = "closed its socket" if code is None else describe(code)
        because = f" ({error})" if error and not isinstance(error, OSError) else ""
        died = Died("engine", f"the engine's process {how}{because}; its log says why")
        died, self._last_words = self._last_words or died, None
        dead = EngineDead(died.reason)
        self._settle(dead)
        for lora_id in list(self._loads):
            self._answer_load(lora_id, dead.info())
        if was_up and self._on_death is not None:
            await self._restart(died)

    async def _restart(self, died: Died) -> None:
        """Starts engines until one is up, or too many have died."""
        since_s = time.monotonic()
        while (delay_s := self._restarts.delay_s(time.monotonic())) is not None:
            self._ports.report(EngineDown(died.reason))
            for ended in self._journal.lose():
                self._ports.text.send(ended)
            logger.error(
                "engine died, restarting cause=%r open_requests=%s delay_s=%s",
                *(died.reason, len(self._journal), delay_s),
            )
            await asyncio.sleep(delay_s)
            try:
                await self._start_again()
            except AserveError as error:
                died = Died("engine", error.message)
                continue
            took_s = time.monotonic() - since_s
            logger.info("engine restarted requests=%s took_s=%.3f", len(self._journal), took_s)
            return
        assert self._on_death is not None
        most = self._restarts.most
        often = f" (it died more than {most} times within a minute)" if most else ""
        self._on_death(died.name, EngineDead(died.reason + often))

    async def _start_again(self) -> None:
        """Starts a process, which loads the adapters of the former one, and sends it the open
        requests. Raises AserveError if it dies before that.
        """
        self.ready = asyncio.get_running_loop().create_future()
        await self._start_process()
        await self.ready
        for load in list(self._loras.values()):
            error = await self._load(load)
            if error is not None:
                logger.error("adapter lost path=%s cause=%r", load.path, error.message)
                del self._loras[load.slot]
                self._lost_slots[load.slot] = error
        if not self._link.is_open:
            raise EngineDead("the engine's process ended as soon as it was ready; its log says why")
        self._ports.report(EngineUp())
        self._is_up = True
        self._send_again(self._journal.resume())

    def _send_again(self, messages: list[EngineEvent]) -> None:
        while messages:
            for message in messages:
                self._submit(message)
            messages = self._journal.next_trial()

    def _submit(self, message: EngineEvent) -> None:
        """Sends a message to the engine, or ends a request whose adapter got lost in a restart."""
        error = self._lost_slots.get(message.lora_slot) if _has_adapter(message) else None
        if error is None:
            self._link.inbox.send(message)
        else:
            self._end(message.request_id, error)

    async def _load(self, load: LoadLora) -> ErrorInfo | None:
        answer: asyncio.Future[ErrorInfo | None] = asyncio.get_running_loop().create_future()
        self._loads[load.lora_id] = (load, answer)
        self._link.inbox.send(load)
        return await answer

    def _answer_load(self, lora_id: int, error: ErrorInfo | None) -> None:
        load, answer = self._loads.pop(lora_id)
        if error is None:
            self._loras[load.slot] = load
            self._lost_slots.pop(load.slot, None)
        if not answer.done():  # the client may have gone
            answer.set_result(error)


def _has_adapter(message: EngineEvent) -> TypeGuard[AdmitRequest]:
    return isinstance(message, AdmitRequest) and message.lora_slot > 0


async def _ended(process: subprocess.Popen[bytes], *, timeout_s: float) -> int | None:
    """Waits for the end of a process, and kills it after `timeout_s`; then it returns None."""
    code = await exit_code(process, timeout_s=timeout_s)
    if code is None:
        process.kill()
        await in_thread(process.wait, name="wait")
    return code


def _numbered(start: Start, num_starts: int) -> Start:
    """Returns the Start of an engine. What --record has written of a dead one is kept."""
    debug = start.resolved.debug
    if not num_starts or debug.record is None:
        return start
    debug = dataclasses.replace(debug, record=f"{debug.record}.{num_starts}")
    return msgspec.structs.replace(start, resolved=dataclasses.replace(start.resolved, debug=debug))
