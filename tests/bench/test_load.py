"""A load: begin times, never more open than may be, every answer at its place."""

from __future__ import annotations

import asyncio
import functools
import math
import statistics

import numpy as np
import pytest

from aserve.bench.load import arrival_times, run_load
from aserve.bench.streamed import Answer


def test_without_a_rate_everything_begins_at_once() -> None:
    assert arrival_times(3, rate=math.inf, burstiness=1.0, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_the_gaps_have_the_mean_of_the_rate_and_the_scatter_of_the_shape(burstiness: float) -> None:
    times = arrival_times(20_000, rate=50.0, burstiness=burstiness, seed=3)
    assert times == arrival_times(20_000, rate=50.0, burstiness=burstiness, seed=3)
    gaps = [float(gap) for gap in np.diff([0.0, *times])]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    variation = statistics.stdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


async def test_open_requests_are_bounded_begin_in_time_and_answers_keep_their_order() -> None:
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    begin_s = [0.0, 0.0, 0.0, 0.01, 0.02]
    begun_s = [0.0] * 5
    num_open, most, finished = 0, 0, 0

    async def send(number: int) -> Answer:
        nonlocal num_open, most
        begun_s[number] = loop.time() - start_s
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0.001 * (5 - number))
        num_open -= 1
        return Answer(completion_tokens=number)

    def done() -> None:
        nonlocal finished
        finished += 1

    sends = [functools.partial(send, number) for number in range(5)]
    answers, _ = await run_load(sends, begin_s, max_concurrency=2, done=done)
    assert [answer.completion_tokens for answer in answers] == [0, 1, 2, 3, 4]
    assert (most, finished) == (2, 5)
    assert all(begun >= wanted for begun, wanted in zip(begun_s, begin_s, strict=True))
