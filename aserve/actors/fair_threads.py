"""The threads of the tokenizer actor, which clients get in turn."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from aserve.fair_queue import FairQueue

A = TypeVar("A")
T = TypeVar("T")


class FairThreads(Generic[T]):
    """Threads that clients get in turn, and each client's work in order of arrival. Its state is
    written on the loop's thread.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._num_free = num_threads
        self._waiting: FairQueue[tuple[asyncio.Future[T], Callable[[], T]]] = FairQueue()

    def run(self, client: str, work: Callable[[A], T], given: A) -> asyncio.Future[T]:
        """Returns a future of the result. If it is cancelled first, the work never begins."""
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._waiting.push(client, (future, functools.partial(work, given)))
        self._start_next()
        return future

    def close(self) -> None:
        """Work that has not begun never does."""
        self._waiting = FairQueue()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        while self._num_free and (waiting := self._waiting.pop()) is not None:
            future, work = waiting
            if future.done():
                continue
            self._num_free -= 1
            running = asyncio.get_running_loop().run_in_executor(self._pool, work)
            running.add_done_callback(functools.partial(self._ended, future))

    def _ended(self, future: asyncio.Future[T], running: asyncio.Future[T]) -> None:
        self._num_free += 1
        self._start_next()
        error = None if running.cancelled() else running.exception()
        if future.done():
            return  # nobody waits for it any more
        if running.cancelled():
            future.cancel()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(running.result())


def _retrieve(work: asyncio.Future[T]) -> None:
    """Retrieves the exception, because asyncio logs one that nobody has retrieved."""
    if not work.cancelled():
        work.exception()
