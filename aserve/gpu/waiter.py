"""`Waiter`: the thread that waits for the device. It synchronises events, reads finished results
from their pinned slots, and completes tickets on the event loop, in launch order.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable
from dataclasses import dataclass

from aserve.gpu.device.base import Event
from aserve.host.threads import Worker


@dataclass(frozen=True, slots=True)
class Landing:
    """A result on its way to the host, and the code that runs when it has arrived."""

    event: Event
    # Runs after the event. It reads pinned slots, gives them back, and returns the callback for the
    # event loop.
    read: Callable[[], Callable[[], None]]


class Waiter:
    __slots__ = ("_inbox", "_loop", "_worker")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._loop = loop
        self._inbox: queue.SimpleQueue[Landing | None] = queue.SimpleQueue()
        self._worker = Worker("aserve-waiter", self._run, on_end=on_end)

    def start(self) -> None:
        self._worker.start()

    def land(self, landing: Landing) -> None:
        """Hands a landing to the waiter thread. Called by the executor thread, in launch order."""
        self._inbox.put(landing)

    def finish(self, landing: Landing) -> None:
        """Waits for a landing on the calling thread. No other landing may be pending."""
        landing.event.synchronize()
        complete = landing.read()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody awaits the ticket
            self._loop.call_soon_threadsafe(complete)

    def close(self) -> None:
        """Processes pending landings, then ends the thread. The executor thread must have ended."""
        self._inbox.put(None)
        self._worker.join()

    def _run(self) -> None:
        while (landing := self._inbox.get()) is not None:
            self.finish(landing)
