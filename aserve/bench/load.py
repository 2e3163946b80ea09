"""Draws the arrival times of a load, and runs the load."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from aserve.bench.streamed import Answer


def arrival_times(count: int, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Returns the arrival times in seconds, ascending. The gaps have a gamma distribution with mean
    1 / rate and shape `burstiness`: 1 is a Poisson process, less is bursty, more is even.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), size=count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


Send = Callable[[], Awaitable[Answer]]


async def run_load(
    sends: Sequence[Send],
    arrivals_s: Sequence[float],
    *,
    max_concurrency: int,
    done: Callable[[], None],
) -> tuple[list[Answer], float]:
    """Returns the answers in the order of `sends`, and the total seconds. Raises the first error.

    NOTE: latencies do not include the time that a request waits here for `max_concurrency`.
    """
    gate = asyncio.Semaphore(max_concurrency)
    start_s = time.perf_counter()

    async def one(send: Send, arrival_s: float) -> Answer:
        wait_s = start_s + arrival_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        async with gate:
            answer = await send()
        done()
        return answer

    pairs = zip(sends, arrivals_s, strict=True)
    answers = await asyncio.gather(*(one(send, arrival_s) for send, arrival_s in pairs))
    return answers, time.perf_counter() - start_s
