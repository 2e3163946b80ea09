"""A server whose prefix cache is too small for its prompts: they come back from host memory."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# 24 pages of 16 tokens: one of the stories, and not another one beside it.
OPTIONS = ("--dtype", "float64", "--debug-checks", "--num-pages", "24", "--grammar-workers", "1")
STORIES = [f"Once upon a time {name} lived in a garden. " * 16 for name in ("a cat", "Tom", "Sue")]


async def ask(
    session: aiohttp.ClientSession, server: ServerProcess, prompt: str, **fields: str
) -> Any:
    sampling = {"max_tokens": 8, "seed": 5, "temperature": 0.9, "ignore_eos": True}
    body = {"prompt": prompt, **sampling, **fields}
    async with session.post(f"{server.address}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def cached_tokens(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def metric(session: aiohttp.ClientSession, server: ServerProcess, line: str) -> float:
    async with session.get(f"{server.address}/metrics") as response:
        found = re.search(rf"^{line} (\S+)$", await response.text(), re.MULTILINE)
    return float(found[1]) if found else 0.0


async def test_prompts_that_were_evicted_come_back_from_host_memory() -> None:
    tier = ("--hicache-size", "0.1", "--hicache-write-policy", "write_back", "--processes", "2")
    with ServerProcess(*OPTIONS, *tier) as server:
        assert server.address, server.text
        async with aiohttp.ClientSession() as session:
            first = [await ask(session, server, story) for story in STORIES]
            again = [await ask(session, server, story) for story in STORIES]
            for before, after in zip(first, again, strict=True):
                assert after["choices"][0]["text"] == before["choices"][0]["text"]
                usage = after["usage"]
                assert cached_tokens(before) < 64
                assert usage["prompt_tokens"] - cached_tokens(after) <= 16
            for direction in ("down", "up"):
                labels = f'{{direction="{direction}",tier="host"}}'
                assert await metric(session, server, f"aserve_kv_tier_bytes_total{labels}") > 0
            assert await metric(session, server, 'aserve_kv_tier_held_bytes{tier="host"}') > 0
        code, _ = server.end()
    assert code == 0, server.text
    assert "Traceback" not in server.text


async def test_a_server_finds_what_another_one_left_in_a_folder(tmp_path: Path) -> None:
    tier = ("--hicache-size", "0.1", "--hicache-storage", str(tmp_path))
    answers = []
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            with ServerProcess(*OPTIONS, *tier) as server:
                assert server.address, server.text
                answers.append(await ask(session, server, STORIES[0]))
                salted = await ask(session, server, STORIES[0], cache_salt=server.address)
                assert cached_tokens(salted) == 0
                await until_written(session, server)
                code, _ = server.end()
            assert code == 0, server.text
            assert "Traceback" not in server.text
    first, second = answers
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert cached_tokens(first) == 0
    assert second["usage"]["prompt_tokens"] - cached_tokens(second) <= 16


async def until_written(session: aiohttp.ClientSession, server: ServerProcess) -> None:
    """Every page in host memory that was not read from a file has one."""
    labels = 'aserve_kv_tier_bytes_total{{direction="{}",tier="{}"}}'
    async with asyncio.timeout(20):
        while True:
            went_down = [
                await metric(session, server, labels.format("down", tier))
                for tier in ("host", "file")
            ]
            if went_down[0] and went_down[0] == went_down[1]:
                return
            await asyncio.sleep(0.05)
