"""A started server with the echo engine, the official client, and a plain HTTP client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

from tests.fakes.echo_engine import EchoEngine


@pytest.fixture
async def echo() -> AsyncIterator[EchoEngine]:
    async with EchoEngine(enable_priority_scheduling=True) as engine:
        yield engine


@pytest.fixture
async def client(echo: EchoEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{echo.url}/v1", api_key="any", max_retries=0, timeout=10
    ) as opened:
        yield opened


@pytest.fixture
async def web(echo: EchoEngine) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(echo.url, timeout=timeout) as session:
        yield session
