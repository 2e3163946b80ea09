"""kill -9 of the engine in the middle of 64 streams: each goes on with the very same answer."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.slow

IS_LARGE = os.environ.get("ASERVE_TEST_PROFILE") == "large"
NUM_STREAMS = 64
NUM_KILLS = 12 if IS_LARGE else 2  # tests/processes kills a hundred engines, which start faster
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 32}

# Path and body; each is asked with many seeds.
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}),
    ("/v1/completions", {"prompt": "One day", "temperature": 0.9, "n": 2}),
    ("/v1/completions", {"prompt": "Lily saw a cat", "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": "Tom and Ann", "stop": [" the", "."], "min_tokens": 9}),
    ("/v1/completions", {"prompt": "Numbers:", "structured_outputs": {"regex": "[a-z ]{30,40}"}}),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
        },
    ),
    (
        "/v1/chat/completions",
        CHAT | {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    ),
)


class Crowd:
    """64 streams at once; `num_events` counts what all of them have read."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client
        self.num_events = 0
        self.has_read = asyncio.Event()

    def call(self, number: int) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        return KINDS[number % len(KINDS)]

    async def ask(self, number: int) -> dict[str, Any]:
        path, body = self.call(number)
        more = {"model": "aserve-tiny", "seed": number, "stream": True}
        more |= {"stream_options": {"include_usage": True}}
        async with self._client.post(path, json={"max_tokens": 32} | body | more) as answer:
            assert answer.status == 200, await answer.text()
            events = [event async for line in answer.content if (event := self._event(line))]
        return joined(events)

    async def until_events(self, count: int) -> None:
        """NOTE: a busy machine joins events, so a stream may have fewer than the last time."""
        async with asyncio.timeout(60):
            while self.num_events < count:
                self.has_read.clear()
                await self.has_read.wait()

    def _event(self, line: bytes) -> dict[str, Any] | None:
        data = line.removeprefix(b"data: ").strip()
        if not data.startswith(b"{"):  # the end, or a comment that keeps the connection
            return None
        self.num_events += 1
        self.has_read.set()
        event: dict[str, Any] = json.loads(data)
        assert "error" not in event, event
        return event


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """All that the choices of a stream were sent: texts of each field, in order, and the rest."""
    said: dict[str, Any] = {"tokens": events[-1]["usage"]["completion_tokens"]}
    for event in events:
        for choice in event["choices"]:
            for name, value in leaves(choice | choice.pop("delta", {})):
                key = f"{choice['index']}.{name}"
                if isinstance(value, str) and not name.endswith("id"):
                    said[key] = said.get(key, "") + value
                elif not name.endswith("id"):
                    said.setdefault(key, []).append(value)
    return said


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Lists are joined over events, so their places do not count."""
    if isinstance(value, dict):
        for key in value.keys() - {"index", "role", "text_offset"}:
            yield from leaves(value[key], f"{name}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, name)
    elif value is not None:
        yield name, value


@pytest.mark.timeout(1200)
async def test_killed_engines_change_nothing_of_64_streams() -> None:
    rng = random.Random(int(os.environ.get("ASERVE_TEST_SEED", "0")))
    options = ("--dtype", "float64", "--processes", "2", "--max-engine-restarts", "1000")
    # One worker: every engine that is started has workers of its own, and their imports take long.
    with ServerProcess(*options, "--grammar-workers", "1") as server:
        async with aiohttp.ClientSession(server.address) as client:
            crowd = Crowd(client)
            whole = await asyncio.gather(*map(crowd.ask, range(NUM_STREAMS)))
            num_events = crowd.num_events
            for _ in range(NUM_KILLS // 2):
                crowd = Crowd(client)
                answers = asyncio.gather(*map(crowd.ask, range(NUM_STREAMS)))
                for part in (0, 1):
                    await crowd.until_events(
                        rng.randrange(num_events // 4) + part * num_events // 4
                    )
                    os.kill(server.engine_pid, signal.SIGKILL)
                assert await answers == whole
        assert server.metric("aserve_engine_restarts_total") == NUM_KILLS // 2 * 2
        received = server.metric("aserve_requests_received_total")
        assert received == server.metric("aserve_requests_ended_total")
        assert server.metric("aserve_requests_in_flight") == 0
        code, _ = server.end()
    assert code == 0, server.text
    assert "Traceback" not in server.text
