"""The processes of the router's own replicas: exits, restarts, and shares of the machine."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aserve.config import Facts, Raw, Resolved, resolve
from aserve.errors import ConfigError
from aserve.router import fleet
from aserve.router.fleet import Fleet, Registry, options_of, shares_of


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
        await own.close(timeout_s=1)
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
        await own.close(timeout_s=1)
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

    # It is told by the end of the socket, behind the message with its options.
    own = opened("sock.send(b'1')\nwhile sock.recv(1 << 16): pass", note)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(own.run())
        await ready.wait()
        (leaving,) = own.scale(1)
        own.release(leaving)
        while ("left", leaving) not in seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert own.scale(2) == []
        assert len({at for what, at in seen if what == "joined"}) == 3
        await own.close(timeout_s=5)
    assert not own.failed.is_set()
    assert [what for what, _ in seen].count("left") == 3


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
    monkeypatch.setattr(fleet, "num_devices", lambda _: 5)
    cuda = resolved(device="cuda", tensor_parallel_size=2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shares_of(cuda, {})] == ["0,1", "2,3"]
    named = shares_of(cuda, {"CUDA_VISIBLE_DEVICES": "4,7,5,6"})
    assert [each["CUDA_VISIBLE_DEVICES"] for each in named] == ["4,7", "5,6"]
    three = dataclasses.replace(cuda, server=dataclasses.replace(cuda.server, replicas=3))
    with pytest.raises(ConfigError, match="needs 6 GPUs, and there are 5"):
        shares_of(three, {})
