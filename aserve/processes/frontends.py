"""The further frontend processes of a server, as the first one starts and serves them.

The first frontend is the process that the user started. It has the link to the engine, the journal
and the restarts. A further frontend sends its requests over a link like the engine's, and they go
on to the engine through the journal, so that it sees nothing of an engine that dies. What the
engine says about a request goes to the frontend whose number is in the request's id; no table has
to be kept. A frontend that is started again has a new number, so it gets nothing of the old one's.

`Frontends` alone writes which frontends there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias, assert_never
from urllib.parse import urlsplit

import msgspec

from aserve.actors.supervisor import Failure
from aserve.config import Resolved
from aserve.engine_core import EngineCorePorts
from aserve.errors import EngineDead
from aserve.frontend import Frontend
from aserve.http.peers import Peers, owner_of
from aserve.messages.base import Message, array_i32
from aserve.messages.changes import Amend, Amended, ChangeSettings, LoadWeights
from aserve.messages.output import (
    DetokenizerEvent,
    NextTokens,
    Refused,
    Retired,
    SequenceOutput,
    StepOutput,
)
from aserve.messages.requests import AdmitRequest, Cancel, EngineEvent, OpenText
from aserve.observability.reports import EngineReport, RequestState, TickReport
from aserve.processes.engine_process import DEATH_S, END_S, EngineProcess, Restarts, ended, spawned
from aserve.processes.link import Died, Link, Ready, Start
from aserve.processes.remote import RemoteEngineCore

FRONTEND = (sys.executable, "-m", "aserve.processes.frontend")

logger = logging.getLogger(__name__)


class Join(Message, frozen=True):
    """Asks a new frontend to serve: `start` has the options and the model, `ready` the engine."""

    start: Start
    ready: Ready
    peers: Peers
    port: int


class Reachable(Message, frozen=True):
    """The frontend has opened its private socket, and waits for the SharedState.

    NOTE: what the administrator changes later reaches it by the one or the other, so no client
    meets a frontend that does not know of a pause or of new weights.
    """


class Serving(Message, frozen=True):
    """The frontend has opened the port."""


class SharedState(Message, frozen=True):
    """The state that all frontends share and that the administrator may change."""

    cache_epoch: str
    is_paused: bool
    is_updating: bool
    is_asleep: bool
    weight_version: str
    weights: LoadWeights | None


class Stop(Message, frozen=True):
    """Asks a frontend to drain and end. The second one ends its open requests at once."""


ToFrontendProcess: TypeAlias = (
    Join | SharedState | Stop | Died | ChangeSettings | TickReport | RequestState | DetokenizerEvent
)
FromFrontendProcess: TypeAlias = Reachable | Serving | AdmitRequest | Cancel | Amend


class Frontends:
    def __init__(self, resolved: Resolved, *, command: Sequence[str] = FRONTEND) -> None:
        self.peers = Peers(0, tempfile.mkdtemp(prefix="aserve-"), secrets.token_hex(16))
        self.processes = [
            FrontendProcess(self, command, max_restarts=resolved.server.max_engine_restarts)
            for _ in range(resolved.server.frontends - 1)
        ]
        self._numbers = itertools.count(1)
        self._own: EngineCorePorts | None = None
        self._core: RemoteEngineCore | None = None
        self._first: Frontend | None = None
        self._engine: tuple[Start, Ready] | None = None
        self._settings: ChangeSettings | None = None  # the last change
        self._port = 0

    def connect(
        self, ports: EngineCorePorts, process: EngineProcess, *, nap_after_s: float | None = None
    ) -> RemoteEngineCore:
        """Returns an engine that all frontends use. `ports` are those of the first one."""
        self._own = ports
        routed = dataclasses.replace(ports, text=RoutedOutputs(self._deliver), report=self._report)
        core = self._core = RemoteEngineCore(routed, process, nap_after_s=nap_after_s)
        core.inbox = _Inputs(core, self._change)
        return core

    def note_ready(self, start: Start, ready: Ready) -> None:
        self._engine = (start, ready)

    async def open(self, first: Frontend, address: str) -> list[asyncio.Future[None]]:
        """Starts the processes. Each future completes when one of them serves, or has failed."""
        self._first, self._port = first, urlsplit(address).port or 0
        for process in self.processes:
            await process.open()
            process.link.start(process.on_fault)
        return [process.serving for process in self.processes]

    def new_peers(self) -> Peers:
        """Returns what the next frontend knows about the others."""
        return msgspec.structs.replace(self.peers, number=next(self._numbers))

    def join(self, peers: Peers) -> Join:
        assert self._engine is not None
        assert self._first is not None
        start, ready = self._engine
        options = dataclasses.replace(start.resolved, server=self._first.resolved.server)
        start = msgspec.structs.replace(start, resolved=options)
        return Join(start, ready, peers, self._port)

    def state(self) -> list[SharedState | ChangeSettings]:
        """Returns what a new frontend must know that the administrator has changed. It opens the
        port behind the SharedState.
        """
        shared = self._shared()
        return [shared] if self._settings is None else [self._settings, shared]

    def submit(self, message: AdmitRequest | Cancel | Amend) -> None:
        assert self._core is not None
        self._core.send(message)

    def share(self) -> None:
        """Tells all frontends the state of the first one."""
        self._send_all(self._shared())

    def _shared(self) -> SharedState:
        assert self._first is not None
        now = self._first.state
        return SharedState(
            now.cache_epoch,
            now.is_paused,
            now.is_updating,
            now.is_asleep,
            now.weight_version,
            now.weights,
        )

    def lose(self, number: int) -> None:
        """Cancels what a frontend that has ended had open in the engine."""
        assert self._core is not None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.peers.socket_of(number))
        for request in self._core.requests():
            if owner_of(request.request_id) == number:
                self._core.send(Cancel(request.request_id, None, 0, "cancelled"))

    def stop(self) -> None:
        """Ends the open requests of frontends that drain already."""
        self._send_all(Stop())

    async def drain(self, timeout_s: float, failure: Failure | None) -> None:
        """Returns when all processes have ended. After a failure of the engine they have nothing to
        wait for.
        """
        last = Stop() if failure is None else Died(failure.name, str(failure.error))
        self._send_all(last)
        await asyncio.gather(*(process.end(timeout_s + END_S) for process in self.processes))

    async def close(self) -> None:
        """Ends the processes that still run."""
        await asyncio.gather(*(process.end(0) for process in self.processes))

    def remove_sockets(self) -> None:
        shutil.rmtree(self.peers.directory, ignore_errors=True)

    def _change(self, message: ChangeSettings) -> None:
        """The first frontend changes the settings of all of them, and of the engine."""
        self._settings = message
        self._send_all(message)

    def _deliver(self, number: int, message: DetokenizerEvent) -> None:
        """Sends what the engine says to a frontend. Of one that has ended nobody hears it."""
        assert self._own is not None
        if not number:
            self._own.text.send(message)
            return
        self._tell(number, message)

    def _report(self, report: EngineReport) -> None:
        """The first frontend counts the steps. Each frontend hears of its own requests."""
        assert self._own is not None
        self._own.report(report)
        match report:
            case TickReport() if report.admitted:
                for number, request_ids in _by_owner(report.admitted).items():
                    self._tell(number, TickReport(admitted=request_ids))
            case RequestState():
                self._tell(owner_of(report.request_id), report)
            case _:
                pass

    def _tell(self, number: int, message: ToFrontendProcess) -> None:
        for process in self.processes:
            if number and process.number == number:
                process.link.inbox.send(message)

    def _send_all(self, message: SharedState | ChangeSettings | Stop | Died) -> None:
        for process in self.processes:
            self._tell(process.number, message)


def _by_owner(request_ids: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    owners: dict[int, tuple[str, ...]] = {}
    for request_id in request_ids:
        owner = owner_of(request_id)
        owners[owner] = (*owners.get(owner, ()), request_id)
    return owners


class _Inputs:
    """The inbox of the engine, as the first frontend uses it: the others hear of new settings."""

    def __init__(self, core: RemoteEngineCore, on_change: Callable[[ChangeSettings], None]) -> None:
        self._core = core
        self._on_change = on_change

    def send(self, message: EngineEvent) -> None:
        if isinstance(message, ChangeSettings):
            self._on_change(message)
        self._core.send(message)


class RoutedOutputs:
    """The sink of the engine's outputs. It sends each frontend those of its own requests."""

    def __init__(self, deliver: Callable[[int, DetokenizerEvent], None]) -> None:
        self._deliver = deliver

    def send(self, message: DetokenizerEvent) -> None:
        deliver = self._deliver
        match message:
            case StepOutput():
                for number, part in _parts_of(message).items():
                    deliver(number, part)
            case Amended():
                deliver(owner_of(message.amend.request_id), message)
            case OpenText() | Retired() | Refused():
                deliver(owner_of(message.request_id), message)
            case _:
                assert_never(message)


def _parts_of(output: StepOutput) -> dict[int, StepOutput]:
    """Returns the part of each frontend that has some of its requests."""
    tokens = output.next_tokens
    indices: defaultdict[int, list[int]] = defaultdict(list)  # in `tokens`
    for index, request_id in enumerate(tokens.request_ids if tokens else ()):
        indices[owner_of(request_id)].append(index)
    sequences: defaultdict[int, list[SequenceOutput]] = defaultdict(list)
    for each in output.sequences:
        sequences[owner_of(each.request_id)].append(each)
    return {
        owner: StepOutput(
            output.iteration,
            tuple(sequences.get(owner, ())),
            _tokens_of(tokens, indices[owner]) if tokens and owner in indices else None,
        )
        for owner in {**indices, **sequences}
    }


def _tokens_of(tokens: NextTokens, indices: list[int]) -> NextTokens:
    """Returns the tokens of the sequences at these places."""
    columns = (tokens.children, tokens.positions, tokens.token_ids, tokens.cached_lens)
    return NextTokens(
        tuple([tokens.request_ids[index] for index in indices]),
        *[array_i32(column)[indices].tobytes() for column in columns],
    )


class FrontendProcess:
    """A further frontend process, and its successors. Its link is opened again for each."""

    def __init__(self, frontends: Frontends, command: Sequence[str], *, max_restarts: int) -> None:
        self.number = 0  # of the present process; 0 before the first one
        self.process: subprocess.Popen[bytes] | None = None
        self._frontends = frontends
        self._command = command
        self._restarts = Restarts(max_restarts)
        self._up_at_s = time.monotonic()
        self._has_served = False
        self._is_ending = False

    async def open(self) -> None:
        """Starts a process. `serving` completes when the first one has opened the port."""
        if not self.number:
            self.serving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.link = Link[FromFrontendProcess, ToFrontendProcess](
                "frontend",
                kind=FromFrontendProcess,
                deliver=self._on_message,
                on_end=self._on_end,
                on_unsendable=lambda _: None,
            )
        peers = self._frontends.new_peers()
        self.number, self._up_at_s = peers.number, time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = spawned(self._command, theirs)
        await self.link.open(ours)
        self.link.write(self._frontends.join(peers))

    def on_fault(self, name: str, error: BaseException) -> None:
        """The link itself has failed: the process ends, and is started again."""
        if self.process is not None:
            self.process.kill()

    async def end(self, timeout_s: float) -> None:
        """Waits for the end of the process, and kills it after the time."""
        self._is_ending = True
        if self.process is None:
            return
        await ended(self.process, timeout_s=timeout_s)
        await self.link.stop()
        await self.link.close(timeout_s=0)

    def _on_message(self, message: FromFrontendProcess) -> None:
        match message:
            case Reachable():
                for state in self._frontends.state():
                    self.link.inbox.send(state)
            case Serving():
                self._has_served = True
                if not self.serving.done():
                    self.serving.set_result(None)
            case AdmitRequest() | Cancel() | Amend():
                self._frontends.submit(message)
            case _:
                assert_never(message)

    def _on_end(self, error: Exception | None) -> None:
        self._frontends.lose(self.number)
        self.link.discard()
        if not self._is_ending:
            self.link.spawn(self._replace())

    async def _replace(self) -> None:
        assert self.process is not None
        code = await ended(self.process, timeout_s=DEATH_S)
        if not self._has_served:
            if not self.serving.done():
                self.serving.set_exception(
                    EngineDead("a frontend process ended before it served; its log says why")
                )
            return
        delay_s = self._restarts.delay_s(up_s=time.monotonic() - self._up_at_s)
        if delay_s is None:
            logger.critical("frontend died too often, the others go on exit_code=%s", code)
            return
        logger.error("frontend died, restarting exit_code=%s delay_s=%s", code, delay_s)
        await asyncio.sleep(delay_s)
        if not self._is_ending:
            await self.open()
