"""The files below host memory, as the event loop sees them: which pages they have, and slow reads
and writes beside it. A store that cannot be read, or hangs, is left alone for a while, and costs no
request more than a bounded wait. One that only cannot be written, such as a full disk, is still
read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from aserve.host.threads import Worker, in_thread
from aserve.observability.reports import TierUsed
from aserve.tiers.page_files import PageFiles
from aserve.tiers.page_layout import ArrayU8

MAX_WAITING_BYTES = 256 << 20  # pages that wait to be written; what comes beyond that is not
MAX_KNOWN = 1 << 20  # files of which the engine knows without looking
LOOK_S = 0.5  # how long a request waits to hear which pages there are
READ_S = 10.0  # how long it waits for them
COOL_S = 30.0

Job: TypeAlias = Callable[[], None]
T = TypeVar("T")

logger = logging.getLogger(__name__)


class FileTier:
    """All methods are called on the event loop's thread. `on_written` is called with the keys of
    new files, and `on_forgotten` with those of which nothing is known any more.
    """

    def __init__(
        self,
        files: PageFiles,
        *,
        on_written: Callable[[list[bytes]], None],
        on_forgotten: Callable[[list[bytes]], None],
        report: Callable[[TierUsed], None],
    ) -> None:
        self._files = files
        self._on_written = on_written
        self._on_forgotten = on_forgotten
        self._report = report
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._num_waiting = 0
        self._reads_from_s = self._writes_from_s = 0.0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def start(self) -> None:
        def work() -> None:
            while (job := self._jobs.get()) is not None:
                job()

        Worker("kv-files", work, on_end=_log_end).start()

    async def stop(self) -> None:
        """Waits for the file that is being written, if the store is not too slow for that."""
        loop = asyncio.get_running_loop()
        self._files.close()
        ended: asyncio.Future[None] = loop.create_future()
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(lambda: _tell(loop, functools.partial(_end, ended)))
        self._jobs.put(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await ended

    def write(self, keys: Sequence[bytes], pages: ArrayU8) -> None:
        """Writes those pages that have no files yet, some time."""
        most = max(1, MAX_WAITING_BYTES // self._files.page_bytes)
        loop = asyncio.get_running_loop()
        for key, page in zip(keys, pages, strict=True):
            if key not in self._known and self._num_waiting < most and self._may_write:
                self._num_waiting += 1
                self._jobs.put(functools.partial(self._write, loop, key, page))

    async def read(self, keys: Sequence[bytes]) -> list[ArrayU8]:
        """Returns the pages of the first keys, as far as they come in time."""
        pages = await self._try(functools.partial(self._files.read, keys), limit_s=READ_S) or []
        if len(pages) < len(keys):
            self.forget(keys[len(pages) :])
        self._report(TierUsed("file", "up", len(pages) * self._files.page_bytes, None))
        return pages

    async def look(self, keys: Sequence[bytes]) -> list[bytes]:
        """Returns those of the first keys that have files, and knows them from now on."""
        found = await self._try(functools.partial(self._files.num_there, keys), limit_s=LOOK_S)
        there = list(keys[: found or 0])
        self._note(there)
        return there

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._known.pop(key, None)

    @property
    def _may_read(self) -> bool:
        return time.monotonic() >= self._reads_from_s

    @property
    def _may_write(self) -> bool:
        return time.monotonic() >= self._writes_from_s

    async def _try(self, work: Callable[[], T], *, limit_s: float) -> T | None:
        """Returns None if the work fails, or takes too long: its thread is then left behind."""
        if not self._may_read:
            return None
        try:
            async with asyncio.timeout(limit_s):
                return await in_thread(work, name="kv-files")
        except (OSError, TimeoutError) as error:
            self._reads_from_s = self._writes_from_s = time.monotonic() + COOL_S
            logger.warning("--hicache-storage is left alone for %.0f s: %r", COOL_S, error)
        return None

    def _note(self, keys: Sequence[bytes]) -> None:
        self._known.update(dict.fromkeys(keys))
        gone = [self._known.popitem(last=False)[0] for _ in range(len(self._known) - MAX_KNOWN)]
        if gone:
            self._on_forgotten(gone)

    def _write(self, loop: asyncio.AbstractEventLoop, key: bytes, page: ArrayU8) -> None:
        """Runs on the thread that writes."""
        outcome: OSError | bool = self._may_write
        try:
            if outcome:
                self._files.write(key, page)
        except OSError as error:
            outcome = error
        _tell(loop, functools.partial(self._end_write, key, outcome))

    def _end_write(self, key: bytes, outcome: OSError | bool) -> None:
        self._num_waiting -= 1
        if isinstance(outcome, OSError):
            self._writes_from_s = time.monotonic() + COOL_S
            logger.warning("--hicache-storage is not written for %.0f s: %r", COOL_S, outcome)
        if outcome is not True:
            return
        self._note([key])
        self._on_written([key])
        self._report(TierUsed("file", "down", self._files.page_bytes, None))


def _tell(loop: asyncio.AbstractEventLoop, work: Job) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(work)


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _log_end(error: BaseException | None) -> None:
    if error is not None:
        logger.error("pages are not written to files any more: %r", error)
