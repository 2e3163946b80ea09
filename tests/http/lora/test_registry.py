"""Names, slots and ids of adapters as they come and go."""

from __future__ import annotations

import asyncio

import pytest

from aserve.config import LoraOptions
from aserve.errors import AserveError, ConfigError, ErrorInfo, InvalidRequest, NotFound
from aserve.http.errors import RequestFailed
from aserve.http.lora.registry import LoraRegistry, modules_of
from aserve.http.openai.limits import Caller
from aserve.messages.changes import EngineJob, LoadLora
from aserve.messages.requests import GenerateRequest, SamplingParams, TextPrompt

REQUEST = GenerateRequest("a", TextPrompt("x"), SamplingParams(seed=0), namespace="mine")


class Device:
    """Notes what it is given. It refuses a path that says so, and waits while it `is_slow`."""

    def __init__(self) -> None:
        self.loads: list[LoadLora] = []
        self.in_use: set[int] = set()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.was_asked = asyncio.Event()

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        assert isinstance(job, LoadLora)
        self.loads.append(job)
        self.was_asked.set()
        await self.may_load.wait()
        return InvalidRequest("broken").info() if job.path == "broken" else None


async def registry(device: Device, *, max_loras: int = 2) -> LoraRegistry:
    options = LoraOptions(enable_lora=True, max_loras=max_loras)
    loras = LoraRegistry(options, slots_in_use=lambda: device.in_use)
    await loras.open(device.run_job)
    return loras


async def test_a_slot_is_free_again_when_its_last_request_has_ended() -> None:
    device = Device()
    loras = await registry(device)
    await loras.load("a", "there/a")
    await loras.load("b", "there/b")
    with pytest.raises(InvalidRequest, match="All 2 adapters"):
        await loras.load("c", "there/c")
    loras.unload("a")
    device.in_use = {0, 1}
    with pytest.raises(InvalidRequest, match="All 2 adapters"):
        await loras.load("c", "there/c")
    device.in_use = {0}
    await loras.load("c", "there/c")
    assert [(load.slot, load.path) for load in device.loads] == [
        (1, "there/a"),
        (2, "there/b"),
        (1, "there/c"),
    ]


async def test_each_load_has_a_cache_namespace_of_its_own_that_no_client_can_name() -> None:
    loras = await registry(Device())
    await loras.load("a", "old")
    (old,) = loras.apply("a", (REQUEST,))
    loras.unload("a")
    await loras.load("a", "new")
    (new,) = loras.apply("a", (REQUEST,))
    assert (old.lora_slot, new.lora_slot) == (1, 1)
    namespaces = {old.namespace, new.namespace, REQUEST.namespace}
    assert len(namespaces) == 3
    for namespace in (old.namespace, new.namespace):
        for caller in (Caller(), Caller(namespace="0" * 24)):
            assert caller.namespace_of(namespace) != namespace
    assert loras.apply("none", (REQUEST,)) == loras.apply(None, (REQUEST,)) == (REQUEST,)


async def test_a_replaced_adapter_keeps_its_slot_for_those_that_run() -> None:
    device = Device()
    loras = await registry(device)
    await loras.load("a", "old")
    with pytest.raises(InvalidRequest, match="already"):
        await loras.load("a", "new")
    device.in_use = {1}
    await loras.load("a", "new", replaces=True)
    assert [(each.slot, each.path) for each in loras.served] == [(2, "new")]


async def test_a_repeated_load_of_an_adapter_changes_nothing_unless_it_replaces_it() -> None:
    """A router's client repeats what one of several replicas has missed."""
    device = Device()
    loras = await registry(device)
    await loras.load("a", "there/a")
    served = loras.served
    await loras.load("a", "there/a")
    assert loras.served == served
    assert len(device.loads) == 1
    await loras.load("a", "there/a", replaces=True)
    assert len(device.loads) == 2


@pytest.mark.parametrize(("name", "path"), [("", "x"), ("n" * 257, "x"), ("a", "broken")])
async def test_an_adapter_that_cannot_be_loaded_is_not_served(name: str, path: str) -> None:
    loras = await registry(Device())
    with pytest.raises((AserveError, RequestFailed)):
        await loras.load(name, path)
    assert loras.names == ()
    with pytest.raises(NotFound):
        loras.unload(name)


async def test_the_slot_of_a_load_whose_client_has_gone_is_used_again() -> None:
    device = Device()
    device.may_load.clear()
    loras = await registry(device)
    first = asyncio.ensure_future(loras.load("a", "there/a"))
    second = asyncio.ensure_future(loras.load("b", "there/b"))
    await device.was_asked.wait()
    assert [load.path for load in device.loads] == ["there/a"]
    first.cancel()
    device.may_load.set()
    await second
    assert [(load.slot, load.path) for load in device.loads] == [(1, "there/a"), (1, "there/b")]
    assert loras.names == ("b",)


async def test_modules_of_the_command_line_are_loaded_or_name_the_option() -> None:
    assert modules_of("a=x/y, x/b,c=d=e") == [("a", "x/y"), ("b", "x/b"), ("c", "d=e")]
    with pytest.raises(ConfigError, match="--lora-modules a="):
        modules_of("a=")
    options = LoraOptions(lora_modules="a=fine,b=broken", max_loras=4)
    loras = LoraRegistry(options)
    with pytest.raises(ConfigError, match="--lora-modules b=broken: broken"):
        await loras.open(Device().run_job)
    assert loras.names == ("a",)
