"""One server with the bundled model for all tests that only use it, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI

from tests.e2e.server_process import ServerProcess

# float64: an answer may not depend on who else is in the batch, and rounding would.
OPTIONS = ("--dtype", "float64", "--debug-checks", "--processes", "2")
GRAMMARS = ("--grammar-workers", "2", "--grammar-timeout", "3")


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*OPTIONS, *GRAMMARS, "--num-pages", "2000") as process:
        assert process.address, process.text
        yield process


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[AsyncOpenAI]:
    async with server.client() as opened:
        yield opened
