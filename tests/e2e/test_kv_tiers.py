"""A server whose prefix cache is too small for its prompts: they come back from host memory."""

from __future__ import annotations

import re
from typing import Any

import aiohttp
import pytest

from tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# 24 pages of 16 tokens: one of the stories, and not another one beside it.
OPTIONS = ("--dtype", "float64", "--debug-checks", "--num-pages", "24", "--grammar-workers", "1")
STORIES = [f"Once upon a time {name} lived in a garden. " * 16 for name in ("a cat", "Tom", "Sue")]


async def ask(session: aiohttp.ClientSession, server: ServerProcess, prompt: str) -> Any:
    body = {"prompt": prompt, "max_tokens": 8, "seed": 5, "temperature": 0.9, "ignore_eos": True}
    async with session.post(f"{server.address}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def metric(session: aiohttp.ClientSession, server: ServerProcess, line: str) -> float:
    async with session.get(f"{server.address}/metrics") as response:
        found = re.search(rf"^{line} (\S+)$", await response.text(), re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(("policy", "processes"), [("write_through", "1"), ("write_back", "2")])
async def test_prompts_that_were_evicted_come_back_from_host_memory(
    policy: str, processes: str
) -> None:
    tier = ("--hicache-size", "0.1", "--hicache-write-policy", policy, "--processes", processes)
    with ServerProcess(*OPTIONS, *tier) as server:
        assert server.address, server.text
        async with aiohttp.ClientSession() as session:
            first = [await ask(session, server, story) for story in STORIES]
            again = [await ask(session, server, story) for story in STORIES]
            for before, after in zip(first, again, strict=True):
                assert after["choices"][0]["text"] == before["choices"][0]["text"]
                usage = after["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert before["usage"]["prompt_tokens_details"]["cached_tokens"] < 64
                assert usage["prompt_tokens"] - cached <= 16
            for direction in ("down", "up"):
                labels = f'{{direction="{direction}",tier="host"}}'
                assert await metric(session, server, f"aserve_kv_tier_bytes_total{labels}") > 0
            assert await metric(session, server, 'aserve_kv_tier_held_bytes{tier="host"}') > 0
        code, _ = server.end()
    assert code == 0, server.text
    assert "Traceback" not in server.text
