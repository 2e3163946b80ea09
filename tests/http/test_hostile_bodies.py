"""The bodies of `aserve bench hostile` are refused as it expects, before objects are made."""

from __future__ import annotations

import time

import aiohttp
import pytest

from aserve.bench.hostile_bodies import BODIES, HostileBody
from aserve.http.intake import INTAKE
from tests.fakes.echo_engine import EchoEngine

SIZE = 4 << 20
# Of one turn of the loop; ten times what it takes on a slow machine.
MAX_TURN_CPU_S = 0.5


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.name.replace(" ", "-"))
async def test_each_is_refused_with_its_code_and_takes_the_loop_little_time(
    echo: EchoEngine, web: aiohttp.ClientSession, body: HostileBody
) -> None:
    data = body.data(SIZE)
    start_s = time.thread_time()
    async with web.post(body.path, data=data, headers=body.headers) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (body.status, body.code), error
    assert len(error["message"]) < 300
    assert time.thread_time() - start_s < MAX_TURN_CPU_S
    assert not echo.scheduler.admitted
    assert echo.server._app[INTAKE].held_bytes == 0
