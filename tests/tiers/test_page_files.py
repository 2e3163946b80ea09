"""Files below host memory: what one engine wrote, another one finds; what is spoiled or late is not
loaded, and a request waits no longer than it must.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import uuid
from pathlib import Path

import pytest

from aserve.errors import ConfigError, StepError
from aserve.messages.base import pack_i32
from aserve.messages.executor import SchedulerEvent
from aserve.messages.requests import AdmitRequest, Cancel, FailRequest, SamplingParams
from aserve.messages.transfers import KvLoaded, TiersChanged
from aserve.tiers.connect import Lookups
from aserve.tiers.page_files import LocalFolder, open_folder
from tests.tiers.test_kv_tiers import Rig, keys, rig


def admit(*numbers: int, name: str = "a") -> AdmitRequest:
    sampling = SamplingParams(seed=0, max_tokens=4)
    return AdmitRequest(name, pack_i32([1]), sampling, page_keys=keys(*numbers))


def files_in(folder: Path, name: str) -> list[Path]:
    return list(folder.rglob(name))


async def written(one: Rig, *numbers: int) -> None:
    """Saves pages, and waits for their files."""
    one.save(*numbers)
    events = [await one.next() for _ in range(1 + len(numbers))]
    added = b"".join(event.added for event in events if isinstance(event, TiersChanged))
    assert sorted(added) == sorted(keys(*numbers) * 2)


@pytest.mark.parametrize("is_remote", [False, True])
async def test_pages_that_one_engine_wrote_come_up_in_another(
    is_remote: bool, tmp_path: Path
) -> None:
    place = f"memory://{uuid.uuid4().hex}" if is_remote else str(tmp_path)
    async with rig(folder=open_folder(place, "model")) as one:
        before = [one.access.page(number) for number in (1, 2, 3)]
        await written(one, 1, 2, 3)
    async with rig(folder=open_folder(place, "another model")) as other:
        await other.tiers.look([keys(number) for number in (1, 2, 3)])
        assert other.inbox.empty()
    async with rig(folder=open_folder(place, "model")) as two:
        await two.tiers.look([keys(number) for number in (1, 2, 3, 4)])
        assert await two.next() == TiersChanged(added=keys(1, 2, 3))
        for into in ([6, 4, 7], [5, 3, 2]):  # from files, and then from host memory
            two.load(1, 2, 3, into=into)
            assert await two.next() == KvLoaded("r", 0, 3)
            assert [two.access.page(number) for number in into] == before
        assert [(each.tier, each.num_bytes) for each in two.reports] == [
            *(("file", 66), ("host", 66), ("host", 66))
        ]
    assert not files_in(tmp_path, "*.part")


@pytest.mark.parametrize("spoil", ["flip", "cut", "another", "delete"])
async def test_a_file_that_is_not_sound_is_not_loaded(spoil: str, tmp_path: Path) -> None:
    async with rig(folder=LocalFolder(tmp_path)) as one:
        await written(one, 1, 2)
    [path] = files_in(tmp_path, keys(2).hex())
    data = bytearray(path.read_bytes())
    if spoil == "flip":
        data[-3] ^= 4
    spoiled = {"cut": data[:-1], "another": bytearray(len(data))}
    path.write_bytes(spoiled.get(spoil, data))
    async with rig(folder=LocalFolder(tmp_path)) as two:
        await two.tiers.look([keys(1), keys(2)])
        assert await two.next() == TiersChanged(added=keys(1, 2))
        if spoil == "delete":
            path.unlink()
        two.load(1, 2, into=[5, 6], first=3)
        assert await two.next() == TiersChanged(removed=keys(2))
        assert await two.next() == KvLoaded("r", 0, 4)


async def test_a_page_that_leaves_host_memory_is_still_in_its_file(tmp_path: Path) -> None:
    async with rig(max_pages=1, folder=LocalFolder(tmp_path)) as one:
        before = one.access.page(1)
        await written(one, 1)
        await written(one, 2)
        one.load(1, into=[5])
        assert await one.next() == KvLoaded("r", 0, 1)
        assert one.access.page(5) == before


async def test_pages_are_written_again_after_somebody_deleted_the_folder(tmp_path: Path) -> None:
    """Else each write would fail, and the store be left alone, until the server is restarted."""
    async with rig(folder=LocalFolder(tmp_path / "model")) as one:
        await written(one, 1)
        shutil.rmtree(tmp_path / "model")
        await written(one, 2)
        assert len(files_in(tmp_path, keys(2).hex())) == 1


class Broken(LocalFolder):
    def write(self, name: str, data: bytes) -> None:
        raise OSError("no space left on the device")


async def test_a_store_that_cannot_be_written_is_left_alone_and_host_memory_goes_on(
    tmp_path: Path,
) -> None:
    async with rig(folder=Broken(tmp_path)) as one:
        one.save(1)
        assert await one.next() == TiersChanged(added=keys(1))
        assert one.tiers._files is not None
        async with asyncio.timeout(10):
            while one.tiers._files._may_write:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        one.load(1, into=[5])
        assert await one.next() == KvLoaded("r", 0, 1)


async def test_files_are_still_read_from_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with rig(folder=LocalFolder(tmp_path)) as one:
        await written(one, 1)
    async with rig(folder=Broken(tmp_path)) as other:
        files = other.tiers._files
        assert files is not None
        other.save(2)
        assert await other.next() == TiersChanged(added=keys(2))
        async with asyncio.timeout(10):
            while files._may_write:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        monkeypatch.setattr(os, "utime", full)
        assert await files.look([keys(1)]) == [keys(1)]
        assert len(await files.read([keys(1)])) == 1


class Hanging(LocalFolder):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_go_on = threading.Event()

    def has(self, name: str) -> bool:
        self.may_go_on.wait(10)
        return super().has(name)


class Inbox:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[SchedulerEvent] = asyncio.Queue()

    def send(self, message: SchedulerEvent) -> None:
        self.messages.put_nowait(message)


async def test_a_request_waits_for_the_look_with_what_is_said_of_it_and_others_do_not(
    tmp_path: Path,
) -> None:
    folder, inbox = Hanging(tmp_path), Inbox()
    async with rig(folder=folder) as one:
        lookups = Lookups(one.tiers, inbox)
        other = admit(name="b")
        about: list[SchedulerEvent] = [
            admit(1, 2),
            Cancel("a", None, 0, "cancelled"),
            FailRequest("a", ERROR),
        ]
        for message in (about[0], other, *about[1:]):
            lookups.send(message)
        assert await inbox.messages.get() == other
        assert inbox.messages.empty()
        folder.may_go_on.set()
        async with asyncio.timeout(10):
            assert [await inbox.messages.get() for _ in about] == about


async def test_a_store_that_hangs_delays_one_request_and_then_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aserve.tiers.file_tier.LOOK_S", 0.05)
    folder, inbox = Hanging(tmp_path), Inbox()
    async with rig(folder=folder) as one:
        lookups = Lookups(one.tiers, inbox)
        for name in ("a", "b"):
            lookups.send(admit(1, name=name))
            async with asyncio.timeout(10):
                assert await inbox.messages.get() == admit(1, name=name)
        folder.may_go_on.set()


@pytest.mark.parametrize("place", ["nothing://there", "/proc/none"])
def test_a_place_that_cannot_be_opened_ends_the_start(place: str) -> None:
    with pytest.raises(ConfigError, match="--hicache-storage"):
        open_folder(place, "model")


ERROR = StepError("it ended").info()
