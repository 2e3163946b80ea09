"""A started server with the echo engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.fakes.echo_engine import EchoEngine


@pytest.fixture(autouse=True)
def _same_log_level() -> Iterator[None]:
    """Settings of a server change the level of this process."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
async def echo() -> AsyncIterator[EchoEngine]:
    async with EchoEngine(enable_priority_scheduling=True) as engine:
        yield engine
