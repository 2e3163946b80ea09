"""kill -9 of the prefill server and of the decode side's engine at random moments under 32 streams:
each goes on with the very same answer, and afterwards all pages of both sides are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.e2e.server_process import ServerProcess
from tests.e2e.test_disaggregation import KEY, free_port
from tests.e2e.test_engine_restarts import IS_LARGE, Crowd

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_STREAMS = 32
NUM_KILLS = int(os.environ.get("ASERVE_TEST_KILLS", "100" if IS_LARGE else "2"))
OPTIONS = ("--dtype", "float64", "--grammar-workers", "1", "--page-size", "4", *KEY)
LONG = "Once upon a time there was a little robot who lived in a garden. " * 8
PROMPTS = ("One day", "Lily saw a cat", "Tom and Ann", "The end")
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.9, "n": 2},
    {"logprobs": 2},
    {"structured_outputs": {"regex": "[a-z ]{30,40}"}},
)


class LongPrompts(Crowd):
    """Streams with prompts that no cache has: `round` is a part of their namespace."""

    def __init__(self, client: aiohttp.ClientSession, number: int) -> None:
        super().__init__(client)
        self._round = number

    def call(self, number: int) -> tuple[str, dict[str, Any]]:
        prompt = f"{number} {LONG}{PROMPTS[number // 4 % len(PROMPTS)]}"
        body = KINDS[number % len(KINDS)] | {"prompt": prompt, "cache_salt": f"{self._round}"}
        return "/v1/completions", body


class Pair:
    """A prefill server, which is started again when it is killed, and a decode server."""

    def __init__(self) -> None:
        self._port = free_port()
        self._started = contextlib.ExitStack()

    @contextlib.contextmanager
    def run(self) -> Iterator[Pair]:
        address = ("--disaggregation-prefill", f"127.0.0.1:{self._port}")
        engine = ("--processes", "2", "--max-engine-restarts", "1000")
        with self._started:
            self.start_prefill()
            options = (*OPTIONS, *engine, *address, "--disaggregation-mode", "decode")
            self.decode = self._started.enter_context(ServerProcess(*options))
            assert self.decode.address, self.decode.text
            yield self

    def start_prefill(self) -> None:
        port = ("--disaggregation-bootstrap-port", str(self._port))
        options = (*OPTIONS, *port, "--disaggregation-mode", "prefill")
        self.prefill = self._started.enter_context(ServerProcess(*options))
        assert self.prefill.address, self.prefill.text

    def kill(self, side: str) -> None:
        if side == "decode":
            os.kill(self.decode.engine_pid, signal.SIGKILL)
        else:
            self.prefill.process.kill()
            self.prefill.process.wait()


async def test_kills_on_both_sides_change_nothing_of_32_streams() -> None:
    rng = random.Random(int(os.environ.get("ASERVE_TEST_SEED", "0")))
    took_s: dict[str, list[float]] = {"prefill": [], "decode": []}
    with Pair().run() as pair:
        async with aiohttp.ClientSession(pair.decode.address) as client:
            crowd = LongPrompts(client, 0)
            whole = await asyncio.gather(*map(crowd.ask, range(NUM_STREAMS)))
            half = crowd.num_events // 2
            for number in range(NUM_KILLS):
                crowd = LongPrompts(client, 1 + number)
                answers = asyncio.gather(*map(crowd.ask, range(NUM_STREAMS)))
                await asyncio.sleep(rng.random() * 0.3)  # some prompts are on their way
                await crowd.until_events(rng.choice([0, rng.randrange(half)]))
                side = ("prefill", "decode")[number % 2]
                took_s[side].append(await killed(pair, side, crowd))
                assert await answers == whole, f"kill {number} of the {side} side, seed {rng}"
            crowd = LongPrompts(client, -1)
            assert await asyncio.gather(*map(crowd.ask, range(NUM_STREAMS))) == whole
        check(pair, num_restarts=len(took_s["decode"]))
    for side, times in took_s.items():
        times.sort()
        middle, last = times[len(times) // 2], times[-1]
        logger.info("%s: recovery: median %.2f s, longest %.2f s", side, middle, last)


async def killed(pair: Pair, side: str, crowd: Crowd) -> float:
    """Returns after how many seconds the next event came, if a stream was left to go on."""
    began_s, engine = time.monotonic(), pair.decode.engine_pid
    pair.kill(side)
    if side == "decode":  # the old engine's last events are read before there is a new one
        await asyncio.to_thread(until_other, pair.decode, engine)
    num_events = crowd.num_events
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            await crowd.until_events(num_events + 1)
    took_s = time.monotonic() - began_s
    if side == "prefill":
        await asyncio.to_thread(pair.start_prefill)
    return took_s


def check(pair: Pair, *, num_restarts: int) -> None:
    """Everything has come to its end, and each page of both sides is free."""
    decode, prefill = pair.decode, pair.prefill
    assert decode.metric("aserve_engine_restarts_total") == num_restarts
    received = decode.metric("aserve_requests_received_total")
    assert received == decode.metric("aserve_requests_ended_total")
    assert decode.metric('aserve_kv_transfer_seconds_count{direction="received",outcome="ok"}') > 0
    assert prefill.metric('aserve_kv_transfer_seconds_count{direction="sent",outcome="ok"}') > 0
    for server in (decode, prefill):
        until_free(server)
        code, _ = server.end()
        assert code == 0, server.text
        assert "Traceback" not in server.text, server.text


def until_other(server: ServerProcess, engine: int) -> None:
    ends_s = time.monotonic() + 60
    while server.engine_pid in (engine, server.process.pid):
        assert time.monotonic() < ends_s, server.text
        time.sleep(0.02)


def until_free(server: ServerProcess) -> None:
    """A server reports its pages when it has ticked."""
    ends_s = time.monotonic() + 10
    while (used := server.metric("aserve_kv_pages_used")) and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert used == 0
    assert server.metric("aserve_requests_in_flight") == 0
    assert server.metric("aserve_kv_pages") > 0
