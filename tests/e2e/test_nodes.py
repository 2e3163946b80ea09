"""A server on two machines, which are processes of this one: rank 0 and the second machine are lost
under open streams, and they go on with the very same answers when all ranks are back."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import aiohttp
import pytest

from aserve.gpu.parallel.meeting import LOOPBACK
from tests.e2e.server_process import ServerProcess, children_of
from tests.e2e.test_disaggregation import free_port
from tests.e2e.test_engine_restarts import Crowd
from tests.parallel.test_nodes import KEY, host_process

PLAIN = (0, 1, 8, 9)  # of the kinds of requests, those without a grammar


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_machines_that_are_lost_and_come_back_change_nothing_of_open_streams() -> None:
    address = f"{LOOPBACK}:{free_port()}"
    layout = ("-tp", "2", "--nnodes", "2", "--dist-init-addr", address, "--dist-key", KEY)
    more = ("--dtype", "float64", "--admin-api-key", "k")
    with host_process(address) as lost, ServerProcess(*layout, *more) as server:
        assert server.address, server.text
        async with aiohttp.ClientSession(server.address) as client:
            crowd = Crowd(client)
            whole = await asyncio.gather(*map(crowd.ask, PLAIN))
            await silence_ends_requests_and_is_over(client, lost.pid)
            assert await asyncio.gather(*map(crowd.ask, PLAIN)) == whole
            assert await answers_after_death(client, server.engine_pid) == whole
            [orphan] = children_of(lost.pid, module="aserve.parallel.rank")
            answers = asyncio.ensure_future(answers_after_death(client, lost.pid))
            with host_process(address) as host:
                assert await answers == whole
                assert not is_running(orphan)
                assert server.metric("aserve_engine_restarts_total") == 3
                async with client.post("/sleep", headers={"Authorization": "Bearer k"}) as answer:
                    assert answer.status == 400, await answer.text()
                code, _ = server.end()
                assert code == 0, server.text
                assert host.wait(30) == 0
    assert "was lost" in server.text
    assert "Traceback" not in server.text


async def silence_ends_requests_and_is_over(client: aiohttp.ClientSession, host_pid: int) -> None:
    """The processes of a machine stand still, with all connections open, and then go on. Streams
    end with an error, and new requests with 503, until the machine has joined again."""
    body: dict[str, Any] = {"model": "aserve-tiny", "prompt": "Once", "max_tokens": 900}
    body |= {"ignore_eos": True, "stream": True}
    stopped = [host_pid, *children_of(host_pid, module="aserve.parallel.rank")]
    async with client.post("/v1/completions", json=body) as answer:
        await answer.content.readline()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(10):
            rest = (await answer.text()).splitlines()
    assert any("has said nothing for" in line and "engine_dead" in line for line in rest), rest
    async with asyncio.timeout(10), client.post("/v1/completions", json=body) as refused:
        assert refused.status == 503
        assert "has said nothing for" in await refused.text()
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(90):
        while (await client.post("/v1/completions", json=body | {"max_tokens": 1})).status == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def answers_after_death(client: aiohttp.ClientSession, pid: int) -> list[dict[str, Any]]:
    """The answers of streams in whose middle a process is killed."""
    crowd = Crowd(client)
    answers = asyncio.gather(*map(crowd.ask, PLAIN))
    await crowd.until_events(8)
    os.kill(pid, signal.SIGKILL)
    return await answers
