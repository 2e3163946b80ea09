"""The prompts and requests of the speculation benchmark, and the steps that `verify` counts."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from aserve.bench.one_batch import Shape
from aserve.bench.options import SpeculateOptions
from aserve.bench.speculate import _control, _Times, joined
from aserve.bench.speculate_engine import (
    Run,
    SpeculateEngine,
    Turn,
    prompts_of,
    requests_of,
    run_in_turns,
)
from aserve.bench.step_driver import StepTime
from aserve.bench.verify_step import _add, _Steps
from aserve.config import Facts, Raw, resolve
from aserve.messages.base import pack_i32
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.messages.results import StepTimes
from aserve.messages.step import StepStats
from aserve.scheduling.step_times import WindowTimes
from aserve.tiny import MODEL_DIR


@pytest.mark.parametrize("task", ["stories", "recall", "json", "code"])
def test_a_task_has_prompts_that_differ(task: str) -> None:
    prompts = prompts_of(task)
    assert len({*prompts}) == len(prompts) == 5
    assert (task == "stories") == ("Once upon a time" in prompts[0])


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_does_not_reach_an_engines_process() -> None:
    """It would print a traceback beside the parent's end."""
    resolved = resolve(Raw(), Facts(default_model=str(MODEL_DIR)))
    engine = SpeculateEngine(SpeculateOptions(), resolved)
    group = os.getpgid(engine._process.pid)
    engine.close()
    assert group != os.getpgid(0)
    assert engine._process.returncode == 0


def test_no_repeat_drafts_from_the_answers_of_another_one() -> None:
    """The same prompts come again, and a drafter remembers answers within a namespace."""
    asked = [AdmitRequest("", pack_i32([first]), SamplingParams(seed=0)) for first in (1, 2)]
    namespaces = [
        {each.namespace for each in requests_of(asked, num_rows, repeat)}
        for num_rows in (1, 2)
        for repeat in range(3)
    ]
    assert all(len(each) == 1 for each in namespaces)
    assert len(set.union(*namespaces)) == 6


def test_engines_take_turns_in_both_orders_and_the_plain_ones_are_compared() -> None:
    turns: list[tuple[str, int, int]] = []

    def engine(name: str, speed: int) -> Any:
        def decode(turn: Turn) -> Run:
            turns.append((name, turn.num_rows, turn.repeat))
            return Run(1.0, speed * (10 if turn.repeat else 1), 1.0, 1, ())

        return SimpleNamespace(run=decode)

    engines = {"plain": engine("plain", 100), "plain again": engine("plain again", 99)}
    found = run_in_turns(engines, [4, 8], repeats=2, title="turns")
    names = ["plain", "plain again"]
    assert turns == [
        (name, num_rows, repeat)
        for repeat in range(3)
        for num_rows in (4, 8)
        for name in (names[::-1] if repeat == 1 else names)
    ]
    assert _control(8, found[8]) == {"rows": 8, "ratio": 0.99, "ratio_spread": 0.0}


def test_the_processes_of_an_engine_count_together_in_each_repeat() -> None:
    def run(num_tokens: int, decode_s: float, *windows: tuple[int, int]) -> Run:
        return Run(decode_s, num_tokens, decode_s, num_tokens, windows)

    runs = {
        "plain 0": [run(10, 1.0), run(20, 1.0)],
        "plain again 0": [run(7, 1.0), run(7, 1.0)],
        "plain 1": [run(10, 3.0), run(20, 2.0, (4, 2))],
    }
    found = joined(runs, ("plain", "plain again"))
    assert [one.rate for one in found["plain"]] == [20 / 4, 40 / 3]
    assert found["plain"][1].windows == ((4, 2),)
    assert [one.num_tokens for one in found["plain again"]] == [7, 7]


def test_a_window_costs_what_draft_and_verify_cost() -> None:
    def times(window_us: float) -> WindowTimes:
        measured = StepTimes((1,), (100.0,), {0: (110.0,), 4: (window_us,)})
        return WindowTimes(measured, max_rows=1, tree=None)

    own = _Times(times(180.0), times(130.0)).costs(1)
    assert own == {"draft_cost": 0.5, "verify_cost": 1.3, "window_cost": 1.8}
    without_model = _Times(times(130.0), None).costs(1)
    assert without_model == {"draft_cost": 0.0, "verify_cost": 1.3, "window_cost": 1.3}


def test_a_step_counts_where_every_row_has_its_drafts() -> None:
    def step(done_s: float, num_rows: int, *windows: tuple[int, int]) -> StepTime:
        return StepTime(StepStats(num_decode_rows=num_rows), 0.0, done_s, 0, windows)

    times = [
        step(1.0, 0),
        step(2.0, 2),
        step(4.0, 2, (4, 3), (4, 1)),
        step(5.0, 2, (4, 5), (2, 1)),  # the second row is at its end
        step(6.0, 1, (4, 5)),
    ]
    plain, windows = _Steps(0), _Steps(4)
    _add(Shape(2, 1, 1), (plain, windows), (times, times))
    assert (plain.times_s, plain.num_tokens) == ([1.0], [])
    assert (windows.times_s, windows.num_tokens) == ([2.0], [3, 1])
