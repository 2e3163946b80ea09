"""An actor by itself, for as long as a test runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aserve.actors.base import Actor
from aserve.channel import Channel

E = TypeVar("E")


@asynccontextmanager
async def alone(actor: Actor[Any]) -> AsyncIterator[None]:
    """It must not die, nor the test take long."""
    died: list[BaseException] = []
    actor.start(lambda _, error: died.append(error))
    async with asyncio.timeout(60):
        yield
    await actor.stop()
    assert not died


async def received(channel: Channel[E], count: int = 1) -> list[E]:
    """Reads until at least so many messages came."""
    events = await anext(channel.batches())
    while len(events) < count:
        events = [*events, *await anext(channel.batches())]
    return events
