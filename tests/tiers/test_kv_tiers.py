"""Pages between a toy device and host memory: what comes up is what went down, and a place has one
owner, whatever fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Future

import numpy as np
import pytest

from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import SchedulerEvent
from aserve.messages.transfers import HostKv, KvLoaded, LoadKv, SaveKv, TiersChanged
from aserve.observability.reports import TierUsed
from aserve.tiers.actor import KvTiers
from aserve.tiers.host_pages import HostPages
from aserve.tiers.page_files import Folder, PageFiles
from aserve.tiers.page_layout import PageLayout

SHAPES = ((2, 3), (1, 5))  # of the one pool of each group
PAGE = 2
NUM_PAGES = 8


class ToyAccess:
    """`write` stays undone until `finish_writes`, if `is_slow`. `launched` is done when what was
    launched before the last load has run.
    """

    geometry: str = "toy"
    bytes_per_token: int = 11
    pool_shapes: tuple[tuple[int, int], ...] = SHAPES

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        self.pools = [random.bytes(layers * NUM_PAGES * PAGE * slot) for layers, slot in SHAPES]
        self.arrays = [
            np.frombuffer(bytearray(pool), np.uint8).reshape(layers, NUM_PAGES * PAGE, slot)
            for pool, (layers, slot) in zip(self.pools, SHAPES, strict=True)
        ]
        self.fails = self.is_slow = False
        self.launched: Future[None] = Future()
        self.undone: list[Future[None]] = []
        self.has_written = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def page(self, number: int) -> list[bytes]:
        slots = slice(number * PAGE, number * PAGE + PAGE)
        return [array[:, slots].tobytes() for array in self.arrays]

    def barrier(self) -> Future[None]:
        self.launched = Future()
        self._loop.call_later(0.01, self.launched.set_result, None)
        return self.launched

    def read(self, pages: tuple[bytes, ...], first: int, stop: int) -> Future[HostKv]:
        done: Future[HostKv] = Future()
        if self.fails:
            done.set_exception(RuntimeError("no memory"))
            return done
        parts = [
            array[:, _slots(each, first, stop)].tobytes()
            for array, each in zip(self.arrays, pages, strict=True)
        ]
        done.set_result(lambda: memoryview(b"".join(parts)))
        return done

    def write(
        self, pages: tuple[bytes, ...], first: int, token_ids: bytes, values: memoryview
    ) -> Future[None]:
        assert self.launched.done(), "a step may still write these pages"
        done: Future[None] = Future()
        if self.fails:
            done.set_exception(RuntimeError("the device is gone"))
            return done
        num_tokens, start = len(token_ids) // 4, 0
        for array, each in zip(self.arrays, pages, strict=True):
            size = len(array) * num_tokens * array.shape[2]
            part = np.frombuffer(values[start : start + size], np.uint8)
            start += size
            slots = _slots(each, first, first + num_tokens)
            array[:, slots] = part.reshape(len(array), num_tokens, -1)
        if self.is_slow:
            self.undone.append(done)
            self._loop.call_soon_threadsafe(self.has_written.set)
        else:
            done.set_result(None)
        return done


def _slots(pages: bytes, first: int, stop: int) -> list[int]:
    numbers = array_i32(pages)
    return [int(numbers[at // PAGE]) * PAGE + at % PAGE for at in range(first, stop)]


class Rig:
    def __init__(self, max_pages: int, folder: Folder | None = None) -> None:
        self.access = ToyAccess()
        self.inbox: asyncio.Queue[SchedulerEvent] = asyncio.Queue()
        self.reports: list[TierUsed] = []
        layout = PageLayout(SHAPES, page_size=PAGE)
        self.host = HostPages(max_pages, page_bytes=layout.page_bytes)
        files = None if folder is None else PageFiles(folder, page_bytes=layout.page_bytes)
        self.tiers = KvTiers(
            self.access, layout, self.host, events=self, report=self.reports.append, files=files
        )

    def send(self, message: SchedulerEvent) -> None:
        self.inbox.put_nowait(message)

    async def next(self) -> SchedulerEvent:
        async with asyncio.timeout(10):
            return await self.inbox.get()

    def save(self, *numbers: int) -> None:
        """Pages are handed down from the last one to the first, under keys of their numbers."""
        pages = pack_i32(list(reversed(numbers)))
        self.tiers.send(SaveKv(keys(*reversed(numbers)), (pages, pages)))

    def load(self, *numbers: int, into: list[int], first: int = 0) -> None:
        pages, ids = pack_i32(into), pack_i32(list(range(len(into) * PAGE)))
        self.tiers.send(LoadKv("r", 0, first, keys(*numbers), ids, (pages, pages)))


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in numbers)


@contextlib.asynccontextmanager
async def rig(max_pages: int = 8, folder: Folder | None = None) -> AsyncIterator[Rig]:
    def on_death(name: str, error: BaseException) -> None:
        raise AssertionError(f"{name} died") from error

    running = Rig(max_pages, folder)
    running.tiers.start(on_death)
    yield running
    await running.tiers.stop()


async def test_pages_come_up_as_they_went_down_into_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aserve.tiers.actor.PART_BYTES", 2 * 22)  # two pages
    async with rig() as one:
        before = [one.access.page(number) for number in (1, 2, 3)]
        one.save(1, 2, 3)
        added = [await one.next(), await one.next()]
        assert added == [TiersChanged(added=keys(1, 2)), TiersChanged(added=keys(3))]
        one.load(1, 2, 3, into=[6, 4, 7], first=5)
        assert await one.next() == KvLoaded("r", 0, 8)
        assert [one.access.page(number) for number in (6, 4, 7)] == before
        assert [(each.direction, each.num_bytes) for each in one.reports] == [
            *(("down", 44), ("down", 22), ("up", 66))
        ]
        assert one.reports[-1].held_bytes == 66
        one.load(2, into=[5])
        await one.next()
        assert one.access.page(5) == before[1]


async def test_the_least_recently_used_page_gives_way_and_the_scheduler_hears_of_it() -> None:
    async with rig(max_pages=3) as one:
        one.save(1, 2, 3)
        await one.next()
        one.load(3, into=[5])
        await one.next()
        one.save(4)
        assert await one.next() == TiersChanged(removed=keys(2))
        assert await one.next() == TiersChanged(added=keys(4))
        one.load(1, 2, 3, into=[5, 6, 7])
        assert await one.next() == TiersChanged(removed=keys(2))
        assert await one.next() == KvLoaded("r", 0, 1)


async def test_a_page_that_is_being_loaded_stays() -> None:
    async with rig(max_pages=1) as one:
        one.save(1)
        await one.next()
        one.access.is_slow = True
        one.load(1, into=[5])
        one.save(2)
        assert await one.next() == TiersChanged(removed=keys(2))
        async with asyncio.timeout(10):
            await one.access.has_written.wait()
        one.access.undone.pop().set_result(None)
        assert await one.next() == KvLoaded("r", 0, 1)
        one.save(2)
        assert await one.next() == TiersChanged(removed=keys(1))
        assert await one.next() == TiersChanged(added=keys(2))


async def test_what_the_device_fails_to_copy_is_nowhere() -> None:
    async with rig(max_pages=2) as one:
        one.save(1)
        await one.next()
        one.access.fails = True
        one.save(2)
        assert await one.next() == TiersChanged(removed=keys(2))
        one.load(1, into=[5], first=3)
        assert await one.next() == KvLoaded("r", 0, 3)
        one.access.fails = False
        one.save(2)  # its place came back
        assert await one.next() == TiersChanged(added=keys(2))
        assert len(one.host) == 2


async def test_pages_beyond_the_bound_of_copies_under_way_are_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aserve.tiers.actor.PART_BYTES", 22)
    monkeypatch.setattr("aserve.tiers.actor.MAX_SAVING_BYTES", 44)
    async with rig() as one:
        one.save(1, 2, 3)
        assert await one.next() == TiersChanged(removed=keys(3))
        assert [await one.next() for _ in range(2)] == [
            TiersChanged(added=keys(number)) for number in (1, 2)
        ]
        one.save(3)
        assert await one.next() == TiersChanged(added=keys(3))
