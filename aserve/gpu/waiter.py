"""The thread that waits for the device: it synchronises events, reads finished results out of their
host slots, and completes tickets on the loop, in launch order.

It launches nothing and decides nothing. A slot that it gave back is never read again.
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
    """Something of a step that is on its way to the host.

    `read` runs after `event`, on the waiter's thread where the device runs behind: it copies out of
    slots, gives them back, and returns what is to be called on the loop, if anything.
    """

    event: Event
    read: Callable[[], Callable[[], None] | None]


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
        """Called by the executor thread, in launch order."""
        self._inbox.put(landing)

    def finish(self, landing: Landing) -> None:
        """On the calling thread; nothing else may be on its way."""
        landing.event.synchronize()
        complete = landing.read()
        if complete is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody awaits any more
            self._loop.call_soon_threadsafe(complete)

    def close(self) -> None:
        """After the executor thread has ended: what it launched still lands."""
        self._inbox.put(None)
        self._worker.join()

    def _run(self) -> None:
        while (landing := self._inbox.get()) is not None:
            self.finish(landing)
