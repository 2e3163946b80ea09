"""A started server with the echo engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.echo_engine import EchoEngine


@pytest.fixture
async def echo() -> AsyncIterator[EchoEngine]:
    async with EchoEngine(enable_priority_scheduling=True) as engine:
        yield engine
