"""The frontend's view of an engine that runs in a process of its own.

It reports whether the engine is ready or has failed. If the engine's process dies, another one
continues every open request where it stopped, from the journal. Requests that come meanwhile wait
in the journal, too.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import assert_never

from aserve.actors.admission import too_early
from aserve.actors.base import DeathReport, unexpected
from aserve.actors.deadlines import deadlines_of
from aserve.actors.supervisor import Supervised
from aserve.channel import Sink
from aserve.engine_core import EngineCorePorts
from aserve.errors import AserveError, ConfigError, EngineDead, ErrorInfo, InvalidRequest
from aserve.host.threads import SWITCH_INTERVAL_S
from aserve.messages.changes import (
    Amend,
    Amended,
    ChangeSettings,
    CheckWeights,
    EngineJob,
    LoadLora,
    LoadWeights,
    Profile,
    Sleep,
    Wake,
)
from aserve.messages.executor import EngineSpec
from aserve.messages.output import Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel, EngineEvent, OpenText, RequestEvent
from aserve.observability.reports import (
    Beat,
    EngineDown,
    EngineUp,
    GrammarCompiled,
    GrammarKnown,
    KvTransferred,
    RequestState,
    StartupStage,
    TickReport,
    TierUsed,
)
from aserve.processes.engine_process import EngineProcess
from aserve.processes.engine_sleep import EngineSleep
from aserve.processes.journal import FromEngine, Journal
from aserve.processes.link import (
    Died,
    JobDone,
    Link,
    LoadFailed,
    Ready,
    Start,
    ToEngine,
    ToFrontend,
    has_adapter,
    settle,
)

FLUSH_S = 1.0  # for the last messages to an engine that is to end

logger = logging.getLogger(__name__)


class RemoteEngineCore:
    """Implements EngineCore. `ready` completes once the model is loaded, or fails.

    NOTE: an engine that dies before `start` was called is not started again, because a server that
    cannot come up must say so.
    """

    spec: EngineSpec
    inbox: Sink[EngineEvent]
    actors: tuple[Supervised, ...]

    def __init__(
        self, ports: EngineCorePorts, process: EngineProcess, *, nap_after_s: float | None = None
    ) -> None:
        """With `nap_after_s`, the engine sleeps whenever it was idle for so long."""
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
        self._process = process
        self._last_words: Died | None = None
        self._on_death: DeathReport | None = None
        self._loras: dict[int, LoadLora] = {}  # by slot: what the engine has loaded
        self._settings: ChangeSettings | None = None  # the last change
        self._lost_slots: dict[int, ErrorInfo] = {}  # whose adapter could not be loaded again
        self._weights: list[LoadWeights] = []  # the last update, if there was one
        self._jobs: dict[EngineJob, asyncio.Future[ErrorInfo | None]] = {}
        self._sleep = EngineSleep(self)
        self._nap_after_s = nap_after_s
        self.is_up = False  # an engine is ready, and gets messages
        self._is_closing = False
        self._silence: ErrorInfo | None = None  # a machine of the engine is silent, and missing
        self._is_buried = asyncio.Event()  # the last engine's process has ended
        self._heard_at_s = time.monotonic()

    async def open(self) -> None:
        """Starts an engine. `ready` completes once it has loaded."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in the engine: long texts have threads
        self._is_buried.clear()
        sock, start = self._process.spawn()
        await self._link.open(sock)
        self._link.write(start)

    async def start(self, on_death: DeathReport) -> None:
        """Call it after `ready`."""
        if not self._link.is_open:
            raise EngineDead("the engine's process ended as soon as it was ready; its log says why")
        self._on_death = on_death
        if self._nap_after_s is not None:
            self._link.spawn(self._sleep.nap_when_idle(self._nap_after_s))

    def send(self, message: EngineEvent) -> None:
        """Notes the message in the journal, and sends it to the engine if there is one."""
        match message:
            case AdmitRequest() if self._silence is not None:
                self._ports.text.send(Refused(message.request_id, self._silence))
                return
            case AdmitRequest():
                self._journal.admit(message, is_sent=self.is_up)
                self._sleep.note_work()
                if not self.is_up:
                    self._set_deadline(message)
            case Cancel():
                for retired in self._journal.cancel(message):
                    self._ports.text.send(retired)
            case ChangeSettings():
                self._settings = message
            case Amend() if self._journal.is_waiting(message.request_id):
                self._ports.text.send(Amended(message, error=too_early().info()))
                return
            case Amend():
                pass
            case _:
                assert_never(message)
        if self.is_up:
            self._submit(message)

    def requests(self) -> list[AdmitRequest]:
        """Returns the requests that are open in the engine, or wait for it."""
        return self._journal.requests()

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        match job:
            case Sleep():
                return await self._sleep.begin()
            case Wake():
                return await self._sleep.end()
            case _:
                return await self._sleep.ready_for_job() or await self._run(job)

    async def close(self) -> None:
        """Ends a loaded engine in order, and kills one that has not loaded yet."""
        if self._is_closing:
            return
        self._is_closing, was_up = True, self.is_up
        await self._link.stop()
        await self._link.close(timeout_s=FLUSH_S)
        await self._process.close(was_up=was_up)

    def age_s(self) -> float:
        """An engine that is being restarted sends nothing, and is not stuck."""
        is_restarting = self._on_death is not None and not self.is_up
        return 0.0 if is_restarting else time.monotonic() - self._heard_at_s

    def _on_message(self, message: ToFrontend) -> None:
        match message:
            case StepOutput() | Retired() | Refused() | Amended():
                self._pass_on(message)
            case OpenText():
                self._ports.text.send(message)
            case StartupStage():
                self._silence = None  # the next engine has all of its machines, and loads
                self._ports.report(message)
            case (
                TickReport()
                | GrammarKnown()
                | GrammarCompiled()
                | KvTransferred()
                | TierUsed()
                | RequestState()
                | EngineDown()
                | EngineUp()
            ):
                self._ports.report(message)
            case Beat():
                self._heard_at_s = time.monotonic()
                self._ports.report(message)
            case JobDone():
                self._answer_job(message.job, message.error)
            case Ready():
                self.spec = message.spec
                self._heard_at_s = time.monotonic()
                self.is_up = self._on_death is None  # a restarted one loads more first
                if self.is_up:
                    self._process.note_up()
                settle(self.ready, message)
            case LoadFailed():
                kind = ConfigError if message.is_config else EngineDead
                settle(self.ready, kind(message.message))
            case Died():
                self._last_words = message
                if message.is_silent:
                    self._silence = EngineDead(f"{message.reason}; try again later").info()
                    self.end_all(self._silence)
            case _:
                assert_never(message)

    def _pass_on(self, message: FromEngine) -> None:
        self._sleep.note_work()
        news = self._journal.receive(message)
        if news is not None:
            self._ports.text.send(news)
        if self._journal.has_suspects:
            self._send_again(self._journal.next_trial())

    def _refuse(self, message: ToEngine) -> None:
        """Ends a request whose message cannot be encoded. The others can always be encoded."""
        match message:
            case AdmitRequest():
                self._end(message.request_id, unexpected(message.request_id).info())
            case Start():
                settle(self.ready, EngineDead("the options cannot be sent to the engine's process"))
            case LoadLora() | LoadWeights() | Profile() | CheckWeights() | Sleep() | Wake():
                error = InvalidRequest("the path cannot be sent to the engine").info()
                self._answer_job(message, error)
            case Cancel() | Amend() | ChangeSettings():
                pass
            case _:
                assert_never(message)

    def _end(self, request_id: str, error: ErrorInfo) -> None:
        refused = Refused(request_id, error)
        self._journal.end(refused)
        self._ports.text.send(refused)

    # ------------------------------------------------------------ sleep

    @property
    def is_idle(self) -> bool:
        return not (len(self._journal) or self._jobs)

    async def suspend(self) -> None:
        """Ends the process. Open requests stay in the journal, and end there at their timeouts."""
        self.is_up = False
        await self._link.close(timeout_s=FLUSH_S)
        await self._is_buried.wait()
        self._ports.report(EngineDown("it sleeps", is_asleep=True))
        for ended in self._journal.suspend():
            self._ports.text.send(ended)
        for request in self._journal.requests():
            self._set_deadline(request)

    def end_all(self, error: ErrorInfo) -> None:
        for request in self._journal.requests():
            self._end(request.request_id, error)

    # ------------------------------------------------------------ the death of the process

    def _on_link_end(self, error: Exception | None) -> None:
        was_up, self.is_up = self.is_up, False
        if not self._is_closing:
            if was_up:
                self._ports.report(EngineDown("its process has closed its socket"))
            self._link.discard()
            self._link.spawn(self._bury(error, was_up=was_up))

    async def _bury(self, error: Exception | None, *, was_up: bool) -> None:
        """Waits for the end of the process, and answers all who wait for it. It restarts an engine
        that was up; one that was starting has somebody who waits for `ready`.
        """
        how = await self._process.bury()
        because = f" ({error})" if error and not isinstance(error, OSError) else ""
        died = Died("engine", f"the engine's process {how}{because}; its log says why")
        died, self._last_words = self._last_words or died, None
        self._sleep.has_profile = False
        dead = EngineDead(died.reason)
        settle(self.ready, dead)
        for job in list(self._jobs):
            self._answer_job(job, dead.info())
        self._is_buried.set()
        if was_up and self._on_death is not None:
            await self._restart(died)

    async def _restart(self, died: Died) -> None:
        """Starts engines until one is up, or too many have died."""
        since_s = time.monotonic()
        while (delay_s := self._process.restart_delay_s()) is not None:
            self._ports.report(EngineDown(died.reason, is_restart=True))
            for ended in self._journal.lose():
                self._ports.text.send(ended)
            for request in self._journal.requests():
                self._set_deadline(request)
            logger.error(
                "engine died, restarting cause=%r open_requests=%s delay_s=%s",
                *(died.reason, len(self._journal), delay_s),
            )
            await asyncio.sleep(delay_s)
            try:
                await self.start_again()
            except AserveError as error:
                died = Died("engine", error.message)
                continue
            logger.info(
                "engine restarted requests=%s took_s=%.3f",
                len(self._journal),
                time.monotonic() - since_s,
            )
            return
        assert self._on_death is not None
        self._on_death(died.name, EngineDead(died.reason + self._process.limit))

    async def start_again(self) -> None:
        """Starts a process, which loads the weights and adapters of the former one, and sends it
        the open requests. Raises AserveError, once it has ended, if it dies before that, or cannot
        load the weights of the open requests.
        """
        try:
            await self._start_again()
        except AserveError:
            await self._is_buried.wait()
            raise

    async def _start_again(self) -> None:
        self.ready = asyncio.get_running_loop().create_future()
        await self.open()
        await self.ready
        for update in self._weights:
            error = await self._run(update) if self._link.is_open else None
            if error is not None and self._link.is_open:
                await self._link.close(timeout_s=FLUSH_S)
                raise EngineDead(f"the updated weights could not be loaded again: {error.message}")
        for load in list(self._loras.values()):
            error = await self._run(load) if self._link.is_open else None
            if error is not None and self._link.is_open:
                logger.error("adapter lost path=%s cause=%r", load.path, error.message)
                del self._loras[load.slot]
                self._lost_slots[load.slot] = error
        if not self._link.is_open:
            raise EngineDead("the engine's process ended as soon as it was ready; its log says why")
        self._ports.report(EngineUp())
        self._process.note_up()
        self.is_up = True
        self._send_again(self._journal.resume())
        if self._settings is not None:  # after the requests that were admitted before the change
            self._submit(self._settings)

    def _set_deadline(self, request: AdmitRequest) -> None:
        """Ends the request at the end of its timeout or of its longest wait if no engine, which
        would, has it then."""
        times = (request.deadline_s, None if request.is_resumed else request.queue_deadline_s)
        for end_s in filter(None, times):
            asyncio.get_running_loop().call_later(
                max(end_s - time.monotonic(), 0), self._expire, request, end_s
            )

    def _expire(self, request: AdmitRequest, end_s: float) -> None:
        if end_s == request.deadline_s and self._journal.is_waiting(request.request_id):
            self.send(Cancel(request.request_id, None, 0, "deadline"))
        elif not self._journal.was_sent(request.request_id):
            self._end(request.request_id, deadlines_of(request).error("an engine was there").info())

    def _send_again(self, messages: list[RequestEvent]) -> None:
        while messages:
            for message in messages:
                self._submit(message)
            messages = self._journal.next_trial()

    def _submit(self, message: EngineEvent) -> None:
        """Sends a message to the engine, or ends a request whose adapter got lost in a restart."""
        if has_adapter(message) and message.lora_slot in self._lost_slots:
            self._end(message.request_id, self._lost_slots[message.lora_slot])
        else:
            self._link.inbox.send(message)

    async def _run(self, job: EngineJob) -> ErrorInfo | None:
        answer: asyncio.Future[ErrorInfo | None] = asyncio.get_running_loop().create_future()
        self._jobs[job] = answer
        self._link.inbox.send(job)
        return await answer

    def _answer_job(self, job: EngineJob, error: ErrorInfo | None) -> None:
        self._sleep.note_work()
        answer = self._jobs.pop(job)
        match job:
            case LoadLora() if error is None:
                self._loras[job.slot] = job
                self._lost_slots.pop(job.slot, None)
            case LoadWeights() if error is None:
                self._weights = [job]
            case Profile() if error is None:
                self._sleep.has_profile = not job.path
            case _:
                pass
        if not answer.done():  # the client may have gone
            answer.set_result(error)
