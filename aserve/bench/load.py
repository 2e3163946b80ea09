"""A load: requests that begin at given times, at most so many of them open at once.

It does not know who answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from aserve.bench.streamed import Answer

Ask = Callable[[], Awaitable[Answer]]


async def run_load(
    asks: Sequence[Ask],
    begins_s: Sequence[float],
    *,
    max_concurrency: int,
    done: Callable[[], None],
) -> tuple[list[Answer], float]:
    """The answers in the order of the requests, and the seconds that all of them took. The first
    error that is no answer is raised.

    NOTE: a request's clock starts when it is asked, not while it waits here for its turn.
    """
    gate = asyncio.Semaphore(max_concurrency)
    start_s = time.perf_counter()

    async def one(ask: Ask, begin_s: float) -> Answer:
        wait_s = start_s + begin_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        async with gate:
            answer = await ask()
        done()
        return answer

    pairs = zip(asks, begins_s, strict=True)
    answers = await asyncio.gather(*(one(ask, begin_s) for ask, begin_s in pairs))
    return answers, time.perf_counter() - start_s
