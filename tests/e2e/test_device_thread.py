"""A server in this process around the bundled model, whose executor thread is slow, or dies."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession

from aserve.frontend import Frontend
from aserve.http.server import HttpServer
from aserve.http.state import HttpContext
from aserve.messages.step import ScheduleBatch
from tests.fakes.packed_channel import PackedFrontend
from tests.parity.real_model import Disturbed, options

pytestmark = pytest.mark.slow

BODY = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}


class Dying:
    """The executor's thread ends in its 20th step, as if the device had gone."""

    def __call__(self, batch: ScheduleBatch) -> None:
        if batch.iteration == 20:
            raise SystemExit("the device is gone")


class Stuck:
    """The 20th step takes as long as the test likes."""

    def __init__(self) -> None:
        self.is_in_step = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, batch: ScheduleBatch) -> None:
        if batch.iteration == 20:
            self.is_in_step.set()
            self.may_go_on.wait(60)


@contextlib.asynccontextmanager
async def served(loader: Disturbed) -> AsyncIterator[tuple[Frontend, ClientSession]]:
    """A frontend behind HTTP without a Server, which would end the process with the engine."""
    resolved = options(port=0, served_model_name="m")
    frontend = PackedFrontend(resolved)
    server = HttpServer(
        HttpContext(
            gateway=frontend.gateway,
            state=frontend.state,
            options=resolved.server,
            model_names=("m",),
            created=0,
            registry=frontend.metrics.registry,
            tokenize_service=frontend.tokenize_service,
        )
    )
    address = await server.start()
    try:
        await frontend.start(await asyncio.to_thread(loader, resolved))
        async with ClientSession(address) as client:
            yield frontend, client
    finally:
        await server.stop()
        await frontend.close()


async def test_a_step_that_takes_long_is_no_death() -> None:
    """Trap 12: /health and new requests are as ever while the device is busy."""
    stuck = Stuck()
    async with served(Disturbed(before=stuck)) as (frontend, client):
        stream = asyncio.ensure_future(read(client))
        await asyncio.to_thread(stuck.is_in_step.wait)
        for _ in range(3):
            assert await health(client) == (200, "ready")
        other = asyncio.ensure_future(read(client))
        assert not stream.done()
        stuck.may_go_on.set()
        assert b'"finish_reason":"length"' in await stream
        assert b'"finish_reason":"length"' in await other
        assert frontend.failure is None


async def test_a_dead_executor_thread_is_seen_at_once() -> None:
    """Trap 12: nobody waits for tokens that can never come, and /health says what happened."""
    async with served(Disturbed(before=Dying())) as (frontend, client):
        answers = await asyncio.gather(*(read(client) for _ in range(5)))
        for answer in answers:
            assert b'"code":"engine_dead"' in answer
            assert answer.endswith(b"data: [DONE]\n\n")
        assert await health(client) == (503, "dead")
        async with client.post("/v1/completions", json=BODY) as refused:
            assert refused.status == 503
        assert frontend.gateway.num_open == 0
        assert "the device is gone" in str(frontend.failure)


async def health(client: ClientSession) -> tuple[int, str]:
    async with client.get("/health") as answer:
        return answer.status, (await answer.json())["status"]


async def read(client: ClientSession) -> bytes:
    async with client.post("/v1/completions", json=BODY) as answer:
        return await answer.read()
