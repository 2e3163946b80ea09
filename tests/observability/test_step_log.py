"""A14: what is said about a step was frozen at its launch, and carries its number."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aserve.errors import ErrorInfo
from aserve.messages.base import pack_i32
from aserve.messages.executor import SchedulerEffect, SchedulerEvent
from aserve.messages.output import SequenceOutput, StepOutput
from aserve.messages.results import SampleResult, StepFailed, StepResult
from aserve.messages.step import Launch, ScheduleBatch, StepStats
from aserve.observability.reports import SchedulerTick
from aserve.observability.step_log import StepLog


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def launch(iteration: int, *, num_running: int = 0) -> Launch:
    stats = StepStats(num_running=num_running, num_waiting=1000 + iteration)
    return Launch((ScheduleBatch(iteration, *(b"",) * 8, stats=stats),))


def result(iteration: int, *, num_tokens: int = 1) -> StepResult:
    tokens = pack_i32([7] * num_tokens)
    return StepResult(iteration, rows=b"", counts=b"", tokens=tokens)


def tick(
    *, events: Sequence[SchedulerEvent] = (), effects: Sequence[SchedulerEffect] = ()
) -> SchedulerTick:
    return SchedulerTick(events=list(events), effects=list(effects))


def iterations(lines: list[str]) -> list[int]:
    return [int(re.search(r"iteration=(\d+)", line)[1]) for line in lines]  # type: ignore[index]  # always there


@pytest.fixture(autouse=True)
def shows_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="aserve.observability.step_log")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_numbers_are_1_2_3_in_launch_order_under_any_delay(
    data: st.DataObject, caplog: pytest.LogCaptureFixture
) -> None:
    """Results may come late, in one list with others, or swapped: lines never are."""
    count = data.draw(st.integers(1, 12))
    order = data.draw(st.permutations(range(1, count + 1)))
    cuts = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    caplog.clear()
    clock = ManualClock()
    log = StepLog(interval_s=0, clock=clock)
    for iteration in range(1, count + 1):
        log.on_tick(tick(effects=[launch(iteration)]))
    for cut in cuts:
        events: list[SchedulerEvent] = [result(number) for number in order[:cut]]
        order = order[cut:]
        clock.now_s += 0.5
        log.on_tick(tick(events=events))
    assert iterations(caplog.messages) == list(range(1, count + 1))


def test_trap_6_a_line_says_what_its_step_was_launched_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = StepLog(interval_s=0, clock=ManualClock())
    log.on_tick(tick(effects=[launch(1, num_running=5), launch(2, num_running=9)]))
    log.on_tick(tick(events=[result(1)], effects=[launch(3, num_running=11)]))
    assert "iteration=1 " in caplog.messages[0]
    assert "running=5 waiting=1001 " in caplog.messages[0]


def test_lines_keep_their_distance_and_count_all_tokens_between(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    log = StepLog(interval_s=5, clock=clock)
    for iteration in range(1, 21):
        log.on_tick(tick(effects=[launch(iteration)]))
        clock.now_s += 1
        late = SampleResult(iteration, rows=b"", counts=b"", tokens=pack_i32([1]))
        log.on_tick(tick(events=[result(iteration, num_tokens=3), late]))
    assert iterations(caplog.messages) == [1, 6, 11, 16]
    assert "tok_s=4" in caplog.messages[1]


def test_idle_time_does_not_lower_the_rate(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = StepLog(interval_s=5, clock=clock)
    for iteration in (1, 2):
        log.on_tick(tick(effects=[launch(iteration)]))
        clock.now_s += 1
        log.on_tick(tick(events=[result(iteration, num_tokens=10)]))
        clock.now_s += 3600
    assert ["tok_s=10" in line for line in caplog.messages] == [True, True]


def test_a_line_has_what_windows_with_drafts_gave_since_the_last_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    log = StepLog(interval_s=1, clock=clock)
    windows = [(4, 5), (0, 1), (4, 2), (2, 3), (4, 1), (4, 2), (3, 1)]
    for iteration, (drafts, tokens) in enumerate(windows, start=1):
        output = SequenceOutput("r", 0, 0, pack_i32([7] * tokens), 0, num_drafts=drafts)
        log.on_tick(tick(effects=[launch(iteration)]))
        clock.now_s += iteration in (1, 2, 6, 7)
        log.on_tick(tick(events=[result(iteration)], effects=[StepOutput(iteration, (output,))]))
    form = r"accept_len=(\S+) accept_rates=(\S+) accept_counts=(\S+)"
    assert [re.findall(form, line) for line in caplog.messages] == [
        [("5.00", "1.00,1.00,1.00,1.00", "0,0,0,0,1")],
        [],
        [("2.00", "0.75,0.25", "1,2,1")],
        [("1.00", "0.00", "1")],
    ]


def test_a_failed_step_always_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(interval_s=3600, clock=ManualClock())
    log.on_tick(tick(effects=[launch(1), launch(2)]))
    error = ErrorInfo(message="out of luck", type="server_error", code="step_failed", status=500)
    log.on_tick(tick(events=[result(1), StepFailed(2, error)]))
    assert iterations(caplog.messages) == [1, 2]
    assert "failed='out of luck'" in caplog.messages[1]


def test_a_line_says_how_its_step_ran_where_devices_have_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = StepLog(interval_s=0, clock=ManualClock())
    log.on_tick(tick(effects=[launch(1), launch(2)]))
    replayed = msgspec.structs.replace(result(1), ran="pieces")
    log.on_tick(tick(events=[replayed, result(2)]))
    first, second = caplog.messages
    assert " ran=pieces" in first
    assert "ran=" not in second
