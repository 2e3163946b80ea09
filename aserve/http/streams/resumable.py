"""The streams that clients can resume: their event logs, and the tasks that write them.

A stream belongs to the API key that began it. It is kept for `--resume-ttl` seconds after its last
reader has left and, once it has no reader, its generation is cancelled after that time; only a
background response goes on to its end. All event logs together have at most `--max-resume-bytes`:
ended streams without readers go first, the oldest before others, and then the largest event log
forgets its older events. `Streams` alone writes which streams are kept.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from aiohttp import web

from aserve.config import ServerOptions
from aserve.errors import AserveError, BugError, ErrorInfo, NotFound
from aserve.http.errors import RequestFailed, info_of
from aserve.http.openai.checks import unsupported
from aserve.http.streams.event_log import LOG_BYTES, EventLog

logger = logging.getLogger(__name__)

Produce: TypeAlias = Callable[[], Awaitable[object]]
Fail: TypeAlias = Callable[[ErrorInfo], Awaitable[None]]


class StreamKey(NamedTuple):
    owner: str
    stream_id: str  # the id of the answer


@dataclass(slots=True, eq=False)
class ResumableStream:
    log: EventLog
    is_background: bool
    task: asyncio.Task[None] | None = None
    num_readers: int = 0
    expiry: asyncio.TimerHandle | None = None

    def stop_clock(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class Streams:
    def __init__(self, options: ServerOptions) -> None:
        self.size_bytes = 0
        self._ttl_s = options.resume_ttl
        self._max_bytes = options.max_resume_bytes
        self._kept: dict[StreamKey, ResumableStream] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: StreamKey) -> bool:
        return key in self._kept

    def check_enabled(self) -> None:
        if not self._ttl_s:
            raise unsupported("resumable", "This server was started with --resume-ttl 0.")

    def new_log(self, key: StreamKey, *, is_background: bool = False) -> EventLog:
        log = EventLog(key.stream_id, on_growth=functools.partial(self._grow, key))
        self._kept[key] = ResumableStream(log, is_background)
        self._grow(key, LOG_BYTES)
        return log

    def run(self, key: StreamKey, produce: Produce, fail: Fail) -> None:
        """Starts the task that writes a new log. `fail` writes the last events of an answer
        that fails, or refuses the answer.
        """
        kept = self._kept[key]
        kept.task = asyncio.create_task(self._produce(key, kept, produce, fail))

    async def _produce(
        self, key: StreamKey, kept: ResumableStream, produce: Produce, fail: Fail
    ) -> None:
        try:
            await produce()
        except (AserveError, RequestFailed) as error:
            await fail(info_of(error))
        except Exception:
            logger.exception("stream failed stream=%s", key.stream_id)
            await fail(BugError(f"internal error; the stream is {key.stream_id}").info())
        finally:
            kept.log.finish()
            self._start_clock(key, kept)

    @contextmanager
    def reading(self, key: StreamKey) -> Iterator[EventLog]:
        """Keeps a stream while it is read. Raises NotFound."""
        kept = self._kept.get(key)
        if kept is None:
            raise NotFound(
                f"Stream '{key.stream_id[:80]}' not found: it never was, is not resumable, or was "
                f"kept for {self._ttl_s:g} seconds after its last reader.",
                code="stream_not_found",
            )
        kept.num_readers += 1
        kept.stop_clock()
        try:
            yield kept.log
        finally:
            kept.num_readers -= 1
            self._start_clock(key, kept)

    def discard(self, key: StreamKey) -> None:
        """Forgets a stream, and cancels its generation. It may be unknown."""
        kept = self._kept.get(key)
        self.forget(key)
        if kept is not None and kept.task is not None:
            kept.task.cancel()

    def forget(self, key: StreamKey) -> None:
        """Nobody finds the stream any more. Its readers get the events up to its end."""
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        kept.stop_clock()
        self.size_bytes -= kept.log.size_bytes

    async def close(self) -> None:
        """Ends all streams. The server stops."""
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        for key in list(self._kept):
            self.discard(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_clock(self, key: StreamKey, kept: ResumableStream) -> None:
        """Starts the time after which a stream without readers is discarded."""
        is_needed = kept.num_readers or (kept.is_background and not kept.log.is_done)
        if is_needed or self._kept.get(key) is not kept:
            return
        kept.stop_clock()
        kept.expiry = asyncio.get_running_loop().call_later(self._ttl_s, self.discard, key)

    def _grow(self, key: StreamKey, size_bytes: int) -> None:
        if key not in self._kept:
            return  # it was discarded, and its task ends
        self.size_bytes += size_bytes
        while self.size_bytes > self._max_bytes:
            ended = (k for k, s in self._kept.items() if s.log.is_done and not s.num_readers)
            oldest = next(ended, None)
            if oldest is not None:
                self.discard(oldest)
                continue
            largest = max(self._kept.values(), key=lambda kept: kept.log.size_bytes)
            dropped = largest.log.drop_half()
            self.size_bytes -= dropped
            if not dropped:
                return


STREAMS = web.AppKey("streams", Streams)
