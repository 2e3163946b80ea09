"""An event loop in a thread, for programs without one.

Must not know what runs on it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from aserve.event_loop import new_event_loop

T = TypeVar("T")


class LoopThread:
    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name="aserve-loop", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it there and waits here; Ctrl-C here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
