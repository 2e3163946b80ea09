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

from aserve.actors.base import Actor
from aserve.cache.page_keys import KEY_BYTES
from aserve.channel import Sink
from aserve.host.threads import Worker, in_thread
from aserve.messages.base import array_i32
from aserve.messages.executor import SchedulerEvent
from aserve.messages.transfers import HostKv, KvAccess, KvLoaded, LoadKv, SaveKv, TiersChanged
from aserve.observability.reports import TierUsed
from aserve.tiers.host_pages import HostPages
from aserve.tiers.page_layout import PageLayout

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
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    async def run(self) -> None:
        """Waits for the thread that saves; loads have tasks of their own."""
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
        if removed:
            self._events.send(TiersChanged(removed=b"".join(removed)))
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
            try:
                self._host.write(places, self._layout.split(values.result()()))
                is_saved = True
            except (RuntimeError, ValueError):
                logger.exception("%d pages of KV could not be saved", len(keys))
                is_saved = False
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._end_save, keys, places, is_saved)

        self._jobs.put(job)

    def _end_save(self, keys: list[bytes], places: list[int], is_saved: bool) -> None:
        self._num_saving -= len(keys)
        if not is_saved:
            for place in places:
                self._host.give_back(place)
            self._events.send(TiersChanged(removed=b"".join(keys)))
            return
        for key, place in zip(reversed(keys), reversed(places), strict=True):
            self._host.enter(key, place)
        self._events.send(TiersChanged(added=b"".join(keys)))
        self._note("down", len(keys))

    # ------------------------------------------------------------ up

    def _load(self, effect: LoadKv) -> None:
        keys = split_keys(effect.keys)
        places = self._host.pin(keys)
        self.spawn(self._bring(effect, keys, places))

    async def _bring(self, effect: LoadKv, keys: list[bytes], places: list[int]) -> None:
        work = functools.partial(self._copy_in, effect, places)
        try:
            num_pages = await in_thread(work, name="kv-tiers")
        finally:
            self._host.unpin(keys[: len(places)])
        if len(places) < len(keys):
            self._events.send(TiersChanged(removed=b"".join(keys[len(places) :])))
        self._events.send(KvLoaded(effect.request_id, effect.child, effect.first + num_pages))
        self._note("up", num_pages)

    def _copy_in(self, effect: LoadKv, places: list[int]) -> int:
        """Runs on the load's thread. Returns how many pages are on the device; nothing writes to
        any of them any more.
        """
        writes: deque[Future[None]] = deque()
        num_written = 0
        try:
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


def split_keys(keys: bytes) -> list[bytes]:
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


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
