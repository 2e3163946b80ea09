"""Resumable streams: whatever is cut, a client that comes back gets the same bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aserve.http.streams.resumable import STREAMS, Streams
from aserve.parsers.registry import ParserNames
from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import Answer, ask, bearer
from tests.http.unread_client import UnreadClient

CALL = '<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|>'
TEXT = "<|think|>so<|/think|>Wait." + CALL
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
MESSAGES = [{"role": "user", "content": TEXT}]
STREAM = {"stream": True, "resumable": True}
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "tools": [TOOL]},
    "/v1/completions": {"prompt": "a b c d e f", "n": 2, "max_tokens": 9},
    "/v1/responses": {"input": TEXT, "tools": [TOOL | TOOL["function"]]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9},
}
ENGINE: dict[str, Any] = {
    "tokenizer": load_tokenizer(MODEL_DIR),
    "template": "{{ messages[-1].content }}",
    "parsers": ParserNames("aserve_tiny", "aserve_tiny"),
}


@pytest.fixture
async def echo() -> AsyncIterator[EchoEngine]:
    async with EchoEngine(**ENGINE) as engine:
        yield engine


def streams_of(echo: EchoEngine) -> Streams:
    return echo.server._app[STREAMS]


def ids_of(text: str) -> list[str]:
    return re.findall(r"^id: (.*)$", text, re.MULTILINE)


async def resumed(echo: EchoEngine, last_id: str, **options: Any) -> Answer:
    headers = {"Last-Event-ID": last_id}
    return await ask(echo, f"/v1/streams/{last_id.rpartition(':')[0]}", headers=headers, **options)


async def first_part(echo: EchoEngine, path: str, num_events: int) -> str:
    """The first events of a stream whose client then disconnects. The engine does only as many
    steps as they need.
    """
    echo.scheduler.is_paused = True
    text = ""

    async def read() -> None:
        nonlocal text
        async with echo.web.post(path, json=ANSWERS[path] | STREAM) as answer:
            while text.count("\n\n") < num_events:
                text += (await answer.content.readany()).decode()

    reading = asyncio.create_task(read())
    while not reading.done():
        echo.scheduler.step()
        await asyncio.sleep(0.002)
    await reading
    return "\n\n".join(text.split("\n\n")[:num_events]) + "\n\n"


@pytest.mark.parametrize("path", ANSWERS)
async def test_a_stream_resumed_after_any_event_is_byte_equal_to_a_whole_one(
    echo: EchoEngine, path: str
) -> None:
    whole = await ask(echo, path, ANSWERS[path] | STREAM)
    ids = ids_of(whole.text)
    assert len(ids) == len(whole.events) > 4
    stream_id = ids[0].removesuffix(":0")
    assert (await ask(echo, f"/v1/streams/{stream_id}")).text == whole.text
    for number, last_id in enumerate(ids[:-1]):
        after = "".join(event + "\n\n" for event in whole.events[number + 1 :])
        assert (await resumed(echo, last_id)).text == after
        by_query = f"/v1/streams/{stream_id}?starting_after={number}"
        assert (await ask(echo, by_query)).text == after
    repeated = ANSWERS[path] | STREAM
    again = await ask(echo, path, repeated, headers={"Last-Event-ID": ids[1]})
    assert again.text == "".join(event + "\n\n" for event in whole.events[2:])
    assert (await resumed(echo, ids[-1])).status == 204
    assert len(echo.scheduler.admitted) == 1


@pytest.mark.parametrize("path", ANSWERS)
@pytest.mark.parametrize("num_events", [1, 2, 4])
async def test_a_client_that_disconnects_gets_the_rest_while_it_is_generated(
    echo: EchoEngine, path: str, num_events: int
) -> None:
    begun = await first_part(echo, path, num_events)
    rest = asyncio.create_task(resumed(echo, ids_of(begun)[-1]))
    stream_id = ids_of(begun)[0].removesuffix(":0")
    second = asyncio.create_task(ask(echo, f"/v1/streams/{stream_id}"))
    await asyncio.sleep(0.01)
    assert echo.scheduler.live
    assert not rest.done()
    echo.scheduler.is_paused = False
    echo.scheduler.resume()
    assert begun + (await rest).text == (await second).text
    assert (await ask(echo, f"/v1/streams/{stream_id}")).text == (await second).text


async def test_nobody_comes_back_and_nothing_is_left() -> None:
    async with EchoEngine(**ENGINE, resume_ttl=0.05) as echo:
        await first_part(echo, "/v1/completions", 2)
        assert echo.scheduler.live
        await echo.until(lambda: not echo.scheduler.live)
        assert echo.gateway.num_open == 0
        echo.scheduler.is_paused = False
        whole = await ask(echo, "/v1/completions", ANSWERS["/v1/completions"] | STREAM)
        last_id = ids_of(whole.text)[-1]
        assert (await resumed(echo, last_id)).status == 204
        await asyncio.sleep(0.1)
        assert (await resumed(echo, last_id)).error["code"] == "stream_not_found"
        assert (len(streams_of(echo)), streams_of(echo).size_bytes) == (0, 0)


async def test_without_resumable_a_disconnect_cancels_and_events_have_no_ids(
    echo: EchoEngine,
) -> None:
    body = ANSWERS["/v1/completions"] | {"stream": True}
    assert not ids_of((await ask(echo, "/v1/completions", body)).text)
    echo.scheduler.is_paused = True
    asked = asyncio.create_task(ask(echo, "/v1/completions", body))
    await echo.until(lambda: bool(echo.scheduler.live))
    asked.cancel()
    await echo.until(lambda: not echo.scheduler.live)
    assert not len(streams_of(echo))


async def test_a_listener_that_does_not_read_holds_nobody(echo: EchoEngine) -> None:
    body = {"prompt": "a" * 200, "n": 8, "logprobs": 20, "max_tokens": 200} | STREAM
    async with UnreadClient(echo.url) as slow:
        await slow.post("/v1/completions", body, close=True)
        await echo.until(lambda: bool(echo.scheduler.admitted))
        stream_id = f"cmpl-{echo.scheduler.admitted[0].request_id.removesuffix('-0')}"
        other = await ask(echo, f"/v1/streams/{stream_id}")
        assert other.events[-1].endswith("[DONE]")
        assert other.text.encode() in dechunked(await slow.read_all())


def dechunked(answer: bytes) -> bytes:
    """The body of an answer in chunks."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


async def test_a_stream_belongs_to_its_key() -> None:
    async with EchoEngine(**ENGINE, api_key="a,b") as echo:
        path = "/v1/completions"
        whole = await ask(echo, path, ANSWERS[path] | STREAM, headers=bearer("a"))
        url = f"/v1/streams/{ids_of(whole.text)[0].removesuffix(':0')}"
        assert (await ask(echo, url, headers=bearer("a"))).text == whole.text
        assert (await ask(echo, url, headers=bearer("b"))).status == 404
        assert (await ask(echo, url)).status == 401


@pytest.mark.parametrize(
    ("options", "body", "headers", "param"),
    [
        ({}, {"stream": False}, {}, "resumable"),
        ({"resume_ttl": 0.0}, {}, {}, "resumable"),
        ({}, {}, {"Last-Event-ID": "cmpl-1:x"}, "Last-Event-ID"),
        ({}, {"temperature": 9}, {}, "temperature"),
        ({}, {"prompt": "a b " * 999}, {}, "prompt"),
    ],
)
async def test_what_cannot_be_resumed_is_refused_with_its_status(
    options: dict[str, Any], body: Any, headers: dict[str, str], param: str
) -> None:
    async with EchoEngine(**ENGINE, **options) as echo:
        given = ANSWERS["/v1/completions"] | STREAM | body
        answer = await ask(echo, "/v1/completions", given, headers=headers)
        assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_bug_ends_the_stream_with_an_error_for_each_reader(
    echo: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(9))

    def fail(*_: object) -> None:
        if next(calls) == 2:
            raise RuntimeError("secret")

    monkeypatch.setattr("aserve.http.openai.respond.Tally.add", fail)
    body = {"prompt": "abc", "max_tokens": 3} | STREAM
    whole = await ask(echo, "/v1/completions", body)
    assert "internal error" in whole.events[-2]
    assert "secret" not in whole.text
    assert (await resumed(echo, ids_of(whole.text)[0])).events == whole.events[1:]


async def test_event_logs_are_bounded_and_forget_the_oldest_first() -> None:
    async with EchoEngine(**ENGINE, max_resume_bytes=1 << 16) as echo:
        path, body = "/v1/completions", {"prompt": "a" * 99, "logprobs": 2, "max_tokens": 99}
        answers = [await ask(echo, path, body | STREAM | {"n": n}) for n in (1, 1, 1, 4)]
        assert all(answer.events[-1].endswith("[DONE]") for answer in answers)
        assert streams_of(echo).size_bytes <= 1 << 16
        first, *_, last = [ids_of(answer.text)[0] for answer in answers]
        assert (await resumed(echo, first)).status == 404
        gone = await resumed(echo, last)
        assert (gone.status, gone.error["code"]) == (410, "events_gone")
        kept = ids_of(answers[-1].text)[-3]
        assert (await resumed(echo, kept)).events == answers[-1].events[-2:]


async def test_a_server_that_stops_ends_its_streams() -> None:
    async with EchoEngine(**ENGINE) as echo:
        await first_part(echo, "/v1/completions", 1)
        streams = streams_of(echo)
    assert (len(streams), streams.size_bytes, echo.gateway.num_open) == (0, 0, 0)
