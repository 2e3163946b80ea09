"""The memory of a server stays what it was, and its counters agree, though clients leave early."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from typing import Any

import aiohttp
import pytest

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.slow

IS_LARGE = os.environ.get("ASERVE_TEST_PROFILE") == "large"
NUM_REQUESTS = 20_000 if IS_LARGE else 300
NUM_FIRST = 1000 if IS_LARGE else 100
NUM_CLIENTS = 32
NUM_PAGES = 600  # all are in use at least once within the first requests, and so have memory
LEFT_EARLY = 0.3
GROWTH = 1.05 if IS_LARGE else 1.3  # in a short run caches of bounded size still fill


async def ask(session: aiohttp.ClientSession, rng: random.Random) -> str:
    body: dict[str, Any] = {
        "prompt": [rng.randrange(300, 2000) for _ in range(rng.randrange(1, 60))],
        "max_tokens": rng.randrange(1, 24),
        "n": rng.choice([1, 1, 1, 2]),
        "seed": rng.randrange(1000),
        "ignore_eos": True,
        "stream": rng.random() < 0.8,
    }
    leaves = rng.random() < LEFT_EARLY
    async with session.post("/v1/completions", json=body) as answer:
        assert answer.status == 200
        if leaves:
            await answer.content.readline()
            answer.close()
            return "left"
        data = await answer.read()
    if body["stream"]:
        assert data.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(data)["usage"]["completion_tokens"] == body["max_tokens"] * body["n"]
    return "read"


async def crowd(server: ServerProcess, num_requests: int, *, seed: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    connector = aiohttp.TCPConnector(limit=NUM_CLIENTS)
    async with aiohttp.ClientSession(server.address, connector=connector) as session:

        async def client(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            for _ in range(num_requests // NUM_CLIENTS):
                outcomes[await ask(session, rng)] += 1

        await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    return outcomes


async def until_idle(server: ServerProcess) -> None:
    names = ("requests_in_flight", "sequences_running", "sequences_waiting", "kv_pages_used")
    async with asyncio.timeout(60):
        while any(server.metric(f"aserve_{name}") for name in names):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_processes", [1, 2] if IS_LARGE else [2])
async def test_memory_is_flat_and_every_request_is_counted_once(num_processes: int) -> None:
    options = ("--processes", str(num_processes), "--num-pages", str(NUM_PAGES))
    with ServerProcess(*options) as server:
        assert server.address, server.text
        outcomes = await crowd(server, NUM_FIRST, seed=0)
        await until_idle(server)
        before = server.memory_bytes()
        outcomes += await crowd(server, NUM_REQUESTS - NUM_FIRST, seed=1)
        await until_idle(server)
        after = server.memory_bytes()
        print(f"{outcomes} {before >> 20} MiB -> {after >> 20} MiB")  # noqa: T201
        ended = server.metric("aserve_requests_ended_total")
        received = server.metric("aserve_requests_received_total")
        assert received == ended == outcomes.total()
        assert outcomes["left"] > 0.2 * received
        assert after <= GROWTH * before, f"{before} bytes became {after}"
