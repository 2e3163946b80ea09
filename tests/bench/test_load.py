"""A load: never more open than may be, every answer at its place, nobody before their time."""

from __future__ import annotations

import asyncio
import functools

from aserve.bench.load import run_load
from aserve.bench.streamed import Answer


async def test_open_requests_are_bounded_and_answers_keep_their_order() -> None:
    num_open, most, finished = 0, 0, 0

    async def send(number: int) -> Answer:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0.001 * (5 - number))
        num_open -= 1
        return Answer(completion_tokens=number)

    def done() -> None:
        nonlocal finished
        finished += 1

    sends = [functools.partial(send, number) for number in range(5)]
    answers, duration_s = await run_load(sends, [0.0] * 5, max_concurrency=2, done=done)
    assert [answer.completion_tokens for answer in answers] == [0, 1, 2, 3, 4]
    assert (most, finished) == (2, 5)
    assert duration_s > 0


async def test_no_request_begins_before_its_arrival_time() -> None:
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    begun_s = []

    async def send() -> Answer:
        begun_s.append(loop.time() - start_s)
        return Answer()

    await run_load([send, send, send], [0.0, 0.01, 0.02], max_concurrency=3, done=lambda: None)
    assert all(begun >= wanted for begun, wanted in zip(begun_s, [0.0, 0.01, 0.02], strict=True))
