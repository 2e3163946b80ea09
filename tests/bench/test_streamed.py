"""One streamed request against servers that answer in their own ways."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from aserve.bench.streamed import Answer, send_request

TEXT = '{"choices":[{"text":"a","finish_reason":null}]}'
SILENT = '{"choices":[{"text":"","finish_reason":null}]}'
END = '{"choices":[{"text":"","finish_reason":"length"}]}'
USAGE = (
    '{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":9,'
    '"prompt_tokens_details":{"cached_tokens":4}}}'
)
DELTA = '{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}'
FAILURE = '{"error":{"message":"the engine died"}}'


@asynccontextmanager
async def asked(answer_with: Callable[[], web.Response]) -> AsyncIterator[Answer]:
    async def handle(_: web.Request) -> web.Response:
        return answer_with()

    app = web.Application()
    app.router.add_post("/", handle)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield await send_request(session, str(server.make_url("/")), {})


def events(*data: str) -> Callable[[], web.Response]:
    text = "".join(f"data: {item}\n\n" for item in (*data, "[DONE]"))
    return lambda: web.Response(text=text, content_type="text/event-stream")


async def test_usage_counts_the_tokens_and_chunks_have_times() -> None:
    async with asked(events(TEXT, SILENT, TEXT, END, USAGE)) as answer:
        assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (5, 9, 4)
        assert len(answer.itls_s) == 2  # a token without text counts, the end doesn't
        assert answer.ttft_s is not None
        assert 0 < answer.ttft_s <= answer.e2el_s
        assert not answer.error


async def test_without_usage_the_chunks_are_counted() -> None:
    async with asked(events(DELTA, DELTA, DELTA)) as answer:
        assert answer.completion_tokens == 3


async def test_an_error_in_the_stream_is_the_answers_error() -> None:
    async with asked(events(TEXT, FAILURE)) as answer:
        assert "the engine died" in answer.error


async def test_a_refusal_and_an_empty_stream_are_errors() -> None:
    async with asked(lambda: web.Response(status=429, text="queue full")) as answer:
        assert answer.error == "429: queue full"
    async with asked(events()) as answer:
        assert answer.error == "the answer has no token"


async def test_a_broken_connection_is_the_error_of_its_answer() -> None:
    async with aiohttp.ClientSession() as session:
        answer = await send_request(session, "http://127.0.0.1:1/", {})
    assert "ClientConnectorError" in answer.error
