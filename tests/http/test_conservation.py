"""Random load through HTTP: each request is counted in one place, at any time, and its pages are
free again afterwards.
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from tests.fakes.executor import SPEC, FakeExecutor
from tests.faults import Faults
from tests.http.whole_server import WholeServer, whole_server

OUTCOMES = ("finished", "cancelled", "failed", "refused")
NUM_REQUESTS = 60
NUM_SEEDS = 30 if os.environ.get("ASERVE_TEST_PROFILE") == "large" else 2


def check(server: WholeServer) -> None:
    ended = sum(server.metric("aserve_requests_ended_total", outcome=each) for each in OUTCOMES)
    assert ended == server.metric("aserve_requests_ended_total")
    in_flight = server.metric("aserve_requests_in_flight")
    assert server.metric("aserve_requests_received_total") == ended + in_flight
    assert server.metric("aserve_request_seconds_count") == ended


async def send(server: WholeServer, chance: random.Random) -> int:
    """Sends one request of a random kind, and returns for how many prompts."""
    prompts = ["ab" * chance.randint(1, 12) for _ in range(chance.randint(1, 3))]
    body = {"prompt": prompts, "max_tokens": chance.randint(1, 30), "ignore_eos": True}
    body |= {"seed": chance.randint(0, 99), "n": chance.choice([1, 1, 2]), "stream": True}
    kind = chance.choice(["whole", "read", "leave", "long", "wrong", "late"])
    if kind == "whole":
        body["stream"] = False
    elif kind == "long":
        body["prompt"] = "a" * (SPEC.max_model_len + 1)
    elif kind == "wrong":
        body["n"] = 0
    elif kind == "late":
        body["timeout"] = 0.001
    await asyncio.sleep(chance.random() * 0.05)
    async with server.client.post("/v1/completions", json=body) as answer:
        assert (answer.status == 400) is (kind in ("long", "wrong"))
        if kind == "leave" and answer.status == 200:
            await answer.content.readany()
            answer.close()
        else:
            await answer.read()
    return {"wrong": 0, "long": 1}.get(kind, len(prompts))


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
async def test_received_is_finished_cancelled_failed_refused_and_in_flight(seed: int) -> None:
    chance = random.Random(seed)
    faults = Faults(SPEC, chaos=random.Random(seed), rate=0.1)
    executor = FakeExecutor(device=faults.device)
    async with whole_server(executor, debug_checks=True) as server:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(send(server, random.Random(chance.random())))
                for _ in range(NUM_REQUESTS)
            ]
            while not all(task.done() for task in tasks):
                check(server)
                await asyncio.sleep(0.002)
        await server.until_idle()
        check(server)
        assert server.metric("aserve_requests_received_total") == sum(t.result() for t in tasks)
        for outcome in OUTCOMES:
            assert server.metric("aserve_requests_ended_total", outcome=outcome) > 0, outcome
        launched = server.metric("aserve_steps_launched_total")
        returned = server.metric("aserve_steps_finished_total")
        assert launched == returned + server.metric("aserve_steps_failed_total")
