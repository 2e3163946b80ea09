"""Blocks that NIXL reads from the memory of another process. The package is optional."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from aserve.disagg.carriers import Inlets, Outlets
from aserve.disagg.wire import NixlPlace, Offers, TransferError
from aserve.errors import ConfigError

has_nixl = importlib.util.find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not has_nixl, reason="pip install 'aserve[nixl]'")

OWNER = """
import sys
from msgspec import json
from aserve.disagg.carriers import Outlets
outlets = Outlets("nixl")
offset = outlets.arena.take()
outlets.arena.memory[offset : offset + 5_000_000 // 2] = bytes(range(250)) * 10_000
print(json.encode((outlets.offers.nixl, offset)).decode(), flush=True)
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
    inlets = Inlets("nixl")
    assert inlets.agent is not None
    values = memoryview(bytearray(2_500_000))
    for _ in range(2):  # the second process is another peer
        with owner() as (process, place, offset):
            inlet = inlets.choose(Offers(is_inline=False, nixl=place))
            assert inlet.carrier == "nixl"
            inlet.fill(offset, values)
            assert values == bytes(range(250)) * 10_000
            values[:] = bytes(len(values))
            with pytest.raises(TransferError, match="the shared memory has"):
                inlet.fill(place.num_bytes - 10, values)
            process.kill()
            process.wait()
            with pytest.raises((OSError, TransferError)):
                inlet.fill(offset, values)
            inlet.forget()
    assert inlets.agent.num_peers == 0


@needs_nixl
def test_only_nixl_is_offered_where_it_is_wanted() -> None:
    offers = Outlets("nixl").offers
    assert [offers.has(carrier) for carrier in ("tcp", "shm", "nixl")] == [False, False, True]


def test_nixl_that_is_not_installed_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    for side in (Inlets, Outlets):
        with pytest.raises(ConfigError, match=r"backend nixl: .* pip install 'aserve\[nixl\]'"):
            side("nixl")
