"""kill -9 of the router at random moments under 32 streams. What clients have read is the beginning
of the right text, the server behind it gives up what nobody reads, and another router on the same
port serves at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time

import aiohttp
import pytest

from tests.e2e.server_process import START_S, ServerProcess, command
from tests.e2e.test_engine_restarts import IS_LARGE
from tests.e2e.test_replicas import ask

logger = logging.getLogger(__name__)

NUM_STREAMS = 32
NUM_KILLS = 100 if IS_LARGE else 2
NUM_EVENTS = 24 * NUM_STREAMS  # of all streams


class Router(ServerProcess):
    def __init__(self, upstream: str, port: str = "0") -> None:
        options = ("--health-interval", "0.1", "--port", port)
        super().__init__(arguments=command("route", upstream, *options))

    def until_healthy(self) -> None:
        if "state=healthy" not in self.text:
            self.read_until("state=healthy")


@pytest.mark.slow
@pytest.mark.timeout(START_S * (NUM_KILLS + 2))
async def test_killed_routers_double_and_change_no_token() -> None:
    rng = random.Random(int(os.environ.get("ASERVE_TEST_SEED", "0")))
    took_s: list[float] = []
    num_cut = 0
    with ServerProcess("--dtype", "float64", "--num-pages", "1000") as server:
        router = Router(server.address)
        with router:
            router.until_healthy()
            expected = await texts(router.address)
            while len(took_s) < NUM_KILLS:
                found, died_s = await texts_until_killed(router, rng.randrange(1, NUM_EVENTS // 2))
                num_cut += sum(found[number] != text for number, text in enumerate(expected))
                assert all(map(str.startswith, expected, found))
                router.__exit__(None, None, None)
                router = Router(server.address, router.address.rpartition(":")[2])
                router.__enter__()
                router.until_healthy()
                assert await texts(router.address) == expected
                took_s.append(time.monotonic() - died_s)
            router.process.kill()
        assert num_cut, "no stream was hit"
        assert server.metric("aserve_requests_in_flight") == 0
        received = server.metric("aserve_requests_received_total")
        assert received == server.metric("aserve_requests_ended_total")
    took_s.sort()
    logger.info("recovery median %.2f s, longest %.2f s", took_s[len(took_s) // 2], took_s[-1])


async def texts(address: str) -> list[str]:
    """Asks all streams, none of which may break."""
    async with aiohttp.ClientSession(address) as session:
        answers = await asyncio.gather(*(ask(session, each) for each in range(NUM_STREAMS)))
    assert {tuple(answer.last) for answer in answers} == {("done",)}
    return ["".join(answer.tokens) for answer in answers]


async def texts_until_killed(router: Router, at_event: int) -> tuple[list[str], float]:
    """Returns what each client has read, and when the router was killed."""
    num_events = 0
    died_s = 0.0
    found = [""] * NUM_STREAMS

    def count() -> None:
        nonlocal num_events, died_s
        num_events += 1
        if num_events == at_event:
            died_s = time.monotonic()
            router.process.kill()

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        try:
            found[number] = "".join((await ask(session, number, count)).tokens)
        except aiohttp.ClientConnectionError:
            assert died_s, "the router lives"

    async with aiohttp.ClientSession(router.address) as session:
        await asyncio.gather(*(one(session, number) for number in range(NUM_STREAMS)))
    return found, died_s
