"""Typed channels between actors: inboxes that are read in batches, in order of arrival.

A channel never blocks its writers. Admission bounds the number of messages, and a reader that is
overloaded refuses requests (429).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
In = TypeVar("In", contravariant=True)


class ChannelClosed(Exception):
    """A message was sent to a channel whose reader has ended."""


class Sink(Protocol[In]):
    """The sending side of a channel."""

    def send(self, message: In) -> None: ...


async def yield_to_loop(num_turns: int = 1) -> None:
    """Returns in a later iteration of the loop, so that long work can be done in pieces. Each turn
    is two iterations.

    NOTE: it must not be used to wait for something.
    """
    loop = asyncio.get_running_loop()
    for _ in range(num_turns):
        resumed: asyncio.Future[None] = loop.create_future()
        handle = loop.call_soon(resumed.set_result, None)
        try:
            await resumed
        finally:
            handle.cancel()


class Channel(Generic[T]):
    """A queue with many writers on the loop's thread and one reader."""

    __slots__ = ("_is_closed", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._items)

    def send(self, message: T) -> None:
        if self._is_closed:
            raise ChannelClosed(f"{type(message).__name__} was sent to a closed channel")
        self._items.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Lets the reader take the messages that are there, and then end."""
        self._is_closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[T]:
        """Removes and returns all messages."""
        items, self._items = self._items, []
        return items

    async def batches(self) -> AsyncIterator[list[T]]:
        """Yields all messages that have arrived since the last batch, at least one."""
        while True:
            if not self._items:
                if self._is_closed:
                    return
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
                continue
            yield self.take()
