"""`aserve bench overlap-sim`: what busy means, and that a result never comes before its sleep."""

from __future__ import annotations

import asyncio
import time

import pytest

from aserve.bench.overlap_sim import summarize
from aserve.bench.sleeping_engine import Nap, SleepingExecutor
from aserve.messages.base import pack_i32
from aserve.messages.executor import EngineSpec, GroupSpec
from aserve.messages.results import StepResult
from aserve.messages.step import ScheduleBatch
from tests.bench.last_line import Captured, figures_of

SPEC = EngineSpec(
    page_size=16,
    groups=(GroupSpec("full", 9),),
    max_rows=2,
    max_model_len=64,
    max_batched_tokens=64,
    vocab_size=2048,
)
TINY = ("--rows", "1,3", "--steps", "4", "--step-ms", "0.5")


def decode_step(iteration: int, *rows: int) -> ScheduleBatch:
    packed = pack_i32(rows)
    ones = pack_i32([1] * len(rows))
    ids = pack_i32([-row for row in rows])
    return ScheduleBatch(
        iteration=iteration,
        rows=packed,
        query_lens=ones,
        input_ids=ids,
        next_ids=ids,
        kv_lens=ones,
        bounds=bytes(len(rows)),
        expects=ones,
        sample_rows=packed,
    )


def test_busy_is_the_time_asleep_from_the_first_start_to_the_last_wake() -> None:
    naps = [Nap(1, 10.0, 10.2), Nap(1, 10.3, 10.5), Nap(1, 10.5, 11.0)]
    found = summarize(naps)
    assert found.busy == pytest.approx(0.9)
    assert found.gap_us == pytest.approx(0.05e6)
    assert found.num_steps == 3


async def test_a_result_is_delivered_after_its_sleep_and_in_order() -> None:
    executor = SleepingExecutor(SPEC, step_s=0.02)
    executor.start(asyncio.get_running_loop())
    start_s = time.perf_counter()
    tickets = [executor.launch(decode_step(number, 1, 2)) for number in (1, 2)]
    for number, ticket in enumerate(tickets, start=1):
        result = await ticket
        assert isinstance(result, StepResult)
        assert result.rows == pack_i32([1, 2])
        assert time.perf_counter() - start_s >= number * 0.02
    executor.close()
    first, second = executor.naps
    assert first.wake_s - first.start_s >= 0.02
    assert first.wake_s <= second.start_s


def test_the_last_line_has_each_size_at_both_depths(capsys: Captured) -> None:
    figures = figures_of(capsys, "overlap-sim", "--no-http", *TINY)
    for series in ("busy", "busy_depth1"):
        assert list(figures[series]) == ["0.5ms/1", "0.5ms/3"]
        assert all(0 < busy <= 1 for busy in figures[series].values())
    assert "busy_http" not in figures
    assert all(line["steps"] >= 4 for line in figures["details"])


@pytest.mark.slow
def test_streaming_clients_of_another_process_drive_it_over_http(capsys: Captured) -> None:
    small = ("--rows", "2", "--steps", "4", "--step-ms", "1", "--processes", "1,2")
    figures = figures_of(capsys, "overlap-sim", *small)
    for where in ("", "_http", "_two_processes"):
        for series in (f"busy{where}", f"busy{where}_depth1"):
            assert list(figures[series]) == ["1ms/2"]
            assert 0 < figures[series]["1ms/2"] <= 1
