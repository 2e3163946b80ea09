"""A client that goes away, in every stage of its request, leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.echo_engine import EchoEngine
from tests.http.unread_client import UnreadClient

LONG = "abcdefghij" * 20_000  # tokenized in a thread
SCORED = {"prompt": "ab" * 100, "logprobs": 20, "max_tokens": 250, "n": 60}


def nothing_is_left(echo: EchoEngine) -> bool:
    return (
        echo.gateway.num_open == 0
        and not echo.scheduler.live
        and echo.detokenizer.num_requests == 0
        and not echo.tokenizer_actor._preparing
    )


async def all_is_over(echo: EchoEngine) -> None:
    """The server notices by itself that the client has gone."""
    async with asyncio.timeout(20):
        server = echo.server._runner.server
        assert server is not None
        while not nothing_is_left(echo) or server.connections:
            turn = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.01, turn.set_result, None)
            await turn
    cancelled = [cancel.request_id for cancel in echo.scheduler.cancels]
    assert len(set(cancelled)) == len(cancelled), "one cancel each"


async def test_while_its_body_comes() -> None:
    async with EchoEngine() as echo:
        async with UnreadClient(echo.url) as client:
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
        await all_is_over(echo)
        assert echo.scheduler.admitted == []


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_while_its_prompt_is_tokenized(is_streaming: bool) -> None:
    async with EchoEngine() as echo:
        async with UnreadClient(echo.url) as client:
            await client.post("/v1/completions", {"prompt": LONG, "stream": is_streaming})
            async with asyncio.timeout(20):
                while not echo.gateway.num_open:
                    turn = asyncio.get_running_loop().create_future()
                    asyncio.get_running_loop().call_soon(turn.set_result, None)
                    await turn
        await all_is_over(echo)


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("num_steps", [0, 3])
async def test_while_it_waits_or_runs(is_streaming: bool, num_steps: int) -> None:
    async with EchoEngine() as echo:
        echo.scheduler.is_paused = True
        async with UnreadClient(echo.url) as client:
            await client.post("/v1/completions", SCORED | {"stream": is_streaming})
            await echo.until(lambda: bool(echo.scheduler.live))
            for _ in range(num_steps):
                echo.scheduler.step()
        await all_is_over(echo)
        assert len(echo.scheduler.cancels) == 1


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "streamed"])
async def test_while_its_answer_is_written(more: dict[str, Any]) -> None:
    async with EchoEngine() as echo:
        async with UnreadClient(echo.url) as client:
            await client.post("/v1/completions", SCORED | more)
            await echo.until(lambda: bool(echo.scheduler.admitted))
            await echo.until(lambda: not echo.scheduler.live)
        await all_is_over(echo)
