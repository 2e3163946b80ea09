"""An actor by itself, for as long as a test runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aserve.actors.base import Actor


@asynccontextmanager
async def alone(actor: Actor[Any]) -> AsyncIterator[None]:
    """It must not die, nor the test take long."""
    died: list[BaseException] = []
    actor.start(lambda _, error: died.append(error))
    async with asyncio.timeout(10):
        yield
    await actor.stop()
    assert not died
