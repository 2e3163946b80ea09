"""Clients that don't read their answers, or go away: what waits is bounded, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp.web import Request

from aserve.http import delivery
from aserve.http.openai import respond
from aserve.http.responses import handlers, websocket
from aserve.messages.output import OutputChunk
from aserve.request_stream import RequestStream
from tests.fakes.echo_engine import EchoEngine
from tests.http.unread_client import UnreadClient

TEXT = "abcdefghijklmnopqrstuvwxyz0123456789" * 6
LARGE = {"prompt": TEXT, "logprobs": 20, "max_tokens": 240, "n": 64}
STREAM = LARGE | {"stream": True}
CREATE = {
    "type": "response.create",
    "input": TEXT,
    "top_logprobs": 20,
    "include": ["message.output_text.logprobs"],
}
BOUND = 1 << 17
NEVER_S = 3600.0
SOON_S = 0.2


@dataclass
class Watch:
    """The recorded sizes of all request streams and connections."""

    most_unread: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    seen = Watch()
    put, closer = RequestStream.put, delivery.closer_of

    def counted(request_stream: RequestStream, chunk: OutputChunk) -> None:
        put(request_stream, chunk)
        seen.most_unread = max(seen.most_unread, request_stream.unread_bytes)

    def noticed(request: Request) -> Callable[[], None]:
        close = closer(request)

        def close_and_tell() -> None:
            close()
            seen.closed.set()

        return close_and_tell

    monkeypatch.setattr(RequestStream, "put", counted)
    for module in (delivery, respond, handlers, websocket):
        monkeypatch.setattr(module, "closer_of", noticed)
    return seen


async def left_alone(echo: EchoEngine, watch: Watch) -> None:
    """Until the connection is closed and the engine is idle again; each request ended once."""
    async with asyncio.timeout(60):
        await watch.closed.wait()
    await echo.until(lambda: not echo.scheduler.live)
    await echo.until(lambda: echo.detokenizer.num_requests == 0)
    assert echo.gateway.num_open == 0
    cancelled = [cancel.request_id for cancel in echo.scheduler.cancels]
    assert len(set(cancelled)) == len(cancelled)


@pytest.mark.parametrize("limits", [(BOUND, NEVER_S), (1 << 40, SOON_S)], ids=["bytes", "deadline"])
async def test_a_stream_that_is_not_read_is_closed(limits: tuple[int, float], watch: Watch) -> None:
    max_unread_bytes, write_timeout = limits
    async with (
        EchoEngine(max_unread_bytes=max_unread_bytes, write_timeout=write_timeout) as echo,
        UnreadClient(echo.url) as client,
    ):
        await client.post("/v1/completions", STREAM)
        await left_alone(echo, watch)
        assert b"[DONE]" not in await client.read_all()
        if max_unread_bytes == BOUND:
            assert watch.most_unread <= BOUND
            assert len(echo.scheduler.cancels) == 1


@pytest.mark.parametrize("limits", [(BOUND, NEVER_S), (1 << 40, SOON_S)], ids=["bytes", "deadline"])
async def test_a_websocket_that_is_not_read_is_closed(
    limits: tuple[int, float], watch: Watch
) -> None:
    max_unread_bytes, write_timeout = limits
    async with (
        EchoEngine(max_unread_bytes=max_unread_bytes, write_timeout=write_timeout) as echo,
        UnreadClient(echo.url) as client,
    ):
        await client.open_websocket("/v1/responses")
        for stream in range(24):
            await client.send_event(CREATE | {"stream_id": str(stream)})
        await left_alone(echo, watch)
        await client.read_all()
        if max_unread_bytes == BOUND:
            assert watch.most_unread <= BOUND


async def test_a_whole_answer_that_is_not_read_is_cut_off(watch: Watch) -> None:
    """The answer has more than the 4 MiB that Linux keeps for a connection."""
    async with EchoEngine(write_timeout=SOON_S) as echo, UnreadClient(echo.url) as client:
        await client.post("/v1/completions", LARGE | {"n": 128})
        await left_alone(echo, watch)
        data = await client.read_all()
    assert b"Transfer-Encoding: chunked" in data.partition(b"\r\n\r\n")[0]
    assert not data.endswith(b"\r\n0\r\n\r\n"), "the chunk that ends a whole answer"


async def test_a_client_that_reads_none_of_its_short_answers_loses_its_connection() -> None:
    """Such connections were held for ever, up to --max-connections."""
    async with (
        asyncio.timeout(60),
        EchoEngine(write_timeout=SOON_S) as echo,
        UnreadClient(echo.url) as client,
    ):
        with pytest.raises(ConnectionError):
            await client.send_for_ever("/livez")


async def test_a_slow_reader_gets_the_whole_answer() -> None:
    async with EchoEngine(write_timeout=60) as echo:
        body = STREAM | {"n": 20, "seed": 1}
        async with echo.web.post("/v1/completions", json=body, read_bufsize=1024) as answer:
            slowly = b""
            while data := await answer.content.read(1 << 16):
                slowly += data
                await asyncio.sleep(0)
        assert slowly.endswith(b"data: [DONE]\n\n")
        assert slowly.count(b'"finish_reason":"') == 20
        assert echo.scheduler.cancels == []


LONG = "abcdefghij" * 20_000  # tokenized in a thread
SCORED = {"prompt": "ab" * 100, "logprobs": 20, "max_tokens": 250, "n": 60}


async def a_turn(delay_s: float = 0) -> None:
    turn = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(delay_s, turn.set_result, None)
    await turn


def nothing_is_left(echo: EchoEngine) -> bool:
    return (
        echo.gateway.num_open == 0
        and not echo.scheduler.live
        and echo.detokenizer.num_requests == 0
        and not echo.tokenizer_actor._preparing
    )


async def all_is_over(echo: EchoEngine) -> None:
    """The server notices by itself that the client has gone."""
    async with asyncio.timeout(60):
        server = echo.server._runner.server
        assert server is not None
        while not nothing_is_left(echo) or server.connections:
            await a_turn(0.01)
    cancels = echo.scheduler.cancels
    assert len({cancel.request_id for cancel in cancels}) == len(cancels), "one cancel each"
    assert {(cancel.child, cancel.reason) for cancel in cancels} <= {(None, "cancelled")}


async def test_a_disconnect_while_the_body_comes_leaves_nothing() -> None:
    async with EchoEngine() as echo:
        async with UnreadClient(echo.url) as client:
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
        await all_is_over(echo)
        assert echo.scheduler.admitted == []


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_disconnect_while_the_prompt_is_tokenized_leaves_nothing(
    is_streaming: bool,
) -> None:
    async with EchoEngine() as echo:
        async with UnreadClient(echo.url) as client:
            await client.post("/v1/completions", {"prompt": LONG, "stream": is_streaming})
            async with asyncio.timeout(60):
                while not echo.gateway.num_open:
                    await a_turn()
        await all_is_over(echo)


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_disconnect_while_the_request_waits_or_runs_leaves_nothing(
    path: str, is_streaming: bool, num_steps: int
) -> None:
    body = {"input": "hello"} if path == "/v1/responses" else SCORED
    async with EchoEngine() as echo:
        echo.scheduler.is_paused = True
        async with UnreadClient(echo.url) as client:
            await client.post(path, body | {"stream": is_streaming})
            await echo.until(lambda: bool(echo.scheduler.live))
            for _ in range(num_steps):
                echo.scheduler.step()
        await all_is_over(echo)
        assert len(echo.scheduler.cancels) == 1


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "streamed"])
async def test_a_disconnect_while_the_answer_is_written_leaves_nothing(
    more: dict[str, Any],
) -> None:
    async with EchoEngine() as echo:
        async with UnreadClient(echo.url) as client:
            await client.post("/v1/completions", SCORED | more)
            await echo.until(lambda: bool(echo.scheduler.admitted))
            await echo.until(lambda: not echo.scheduler.live)
        await all_is_over(echo)
