"""One server with the bundled model for all tests that only use it, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.e2e.server_process import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    # float64: an answer may not depend on who else is in the batch, and rounding would.
    with ServerProcess("--debug-checks", "--dtype", "float64") as process:
        assert process.address, process.text
        yield process


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    """Of the module's server, or of the one for all."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.address}/v1", api_key="any", max_retries=0, timeout=60
    ) as opened:
        yield opened
