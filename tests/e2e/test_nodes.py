"""A server on two machines, which are processes of this one: the second machine is lost under open
streams, and they go on with the very same answers when it is back."""

from __future__ import annotations

import asyncio
import os
import signal

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
async def test_a_machine_that_is_lost_and_comes_back_changes_nothing_of_open_streams() -> None:
    address = f"{LOOPBACK}:{free_port()}"
    layout = ("-tp", "2", "--nnodes", "2", "--dist-init-addr", address, "--dist-key", KEY)
    more = ("--dtype", "float64", "--admin-api-key", "k")
    with host_process(address) as lost, ServerProcess(*layout, *more) as server:
        assert server.address, server.text
        async with aiohttp.ClientSession(server.address) as client:
            crowd = Crowd(client)
            whole = await asyncio.gather(*map(crowd.ask, PLAIN))
            crowd = Crowd(client)
            answers = asyncio.gather(*map(crowd.ask, PLAIN))
            await crowd.until_events(8)
            for pid in (*children_of(lost.pid, module="aserve.parallel.rank"), lost.pid):
                os.kill(pid, signal.SIGKILL)
            with host_process(address) as host:
                assert await answers == whole
                assert server.metric("aserve_engine_restarts_total") == 1
                async with client.post("/sleep", headers={"Authorization": "Bearer k"}) as answer:
                    assert answer.status == 400, await answer.text()
                code, _ = server.end()
                assert code == 0, server.text
                assert host.wait(30) == 0
    assert "host 1 at 127.0.0.1" in server.text
    assert "Traceback" not in server.text
