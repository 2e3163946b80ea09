"""The server's life without a model: what /health says, how it drains, what it exits with."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from aserve.config import Facts, Raw, Resolved, resolve
from aserve.errors import ConfigError, EngineDead
from aserve.load import Loaded
from aserve.progress import OnStage
from aserve.server import Server
from aserve.startup import InThisProcess
from aserve.text.load import TextSide
from tests.fakes.executor import FakeExecutor
from tests.text.vocabularies import byte_level_tokenizer

# With this seed the first token has text of its own: no half of a character.
# With this seed, the first token of the fake model is a text.
BODY = {"model": "m", "prompt": "hello", "max_tokens": 40, "seed": 4, "ignore_eos": True}
BODY |= {"stream": True}


class Life:
    """A server in this loop, whose model loads when the test lets it."""

    def __init__(self, parent: socket.socket | None = None, **options: object) -> None:
        given = {"port": 0, "served_model_name": "m", "drain_timeout": 0.2, "grammar_workers": 0}
        resolved = resolve(Raw(command_line=given | options), Facts(default_model="none"))
        self.executor = FakeExecutor()
        self.may_load = threading.Event()
        self.is_loading = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.serving = Server(resolved, InThisProcess(self._load), parent=parent)
        self.exit_code = asyncio.ensure_future(self.serving.run())

    async def until_ready(self) -> None:
        await self.is_loading.wait()
        self.may_load.set()
        await self.executor.is_warm.wait()
        await asyncio.sleep(0)

    async def stuck_stream(self, client: aiohttp.ClientSession) -> aiohttp.ClientResponse:
        """A stream that got its first token, and whose further steps never come back."""
        self.executor.is_manual = True
        asked = asyncio.ensure_future(client.post("/v1/completions", json=BODY))
        await self.executor.until_given(1)
        self.executor.run_next()
        answer = await asked
        assert b'"text"' in await answer.content.readuntil(b"\n\n")
        return answer

    def _load(self, resolved: Resolved, on_stage: OnStage) -> Loaded:
        on_stage("weights", 10, 40)
        self._loop.call_soon_threadsafe(self.is_loading.set)
        self.may_load.wait()
        return Loaded(self.executor, TextSide(byte_level_tokenizer()))


@contextlib.asynccontextmanager
async def living(
    parent: socket.socket | None = None, **options: object
) -> AsyncIterator[tuple[Life, aiohttp.ClientSession]]:
    life = Life(parent, **options)
    try:
        await life.is_loading.wait()
        async with aiohttp.ClientSession(life.serving.address) as client:
            yield life, client
    finally:
        life.may_load.set()
        life.exit_code.cancel()
        await asyncio.gather(life.exit_code, return_exceptions=True)


async def health(client: aiohttp.ClientSession) -> tuple[int, dict[str, Any]]:
    async with client.get("/health") as answer:
        return answer.status, await answer.json()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_the_port_is_open_while_the_model_loads_and_says_so() -> None:
    async with living() as (life, client):
        status, body = await health(client)
        assert (status, body["status"]) == (503, "starting")
        async with client.get("/startupz") as answer:
            body = await answer.json()
            assert (answer.status, body["stage"], body["percent"]) == (503, "weights", 25)
        async with client.post("/v1/completions", json=BODY) as answer:
            assert answer.status == 503
        await life.until_ready()
        assert await health(client) == (200, {"status": "ready"})


async def test_a_signal_ends_a_server_that_is_still_loading_with_0() -> None:
    async with living() as (life, _):
        interrupt()
        assert await asyncio.wait_for(asyncio.shield(life.exit_code), 30) == 0


async def test_a_step_that_is_lost_makes_the_server_stuck_until_it_comes_back() -> None:
    async with living(watchdog_timeout=0.3) as (life, client):
        await life.until_ready()
        async with await life.stuck_stream(client):
            assert (await health(client))[0] == 200
            while (await health(client))[0] == 200:
                pass  # each look is a request of its own
            assert (await health(client))[1]["status"] == "stuck"
            life.executor.is_manual = False
            while (await health(client))[0] != 200:
                life.executor.run_next()
                await asyncio.sleep(0)


async def test_a_stream_that_outlives_the_grace_ends_with_an_error_event_and_exit_code_0() -> None:
    async with living() as (life, client):
        await life.until_ready()
        async with await life.stuck_stream(client) as answer:
            interrupt()
            rest = await answer.content.read()
        assert b'"code":"server_draining"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(asyncio.shield(life.exit_code), 30) == 0


async def test_a_replica_drains_at_its_routers_byte_and_ends_at_the_end_of_the_socket() -> None:
    router, parent = socket.socketpair()
    with router, parent:
        async with living(parent, drain_timeout=60) as (life, client):
            await life.until_ready()
            async with await life.stuck_stream(client) as answer:
                router.send(b"\1")
                while (await health(client))[1]["status"] != "draining":
                    pass  # each look is a request of its own
                assert not answer.content.is_eof()
                router.shutdown(socket.SHUT_WR)
                rest = await answer.content.read()
            assert b"the server was stopped" in rest
            assert await asyncio.wait_for(asyncio.shield(life.exit_code), 30) == 0


async def test_while_it_drains_new_requests_are_refused_and_a_second_signal_ends_it() -> None:
    async with living(drain_timeout=60) as (life, client):
        await life.until_ready()
        life.executor.is_manual = True
        stuck = asyncio.ensure_future(client.post("/v1/completions", json=BODY))
        await life.executor.until_given(1)
        interrupt()
        await asyncio.sleep(0)
        while (await health(client))[1]["status"] != "draining":
            pass
        async with client.post("/v1/completions", json=BODY) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) > 0
            assert (await answer.json())["error"]["code"] == "server_draining"
        interrupt()
        assert await asyncio.wait_for(asyncio.shield(life.exit_code), 30) == 0
        async with await stuck as answer:
            assert answer.status == 503


async def test_a_dead_executor_ends_streams_with_an_error_and_the_exit_code_is_1() -> None:
    async with living() as (life, client):
        await life.until_ready()
        async with await life.stuck_stream(client) as answer:
            life.executor.die(RuntimeError("the device is gone"))
            rest = await answer.content.read()
        assert b'"code":"engine_dead"' in rest
        assert await life.exit_code == 1


async def test_an_executor_that_dies_in_its_first_step_ends_the_server_with_an_error() -> None:
    class Stillborn(FakeExecutor):
        async def warm_up(self) -> None:
            self.die(RuntimeError("no such device"))
            await asyncio.Event().wait()

    resolved = resolve(
        Raw(command_line={"port": 0, "grammar_workers": 0}), Facts(default_model="none")
    )
    executor = Stillborn()
    loaded = Loaded(executor, TextSide(byte_level_tokenizer()))
    async with asyncio.timeout(60):
        with pytest.raises(EngineDead, match="no such device"):
            await Server(resolved, InThisProcess(lambda *_: loaded)).run()
    assert executor.is_closed


async def test_a_model_that_cannot_be_loaded_closes_the_port_and_raises() -> None:
    def broken(*_: object) -> Loaded:
        raise ConfigError("no such model")

    resolved = resolve(
        Raw(command_line={"port": 0, "grammar_workers": 0}), Facts(default_model="none")
    )
    serving = Server(resolved, InThisProcess(broken))
    with pytest.raises(ConfigError, match="no such model"):
        await serving.run()
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(serving.address)
