"""An event log: the server-sent events of one answer, kept so that clients can resume its stream.

Events are numbered from 0. One writer appends them and never waits. Each reader has its own place:
it reads the events that are kept, and then waits for the next ones. A reader that falls behind the
oldest kept event loses its stream, so slow readers hold neither the writer nor each other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from aserve.errors import ErrorInfo
from aserve.http.errors import RequestFailed, refused
from aserve.unread import UnreadAnswer

END = b"\n\n"  # of an event; JSON never contains it
DATA = b"data: "
LOG_BYTES = 4096  # a generous bound on the memory of an event log without its events
EVENT_BYTES = 64  # and on that of an event without its text
EVENTS_PER_BATCH = 1024


class EventLog:
    """`on_growth` is called with the number of bytes that an append adds."""

    __slots__ = (
        *("_changed", "_events", "_on_growth", "_refusal", "first", "is_done"),
        *("size_bytes", "stream_id"),
    )

    def __init__(self, stream_id: str, *, on_growth: Callable[[int], None]) -> None:
        self.stream_id = stream_id
        self.first = 0  # the number of the oldest kept event
        self.size_bytes = LOG_BYTES
        self.is_done = False
        self._events: list[bytes] = []
        self._on_growth = on_growth
        self._refusal: ErrorInfo | None = None
        self._changed = asyncio.Event()

    @property
    def next(self) -> int:
        """The number of the next event."""
        return self.first + len(self._events)

    def extend(self, events: Iterable[bytes]) -> None:
        """Appends events, each with its number as the `id` of the event."""
        added = [
            b"id: %b:%d\n%b" % (self.stream_id.encode(), number, event)
            for number, event in enumerate(events, start=self.next)
        ]
        size_bytes = sum(map(_size_of, added))
        self._events += added
        self.size_bytes += size_bytes
        self._on_growth(size_bytes)
        self._wake()

    def refuse(self, info: ErrorInfo) -> None:
        """Ends an answer that failed before its first event. Its readers get the error."""
        self._refusal = info
        self.finish()

    def finish(self) -> None:
        self.is_done = True
        self._wake()

    def check(self, start: int) -> None:
        """Raises a 410 if event number `start` is no longer kept."""
        if start < self.first:
            raise refused(
                410,
                f"Event {start} of stream '{self.stream_id}' is no longer kept; the oldest one is "
                f"{self.first}. See --max-resume-bytes.",
            )

    def drop_half(self) -> int:
        """Forgets the older half of the events, and returns their bytes."""
        count = (len(self._events) + 1) // 2
        size_bytes = sum(map(_size_of, self._events[:count]))
        del self._events[:count]
        self.first += count
        self.size_bytes -= size_bytes
        return size_bytes

    async def batches(
        self, start: int = 0, *, idle_s: float | None = None
    ) -> AsyncIterator[list[bytes]]:
        """Yields the events from number `start` on, or an empty batch after `idle_s` without any.
        Raises RequestFailed if the answer failed before its first event.
        """
        while True:
            if self._refusal is not None:
                raise RequestFailed(self._refusal)
            if start < self.first:
                raise UnreadAnswer(f"event {start} of stream {self.stream_id} is no longer kept")
            place = start - self.first
            batch = self._events[place : place + EVENTS_PER_BATCH]
            if not batch:
                if self.is_done:
                    return
                if await self._has_changed(idle_s):
                    continue
            start += len(batch)
            yield batch

    async def _has_changed(self, idle_s: float | None) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(idle_s):
                return await self._changed.wait()
        return False

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _size_of(event: bytes) -> int:
    return EVENT_BYTES + len(event)


def data_of(event: bytes) -> bytes:
    """Returns the JSON of an event."""
    return event[event.index(DATA) + len(DATA) : -len(END)]


class EventLogResponse(web.StreamResponse):
    """A response whose body goes to an event log instead of a connection. Comments, which only keep
    connections open, are left out.
    """

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._log = log
        self._is_prepared = False
        self._unfinished = bytearray()  # the beginning of an event

    @property
    def prepared(self) -> bool:
        return self._is_prepared

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        self._is_prepared = True
        return None

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        place = len(self._unfinished)
        self._unfinished += data
        if self._unfinished.find(END, max(place - 1, 0)) < 0:
            return  # PERF: a long event comes in many blocks, and only new ones are searched
        *events, self._unfinished = self._unfinished.split(END)
        self._log.extend(bytes(event) + END for event in events if not event.startswith(b":"))

    async def write_eof(self, data: bytes = b"") -> None:
        """Ends nothing: the event log ends with the handler that writes it."""
