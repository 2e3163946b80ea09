"""`aserve bench relay`: every token comes after its event, and a busy loop still goes round."""

from __future__ import annotations

import asyncio
import time

from aserve.bench.relay import BusyLoop, TimedCpu
from tests.bench.last_line import Captured, figures_of


def test_the_last_line_has_both_loops_and_no_token_comes_before_its_event(
    capsys: Captured,
) -> None:
    figures = figures_of(capsys, "relay", "--rows", "2", "--steps", "5", "--repeats", "2")
    assert (figures["rows"], figures["steps"]) == (2, 10)
    for loop in ("idle", "saturated"):
        assert list(figures[loop]) == [
            *("resolve_p50_us", "resolve_p99_us", "resolve_min_us"),
            *("step_p50_us", "step_p99_us", "num_steps"),
        ]
        assert figures[loop]["num_steps"] == 10
        assert figures[loop]["resolve_min_us"] > 0
        assert figures[loop]["step_p50_us"] > 0


async def test_a_busy_loop_runs_until_its_context_ends() -> None:
    loop = asyncio.get_running_loop()
    with BusyLoop() as busy:
        rounds = loop.create_future()
        loop.call_later(0.005, rounds.set_result, None)
        await rounds
        assert busy.num_rounds > 1
    num_rounds = busy.num_rounds
    rounds = loop.create_future()
    loop.call_later(0.005, rounds.set_result, None)
    await rounds
    assert busy.num_rounds <= num_rounds + 1


def test_a_timed_device_records_its_last_event() -> None:
    device = TimedCpu()
    start_s = time.perf_counter()
    assert device.last_event_s == 0.0
    device.mark().synchronize()
    assert start_s <= device.last_event_s <= time.perf_counter()
