"""Daemon threads whose end is always reported, and event loops that run in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

# PERF: torch releases the GIL at every operator. Beside a busy thread, 300 operators of 4 us took
# 500 ms with Python's default interval of 5 ms, and 14 ms with this one. An event loop waits as
# long for the GIL as an operator does.
SWITCH_INTERVAL_S = 20e-6


class Worker:
    """Runs `body` once in a thread, then calls `on_end` on that thread with the exception that
    ended it, or None.
    """

    __slots__ = ("_body", "_on_end", "_thread")

    def __init__(
        self,
        name: str,
        body: Callable[[], None],
        *,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._body = body
        self._on_end = on_end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Waits until the thread has ended; returns at once if it never started."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        with _Ending(self._on_end):
            self._body()


class _Ending:
    """Reports how its block ended.

    WHY: it is no `except` clause, because even a SystemExit must be reported here.
    """

    __slots__ = ("_report",)

    def __init__(self, report: Callable[[BaseException | None], None]) -> None:
        self._report = report

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._report(error)
        return True


def in_thread(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Runs `work` in a daemon thread and returns a future of its result for the running loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    results: list[T] = []

    def settle(error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(results[0])
        else:
            future.set_exception(error)

    def on_end(error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, error)

    Worker(name, lambda: results.append(work()), on_end=on_end).start()
    return future


class LoopThread:
    """An event loop that runs in a thread of its own."""

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name="aserve-loop", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop's thread and waits for it. Ctrl-C in the caller cancels it."""
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


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
