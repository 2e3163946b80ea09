"""`KvTiers`: copies pages from the device to host memory, and back when a sequence wants them."""

# Theory of operation
#
# `send` is the scheduler's port, and acts at once: what SaveKv names is read on the device before
# the next launch, which may write it. The device's copies are split into pages, and put in their
# places, by one thread, part by part in order. Each LoadKv has a thread of its own, so that one
# load does not wait for another one. Bookkeeping is on the event loop alone: places are taken, and
# pages pinned, before a thread begins, and the scheduler hears of a page when it is in its place.

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import assert_never

import numpy as np

from aserve.actors.base import Actor
from aserve.cache.page_keys import split_keys
from aserve.channel import Sink
from aserve.host.threads import Worker, in_thread
from aserve.messages.base import array_i32
from aserve.messages.executor import SchedulerEvent
from aserve.messages.transfers import HostKv, KvAccess, KvLoaded, LoadKv, SaveKv, TiersChanged
from aserve.observability.reports import TierUsed
from aserve.tiers.file_tier import FileTier
from aserve.tiers.host_pages import HostPages
from aserve.tiers.page_files import PageFiles
from aserve.tiers.page_layout import ArrayU8, PageLayout

PART_BYTES = 16 << 20  # of one copy between device and host
MAX_SAVING_BYTES = 1 << 30  # on their way to host memory; what comes beyond that is not stored
MAX_WRITES = 2  # parts that wait for the device, per load

logger = logging.getLogger(__name__)


class KvTiers(Actor[None]):
    def __init__(
        self,
        access: KvAccess,
        layout: PageLayout,
        host: HostPages,
        *,
        events: Sink[SchedulerEvent],
        report: Callable[[TierUsed], None],
        files: PageFiles | None = None,
    ) -> None:
        super().__init__("kv-tiers")
        self._access = access
        self._layout = layout
        self._host = host
        self._events = events
        self._report = report
        self._part_len = max(1, PART_BYTES // layout.page_bytes)
        self._max_saving = max(self._part_len, MAX_SAVING_BYTES // layout.page_bytes)
        self._num_saving = 0  # pages
        self._files: FileTier | None = None
        if files is not None:
            self._files = FileTier(
                files, on_written=self._add, on_forgotten=self._drop, report=report
            )
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    async def run(self) -> None:
        """Waits for the thread that saves; loads have tasks of their own."""
        if self._files is not None:
            self._files.start()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def on_end(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_settle, ended, error)

        Worker("kv-tiers", functools.partial(_work, self._jobs), on_end=on_end).start()
        await ended

    async def stop(self) -> None:
        self._jobs.put(None)
        await super().stop()
        if self._files is not None:
            await self._files.stop()

    def send(self, effect: SaveKv | LoadKv) -> None:
        match effect:
            case SaveKv():
                self._save(effect)
            case LoadKv():
                self._load(effect)
            case _:
                assert_never(effect)

    # ------------------------------------------------------------ down

    def _save(self, effect: SaveKv) -> None:
        keys = split_keys(effect.keys)
        indices: list[int] = []
        places: list[int] = []
        removed: list[bytes] = []
        for index in reversed(range(len(keys))):  # the pages in front are worth more
            is_full = self._num_saving + len(indices) >= self._max_saving
            place, evicted = (None, None) if is_full else self._host.take()
            if place is None:
                removed.append(keys[index])
                continue
            indices.append(index)
            places.append(place)
            removed += [evicted] if evicted is not None else []
        self._drop(removed)
        for start in range(0, len(indices), self._part_len):
            part = slice(start, start + self._part_len)
            pages = tuple(array_i32(each)[indices[part]].tobytes() for each in effect.pages)
            values = self._access.read(pages, 0, len(indices[part]) * self._layout.page_size)
            self._copy_out(values, [keys[index] for index in indices[part]], places[part])

    def _copy_out(self, values: Future[HostKv], keys: list[bytes], places: list[int]) -> None:
        loop = asyncio.get_running_loop()
        self._num_saving += len(keys)

        def job() -> None:
            """Runs on the thread that saves."""
            pages: ArrayU8 | None = None
            try:
                pages = self._layout.split(values.result()())
                self._host.write(places, pages)
            except (RuntimeError, ValueError):
                logger.exception("%d pages of KV could not be saved", len(keys))
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._end_save, keys, places, pages)

        self._jobs.put(job)

    def _end_save(self, keys: list[bytes], places: list[int], pages: ArrayU8 | None) -> None:
        self._num_saving -= len(keys)
        if pages is None:
            for place in places:
                self._host.give_back(place)
            self._drop(keys)
            return
        self._enter(keys, places)
        self._add(keys)
        self._note("down", len(keys))
        if self._files is not None:
            self._files.write(keys, pages)

    def _enter(self, keys: list[bytes], places: list[int]) -> None:
        for key, place in zip(reversed(keys), reversed(places), strict=True):
            self._host.enter(key, place)

    def _add(self, keys: list[bytes]) -> None:
        self._events.send(TiersChanged(added=b"".join(keys)))

    def _drop(self, keys: list[bytes]) -> None:
        """Tells the scheduler of pages that are in no tier any more."""
        gone = [key for key in keys if not self._has(key)]
        if gone:
            self._events.send(TiersChanged(removed=b"".join(gone)))

    def _has(self, key: bytes) -> bool:
        return key in self._host or (self._files is not None and key in self._files)

    # ------------------------------------------------------------ up

    async def look(self, keys: list[bytes]) -> None:
        """Looks for the pages of a request that has arrived, as far as they are not known."""
        first = next((index for index, key in enumerate(keys) if not self._has(key)), len(keys))
        if self._files is not None and first < len(keys):
            found = await self._files.look(keys[first:])
            if found:
                self._add(found)

    def _load(self, effect: LoadKv) -> None:
        keys = split_keys(effect.keys)
        places = self._host.pin(keys)
        self.spawn(self._bring(effect, keys, places, self._access.barrier()))

    async def _bring(
        self, effect: LoadKv, keys: list[bytes], places: list[int], barrier: Future[None]
    ) -> None:
        num_here, removed = len(places), list[bytes]()
        read = await self._read_files(keys[num_here:])
        fresh: list[int] = []
        for _ in read:
            place, evicted = self._host.take()
            fresh += [] if place is None else [place]
            removed += [] if evicted is None else [evicted]
        stop = num_here + len(fresh)
        work = functools.partial(self._copy_in, effect, places + fresh, read[: len(fresh)], barrier)
        try:
            num_pages = await in_thread(work, name="kv-tiers")
        finally:
            self._host.unpin(keys[:num_here])
        self._enter(keys[num_here:stop], fresh)
        self._drop(removed + keys[stop:])
        self._events.send(KvLoaded(effect.request_id, effect.child, effect.first + num_pages))
        self._note("up", num_pages)

    async def _read_files(self, keys: list[bytes]) -> list[ArrayU8]:
        """Returns the pages of the first keys that files have, and host memory has not."""
        if self._files is None or not keys:
            return []
        are_filed = [key in self._files and key not in self._host for key in keys]
        num_filed = [*are_filed, False].index(False)
        return await self._files.read(keys[:num_filed]) if num_filed else []

    def _copy_in(
        self, effect: LoadKv, places: list[int], read: list[ArrayU8], barrier: Future[None]
    ) -> int:
        """Runs on the load's thread. Puts what was read from files into the last places first.
        Returns how many pages are on the device; nothing writes to any of them any more.
        """
        for place, page in zip(places[len(places) - len(read) :], read, strict=True):
            self._host.write([place], page[np.newaxis])
        writes: deque[Future[None]] = deque()
        num_written = 0
        try:
            barrier.result()
            for start in range(0, len(places), self._part_len):
                part = places[start : start + self._part_len]
                while len(writes) >= MAX_WRITES:
                    writes.popleft().result()
                writes.append(self._write(effect, start, part))
                num_written = start + len(part)
            while writes:
                writes.popleft().result()
        except (RuntimeError, ValueError):
            logger.exception("the KV of %s could not be loaded", effect.request_id)
            num_written = 0
            while writes:
                writes.popleft().exception()
        return num_written

    def _write(self, effect: LoadKv, start: int, places: Sequence[int]) -> Future[None]:
        stop, size = start + len(places), self._layout.page_size
        pages = tuple(each[4 * start : 4 * stop] for each in effect.pages)
        ids = effect.token_ids[4 * start * size : 4 * stop * size]
        return self._access.write(pages, 0, ids, self._layout.join(self._host.read(places)))

    def _note(self, direction: str, num_pages: int) -> None:
        page_bytes = self._layout.page_bytes
        self._report(
            TierUsed("host", direction, num_pages * page_bytes, len(self._host) * page_bytes)
        )


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _settle(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
