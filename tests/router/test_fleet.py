"""The processes of the router's own replicas: exits, restarts, and shares of the machine."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from aserve.config import Facts, Raw, Resolved, resolve
from aserve.errors import ConfigError
from aserve.processes import replica
from aserve.processes.link import StartReplica
from aserve.router import fleet
from aserve.router.fleet import Fleet, Registry, options_of, shares_of
from aserve.router.run import RouterServer


def resolved(**options: object) -> Resolved:
    given = {"replicas": 2, "device": "cpu", "max_engine_restarts": 1}
    return resolve(Raw(command_line=given | options), Facts(default_model="none"))


def opened(program: str, note: Callable[[str, str], None]) -> Fleet:
    """A fleet of processes that run `program`, in which `sock` is the socket to the fleet."""
    head = "import socket, sys; sock = socket.socket(fileno=0);"
    registry = Registry(
        **{
            each: lambda at, each=each: note(each, at)
            for each in ("joined", "ready", "died", "left")
        }
    )
    return Fleet(resolved(), registry, command=(sys.executable, "-c", head + program))


async def test_a_replica_that_never_serves_ends_the_fleet_with_its_exit_code() -> None:
    seen: list[str] = []
    own = opened("sys.exit(2)", lambda what, _: seen.append(what))
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(own.run())
        await own.failed.wait()
        await own.close()
    assert own.exit_code == 2
    assert not own.serving.is_set()
    assert set(seen) == {"joined", "died", "left"}
    assert seen.count("joined") == seen.count("left") == 2


async def test_a_dead_replica_is_started_again_on_its_address_until_it_died_too_often() -> None:
    seen: list[tuple[str, str]] = []
    own = opened("sock.send(b'1'); sys.exit(3)", lambda *event: seen.append(event))
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(own.run())
        await own.failed.wait()
        await own.close()
    assert own.serving.is_set()
    assert own.exit_code == 1
    for address in {at for _, at in seen}:
        events = [what for what, at in seen if at == address]
        assert events == ["joined", "ready", "died", "ready", "died", "left"]
        assert not Path(address.removeprefix("unix:")).parent.exists()


async def test_replicas_end_when_they_are_told_to_and_their_places_are_free_again() -> None:
    ready = asyncio.Event()
    seen: list[tuple[str, str]] = []

    def note(what: str, address: str) -> None:
        seen.append((what, address))
        if [each for each, _ in seen].count("ready") >= 2:
            ready.set()

    # It is told by a byte, behind the message with its options.
    own = opened("sock.send(b'1')\nwhile sock.recv(1 << 16)[-1:] != b'\\1': pass", note)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(own.run())
        await ready.wait()
        (leaving,) = own.scale(1)
        own.release(leaving)
        while ("left", leaving) not in seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert own.scale(2) == []
        assert len({at for what, at in seen if what == "joined"}) == 3
        own.leave()
        await own.ended.wait()
    assert not own.failed.is_set()
    assert [what for what, _ in seen].count("left") == 3


async def test_replicas_that_drain_end_at_once_when_their_fleet_is_closed() -> None:
    drains_for_ever = "sock.send(b'1')\nwhile sock.recv(1 << 16): pass"
    own = opened(drains_for_ever, lambda *_: None)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(own.run())
        await own.serving.wait()
        own.leave()
        members = list(own._members.values())
        await own.close()
    assert [each.process.returncode for each in members] == [0, 0], "none was killed"


async def test_replicas_that_still_import_are_not_waited_for() -> None:
    """They read what they are told once they have imported the server, which takes seconds."""
    own = opened("import time; time.sleep(30)", lambda *_: None)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(own.run())
        while not own._members:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        own.leave()
        await own.ended.wait()
    assert not own.failed.is_set()


class Draining:
    """A fleet whose replicas drain until it is closed. `calls` has what it was told, and when."""

    def __init__(self) -> None:
        self.serving, self.failed, self.ended = (asyncio.Event() for _ in range(3))
        self.left = asyncio.Event()
        self.calls: list[tuple[str, float]] = []

    async def run(self) -> None:
        await self.ended.wait()

    def stop_restarting(self) -> None: ...

    def leave(self) -> None:
        self.calls.append(("leave", asyncio.get_running_loop().time()))
        self.left.set()

    async def close(self) -> None:
        self.calls.append(("close", asyncio.get_running_loop().time()))
        self.ended.set()


@pytest.mark.parametrize("has_open_requests", [False, True])
async def test_a_second_signal_ends_the_drain_of_the_replicas(has_open_requests: bool) -> None:
    own = Draining()
    server = RouterServer(resolved(drain_timeout=60), ())
    server.router.admin.fleet = cast(Fleet, own)
    serving = asyncio.create_task(server.serve())
    if has_open_requests:
        server.router.proxy.idle.clear()
    server.end()
    if not has_open_requests:
        await own.left.wait()
    server.end()
    async with asyncio.timeout(5):
        await serving
    assert [what for what, _ in own.calls] == ["leave", "close"]


async def test_router_and_replicas_drain_within_one_timeout() -> None:
    own = Draining()
    server = RouterServer(resolved(drain_timeout=0.2), ())
    server.router.admin.fleet = cast(Fleet, own)
    server.router.proxy.idle.clear()
    server.end()
    start_s = asyncio.get_running_loop().time()
    await server.serve()
    (_, left_s), (_, closed_s) = own.calls
    assert left_s >= start_s + 0.2
    assert closed_s < left_s + 0.2


@pytest.mark.parametrize("was_killed", [False, True])
def test_the_last_replica_of_a_killed_router_removes_the_folder_of_its_socket(
    was_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "aserve-1"
    folder.mkdir()
    pids = [7, 1 if was_killed else 7]
    monkeypatch.setattr("os.getppid", lambda: pids.pop(0))
    monkeypatch.setattr(replica, "start_logging", lambda *_: None)
    monkeypatch.setattr("aserve.server.serve", lambda *_, **__: 0)
    own = options_of(resolved(), 0, str(folder / "0.sock"))
    start = StartReplica(own, str(tmp_path), {}, "token")
    with socket.socket() as router:
        assert replica._serve(start, router) == 0
    assert folder.exists() is not was_killed


def test_each_replica_has_its_own_socket_seed_and_files() -> None:
    given = resolved(seed=7, files_dir="files", record="log", ssl_certfile="cert", port=80)
    own = [options_of(given, place, f"{place}.sock") for place in range(2)]
    assert [each.debug.seed for each in own] == [7, 8]
    assert [each.server.files_dir for each in own] == ["files/replica-0", "files/replica-1"]
    assert [each.debug.record for each in own] == ["log.replica-0", "log.replica-1"]
    assert {(each.server.uds, each.server.ssl_certfile) for each in own} == {
        ("0.sock", None),
        ("1.sock", None),
    }


def test_replicas_share_the_gpus_and_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "usable_cpus", lambda: 9)
    assert shares_of(resolved(), {})[:2] == [{"OMP_NUM_THREADS": "4"}] * 2
    assert shares_of(resolved(), {"OMP_NUM_THREADS": "3"})[0] == {"OMP_NUM_THREADS": "3"}
    monkeypatch.setattr(fleet, "num_cuda_devices", lambda: 5)
    cuda = resolved(device="cuda", tensor_parallel_size=2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shares_of(cuda, {})] == ["0,1", "2,3"]
    named = shares_of(cuda, {"CUDA_VISIBLE_DEVICES": "4,7,5,6"})
    assert [each["CUDA_VISIBLE_DEVICES"] for each in named] == ["4,7", "5,6"]
    three = dataclasses.replace(cuda, server=dataclasses.replace(cuda.server, replicas=3))
    with pytest.raises(ConfigError, match="needs 6 GPUs, and there are 5"):
        shares_of(three, {})
