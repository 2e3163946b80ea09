"""Tokens that are sent at once, without waking the handler of their stream: clients get the same
bytes.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from aserve.channel import yield_to_loop
from aserve.http.direct import DirectWriter
from aserve.http.openai.answers import TEXT, EventTemplate
from aserve.http.openai.completions import CompletionAnswer, CompletionChoice
from aserve.http.sse import SseWriter
from tests.fakes.echo_engine import EchoEngine

WORDS = 'stop "sign" \\ 한국어 🚀 <mark>\n\x00'
# The ids and times of an answer.
UNEQUAL = rb'"(id|created|message)":("[^"]*"|\d+)|"(timings|metrics)":{.*?}|\d+\.\d+(e-\d+)?'
TURNS = 20  # of the loop, in which a chunk is written whichever way it takes

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PLAIN: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": WORDS}),
    (COMPLETION, {"prompt": WORDS, "stream_options": {"include_usage": True}}),
    (COMPLETION, {"prompt": WORDS, "stop": "ma"}),
    (COMPLETION, {"prompt": WORDS, "return_token_ids": True}),
    (COMPLETION, {"prompt": WORDS, "stream_options": {"continuous_usage_stats": True}}),
    (CHAT, {"messages": [{"role": "user", "content": WORDS}]}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": WORDS}],
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
]
RENDERED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {"messages": [{"role": "user", "content": WORDS}]}),
    ("/completion", {"prompt": WORDS}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": WORDS, "logprobs": 2}),
    (COMPLETION, {"prompt": [WORDS, "again"]}),
    (COMPLETION, {"prompt": WORDS, "n": 2, "echo": True}),
    (CHAT, {"messages": [{"role": "user", "content": WORDS}], "n": 2}),
]


async def streamed(echo: EchoEngine, path: str, body: dict[str, Any]) -> bytes:
    """The events of an answer whose steps are written one by one, without its id and time."""
    echo.scheduler.is_paused = True
    asked = echo.web.post(path, json={"stream": True, "seed": 1, "max_tokens": 99, **body})
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(read(asked))
        await echo.until(lambda: len(echo.scheduler.live) > 0)
        while echo.scheduler.live:
            echo.scheduler.step()
            for _ in range(TURNS):
                await yield_to_loop()
    return re.sub(UNEQUAL, b"", answer.result())


async def read(asked: Any) -> bytes:
    async with asked as answer:
        assert answer.status == 200, await answer.text()
        body: bytes = await answer.read()
        return body


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was sent at once."""
    sent: list[bytes] = []
    write = DirectWriter.write

    def noted(writer: DirectWriter, data: bytes) -> None:
        sent.append(data)
        write(writer, data)

    monkeypatch.setattr(DirectWriter, "write", noted)
    return sent


@pytest.mark.parametrize(("path", "body"), [*PLAIN, *RENDERED, *OTHERS])
async def test_the_bytes_are_those_that_the_handler_would_write(
    path: str,
    body: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    at_once: list[bytes],
) -> None:
    async with EchoEngine() as echo:
        answer = await streamed(echo, path, body)
        assert (len(at_once) > 5) == ((path, body) not in OTHERS)
        monkeypatch.setattr(DirectWriter, "takes", lambda *_: False)
        assert await streamed(echo, path, body) == answer


async def test_nothing_is_sent_at_once_while_the_connection_is_full(
    monkeypatch: pytest.MonkeyPatch, at_once: list[bytes]
) -> None:
    protocols: list[web.RequestHandler] = []
    start = SseWriter.start

    async def noted(writer: SseWriter, *given: Any) -> None:
        await start(writer, *given)
        protocols.append(writer._request.protocol)

    monkeypatch.setattr(SseWriter, "start", noted)
    async with EchoEngine() as echo, asyncio.TaskGroup() as group:
        echo.scheduler.is_paused = True
        asked = echo.web.post(COMPLETION, json={"prompt": "abcdefgh", "stream": True})
        answer = group.create_task(read(asked))
        await echo.until(lambda: len(echo.scheduler.live) > 0)
        counts: list[int] = []
        for number in range(6):
            if number == 3:
                protocols[0].pause_writing()
            echo.scheduler.step()
            for _ in range(TURNS):
                await yield_to_loop()
            counts.append(len(at_once))
        assert counts == [0, 1, 2, 2, 2, 2]
        protocols[0].resume_writing()
        echo.scheduler.is_paused = False
        echo.scheduler.resume()
    texts = re.findall(rb'"text":"(.*?)"', answer.result())
    assert b"".join(texts) == b"abcdefgh"


async def test_a_client_of_http_1_0_gets_events_without_chunks(at_once: list[bytes]) -> None:
    body = json.dumps({"prompt": "again", "stream": True, "max_tokens": 9}).encode()
    async with EchoEngine() as echo:
        host, port = echo.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {COMPLETION} HTTP/1.0\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        _, _, events = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert at_once
    *parts, done, end = events.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    texts = [json.loads(part.removeprefix(b"data: "))["choices"][0]["text"] for part in parts]
    assert "".join(texts) == "again"


async def test_an_event_that_cannot_be_made_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = EventTemplate.of

    def broken(template: EventTemplate, text: str) -> bytes:
        if text == "x":
            raise RuntimeError("nobody expected this")
        return make(template, text)

    monkeypatch.setattr(EventTemplate, "of", broken)
    async with EchoEngine() as echo:
        good, bad = await asyncio.gather(
            *(
                read(echo.web.post(COMPLETION, json={"prompt": prompt, "stream": True}))
                for prompt in ("abcdefg", "abcdxfg")
            )
        )
        assert good.endswith(b"data: [DONE]\n\n")
        assert b"error" not in good
        assert b'"error":{' in bad
        await echo.until(lambda: not echo.scheduler.live and not echo.detokenizer.num_requests)


@given(st.text())
def test_a_template_makes_the_json_of_the_whole_record(text: str) -> None:
    def event(shown: str) -> bytes:
        choice = CompletionChoice(0, shown)
        answer = CompletionAnswer(
            id=f"cmpl-{TEXT}", created=1, model=f'{TEXT}"{TEXT}', choices=[choice], usage=None
        )
        return msgspec.json.encode(answer)

    assert EventTemplate(event(TEXT)).of(text) == event(text)
