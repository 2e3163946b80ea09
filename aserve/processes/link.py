"""The socket between frontend and engine: its messages, and `Link`, the actor at each end of it.

The frontend sends Start first, and the engine answers Ready or LoadFailed. Then the actors' own
messages follow.

All messages that one iteration of the loop leaves in the inbox travel in one frame and one write. A
peer that reads slowly lets the inbox grow but blocks nobody; admission bounds the number of
messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeAlias, TypeGuard, TypeVar, cast

import msgspec

from aserve.actors.base import Actor
from aserve.config import Resolved
from aserve.errors import AserveError, ErrorInfo
from aserve.frames import FrameSplitter, framed
from aserve.messages.base import Message
from aserve.messages.changes import EngineJob
from aserve.messages.executor import EngineSpec
from aserve.messages.output import DetokenizerEvent
from aserve.messages.requests import AdmitRequest, EngineEvent
from aserve.observability.reports import EngineReport

# Ends a replica that still imports, and so reads nothing; one that reads ignores it.
END_OF_IMPORT = signal.SIGUSR1


class Start(Message, frozen=True):
    """Asks the engine to load. Relative paths, as that of --record, start at `directory`."""

    resolved: Resolved
    model_dir: str
    directory: str
    is_restart: bool = False  # requests wait for this engine to go on


class StartReplica(Message, frozen=True):
    """Asks a replica of a router to load and serve. Relative paths start at `directory`.
    `environment` has the variables of its share of the machine. `token` proves that a request comes
    from the router.
    """

    resolved: Resolved
    directory: str
    environment: Mapping[str, str]
    token: str


class Ready(Message, frozen=True):
    """The engine has loaded; `about` describes what it chose for this machine."""

    spec: EngineSpec
    about: str


class LoadFailed(Message, frozen=True):
    """The engine could not load; with `is_config` the user can correct the cause."""

    message: str
    is_config: bool


class Died(Message, frozen=True):
    """The last message of an engine that failed: the actor that died, and the reason. It
    `is_silent` if a machine of the engine says nothing any more."""

    name: str
    reason: str
    is_silent: bool = False


class JobDone(Message, frozen=True):
    """The answer to an EngineJob, with the error if there was one."""

    job: EngineJob
    error: ErrorInfo | None


def settle(ready: asyncio.Future[Ready], outcome: Ready | AserveError) -> None:
    """Completes `ready` with the first outcome of a start."""
    if ready.done():
        return
    if isinstance(outcome, Ready):
        ready.set_result(outcome)
    else:
        ready.set_exception(outcome)


def has_adapter(message: EngineEvent) -> TypeGuard[AdmitRequest]:
    return isinstance(message, AdmitRequest) and message.lora_slot > 0


ToEngine: TypeAlias = Start | EngineJob | EngineEvent
ToFrontend: TypeAlias = Ready | LoadFailed | Died | JobDone | EngineReport | DetokenizerEvent

In = TypeVar("In")
Out = TypeVar("Out")

MAX_IN_FRAME = 64  # messages; a backlog behind a slow peer goes out in several frames

# What msgspec raises for a value that has no msgpack form, or no room for it.
UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, MemoryError)

logger = logging.getLogger(__name__)


class Link(Actor[Out], Generic[In, Out]):
    """Calls `deliver` for each message of a peer, in order, and `on_end` once after its last one,
    with the error if there was one. It reads from `open` on, and writes from `start` on.
    """

    def __init__(
        self,
        name: str,
        *,
        kind: Any,  # a type form: the union of incoming messages
        deliver: Callable[[In], None],
        on_end: Callable[[Exception | None], None],
        on_unsendable: Callable[[Out], None],
    ) -> None:
        super().__init__(name)
        self._on_unsendable = on_unsendable
        self._unsent: deque[Out] = deque()  # taken from the inbox, and waiting for the socket
        self._encoder = msgspec.msgpack.Encoder()
        decoder = msgspec.msgpack.Decoder(list[kind])
        self._new_wire = functools.partial(_Wire, decoder, deliver, on_end)
        self._wire = self._new_wire()

    async def open(self, sock: socket.socket) -> None:
        """Connects to a peer. After the end of one peer it may be called again, for another."""
        self._wire = self._new_wire()
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._wire, sock=sock)

    @property
    def is_open(self) -> bool:
        return self._wire.is_open

    def discard(self) -> None:
        """Drops the messages that still wait for a peer which has ended."""
        self.inbox.take()
        self._unsent.clear()

    async def run(self) -> None:
        """Waits for a slow peer without a deadline; the supervisor judges whether it is alive."""
        async for messages in self.inbox.batches():
            self.beat()
            self._unsent.extend(messages)
            while self._unsent:
                await self._wire.is_writable.wait()
                self._write_next()

    def backlog(self) -> int:
        return super().backlog() + len(self._unsent)

    def write(self, *messages: Out) -> None:
        """Writes now, before anything that is still in the inbox. A message that cannot be
        encoded goes to `on_unsendable`, and the others are sent.
        """
        try:
            data = self._encoder.encode(messages)
        except UNENCODABLE:
            data = self._encoder.encode([one for one in messages if self._is_sendable(one)])
        self._wire.write(framed(data))

    async def close(self, *, timeout_s: float) -> None:
        """Call it after `stop`. Messages in the inbox still go out if the peer reads in time."""
        self._unsent.extend(self.inbox.take())
        while self._unsent:
            self._write_next()
        await self._wire.close(timeout_s)

    def _write_next(self) -> None:
        count = min(len(self._unsent), MAX_IN_FRAME)
        if count:  # not after `discard`
            self.write(*(self._unsent.popleft() for _ in range(count)))

    def _is_sendable(self, message: Out) -> bool:
        try:
            self._encoder.encode(message)
        except UNENCODABLE as error:
            kind = type(message).__name__
            logger.error("not sent link=%s message=%s", self.name, kind, exc_info=error)
            self._on_unsendable(message)
            return False
        return True


class _Wire(asyncio.Protocol):
    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        deliver: Callable[[Any], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self.is_writable = asyncio.Event()
        self._decoder = decoder
        self._deliver = deliver
        self._on_end = on_end
        self._splitter = FrameSplitter()
        self._transport: asyncio.WriteTransport | None = None
        self._has_ended = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def write(self, data: bytes) -> None:
        """Drops the data when the peer has gone, which `on_end` has reported."""
        if self._transport is not None:
            self._transport.write(data)

    async def close(self, timeout_s: float) -> None:
        if self._transport is None:
            return
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_ended.wait()
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self.is_writable.set()

    def pause_writing(self) -> None:
        self.is_writable.clear()

    def resume_writing(self) -> None:
        self.is_writable.set()

    def data_received(self, data: bytes) -> None:
        for frame in self._splitter.feed(data):
            for message in self._decoder.decode(frame):
                self._deliver(message)

    def connection_lost(self, error: Exception | None) -> None:
        if self._splitter.is_within_frame:
            logger.warning("the other process ended within a message")
        self._transport = None
        self._has_ended.set()
        self.is_writable.set()  # what is written from now on is dropped
        self._on_end(error)
