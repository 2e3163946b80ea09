"""Blocks that NIXL reads from the memory of another process. The package is optional."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from aserve.disagg.arena import Arena
from aserve.disagg.nixl_agent import NixlAgent
from aserve.disagg.transports import BlockReaders, BlockSenders
from aserve.disagg.wire import NixlPlace, Offers, TransferError
from aserve.errors import ConfigError

has_nixl = importlib.util.find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not has_nixl, reason="pip install 'aserve[nixl]'")

OWNER = """
import sys
from msgspec import json
from aserve.disagg.transports import BlockSenders
block_senders = BlockSenders("nixl")
offset = block_senders.arena.take()
block_senders.arena.memory[offset : offset + 5_000_000 // 2] = bytes(range(250)) * 10_000
print(json.encode((block_senders.offers.nixl, offset)).decode(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[bytes], NixlPlace, int]]:
    """Another process with a block in the memory that it offers."""
    command = (sys.executable, "-c", OWNER)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        place, offset = msgspec.json.decode(line, type=tuple[NixlPlace, int])
        yield process, place, offset
        process.kill()


@needs_nixl
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_block_is_read_from_another_process_until_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aserve.disagg.nixl_agent.IDLE_S", 5.0)
    block_readers = BlockReaders("nixl")
    assert block_readers.agent is not None
    values = memoryview(bytearray(2_500_000))
    for _ in range(2):  # the second process is another peer
        with owner() as (process, place, offset):
            block_reader = block_readers.choose(Offers(is_inline=False, nixl=place))
            assert block_reader.transport == "nixl"
            block_reader.fill(offset, values)
            assert values == bytes(range(250)) * 10_000
            values[:] = bytes(len(values))
            with pytest.raises(TransferError, match="the shared memory has"):
                block_reader.fill(place.num_bytes - 10, values)
            process.kill()
            process.wait()
            with pytest.raises((OSError, TransferError)):
                block_reader.fill(offset, values)
            block_reader.forget()
    assert block_readers.agent.num_peers == 0


class FakeAgent:
    """An agent of NIXL whose READs do nothing. A call of `broken` raises, and a READ ends in
    `state`.
    """

    broken: ClassVar[str] = ""
    state: ClassVar[str] = "DONE"

    def __init__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: object) -> object:
            if name == self.broken:
                raise RuntimeError("NIXL_ERR_INVALID_PARAM")
            return {"add_remote_agent": "peer", "get_agent_metadata": b"here"}.get(name, 1)

        return call

    def transfer(self, _: object) -> str:
        return self.state


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> NixlAgent:
    """An agent with 2 slots."""
    api: Any = ModuleType("nixl._api")
    api.nixl_agent, api.nixl_agent_config = FakeAgent, dict
    api.nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1)
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setattr("aserve.disagg.nixl_agent.IDLE_S", 0.0)
    return NixlAgent(Arena(slot_bytes=4096, num_slots=2))


@pytest.mark.parametrize("call", ["add_remote_agent", "get_xfer_descs", "initialize_xfer"])
def test_a_read_that_cannot_begin_costs_no_slot(
    call: str, agent: NixlAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, values = NixlPlace("other", b"there", 0, 4096), memoryview(bytearray(16))
    with monkeypatch.context() as patched:
        patched.setattr(FakeAgent, "broken", call)
        for _ in range(3):
            with pytest.raises(OSError, match="NIXL_ERR_INVALID_PARAM"):
                agent.read(place, 0, values)
    agent.read(place, 0, values)


def test_the_slot_of_a_read_that_failed_is_not_used_again(
    agent: NixlAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, values = NixlPlace("other", b"there", 0, 4096), memoryview(bytearray(16))
    with monkeypatch.context() as patched:
        patched.setattr(FakeAgent, "state", "ERR")
        for _ in range(2):
            with pytest.raises(TransferError, match="could not read a block: ERR"):
                agent.read(place, 0, values)
    with pytest.raises(TransferError, match="no slot for a READ"):
        agent.read(place, 0, values)


@needs_nixl
def test_only_nixl_is_offered_where_it_is_wanted() -> None:
    offers = BlockSenders("nixl").offers
    assert [offers.has(transport) for transport in ("tcp", "shm", "nixl")] == [False, False, True]


def test_nixl_that_is_not_installed_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    for side in (BlockReaders, BlockSenders):
        with pytest.raises(ConfigError, match=r"backend nixl: .* pip install 'aserve\[nixl\]'"):
            side("nixl")
