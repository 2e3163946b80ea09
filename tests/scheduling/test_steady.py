"""A step that repeats the last one, beside the same step chosen and built anew."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import pytest

from aserve.bench.step_driver import result_of
from aserve.errors import StepError
from aserve.messages.changes import Amend, ChangeSettings
from aserve.messages.executor import DecodeCaps, EngineSpec, SchedulerEffect, SchedulerEvent
from aserve.messages.output import Retired
from aserve.messages.requests import Cancel
from aserve.messages.results import StepFailed, StepResult, StepTimes
from aserve.messages.step import Launch, ScheduleBatch
from aserve.scheduling import commit as commit_module
from aserve.scheduling import scheduler as scheduler_module
from aserve.scheduling.flights import Step
from aserve.scheduling.repeated_results import land_repeated
from aserve.scheduling.scheduler import Scheduler
from aserve.scheduling.state import SchedulerState
from tests.scheduling.stage import Stage, request, result, rows, spec

PAGE_SIZE = 4


class Run:
    """Requests that come and end by chance, with a device that answers at once."""

    def __init__(self, engine: EngineSpec, *, vocab_size: int = 100) -> None:
        self._scheduler = Scheduler(engine, debug_checks=True)
        self._vocab_size = vocab_size
        self._numbers = np.random.default_rng(7)
        self._in_flight: deque[ScheduleBatch] = deque()
        self._num_requests = 0
        self.effects: list[list[SchedulerEffect]] = []
        self.num_repeated = self.num_windows = 0

    def play(self, num_ticks: int, *, num_requests: int, times: StepTimes | None = None) -> Run:
        events: list[SchedulerEvent] = [] if times is None else [times]
        events += [self._arrival() for _ in range(num_requests)]
        for tick in range(num_ticks):
            if self._in_flight:
                events.append(result_of(self._in_flight.popleft(), vocab_size=self._vocab_size))
            effects = self._scheduler.step(events)
            events = [self._arrival() for each in effects if isinstance(each, Retired)]
            if tick % 29 == 28:
                name = str(self._num_requests - 1)
                events.append(Cancel(name, child=None, reason="cancelled", kept=0))
            if tick % 17 == 16:
                name = str(self._num_requests - 2)
                events.append(Amend(name, number=tick, max_tokens=20 + tick % 3))
            self._note(effects)
            self._check_pages()
        return self

    def _check_pages(self) -> None:
        """Whole pages enter the prefix tree when they are committed, and not later."""
        for row in self._scheduler.state.running.values():
            assert row.allocation is not None
            if row.allocation.is_inserting:
                assert row.allocation.num_shared == row.cacheable_len // PAGE_SIZE

    def _note(self, effects: list[SchedulerEffect]) -> None:
        self.effects.append(effects)
        state = self._scheduler.state
        for effect in effects:
            if isinstance(effect, Launch):
                self._in_flight.extend(effect.batches)
                known = state.repeat
                step = state.steps[effect.batches[0].iteration]
                self.num_repeated += known is not None and step.query_lens is known.step.query_lens
                self.num_windows += effect.batches[0].verify is not None

    def _arrival(self) -> SchedulerEvent:
        self._num_requests += 1
        prompt = self._numbers.integers(100, size=int(self._numbers.integers(1, 12))).tolist()
        num_outputs = int(self._numbers.integers(1, 60))
        client = "ab"[self._num_requests % 2]
        return request(
            *(str(self._num_requests), prompt),
            max_tokens=num_outputs,
            end_ids=(97,) if self._num_requests % 3 == 0 else (),
            client=client,
        )


@pytest.mark.parametrize("pace", [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize(("num_pages", "num_requests"), [(200, 4), (200, 3), (40, 5), (200, 1)])
def test_a_repeated_step_is_what_would_be_chosen_anew(
    monkeypatch: pytest.MonkeyPatch, pace: tuple[int, int], num_pages: int, num_requests: int
) -> None:
    engine = spec(depth=pace[0], lead=pace[1], num_pages=num_pages, page_size=PAGE_SIZE)
    landed: list[bool] = []

    def note_landing(state: SchedulerState, step: Step, result: StepResult) -> bool:
        landed.append(land_repeated(state, step, result))
        return landed[-1]

    monkeypatch.setattr(commit_module, "land_repeated", note_landing)
    repeats = Run(engine).play(110, num_requests=num_requests)
    assert repeats.num_repeated // 4 <= sum(landed) <= repeats.num_repeated
    monkeypatch.setattr(scheduler_module, "repeat_step", lambda _state: False)
    chosen = Run(engine).play(110, num_requests=num_requests)
    assert repeats.effects == chosen.effects
    assert chosen.num_repeated == 0
    is_pipeline = pace[1] < pace[0] and num_requests > 1
    assert (repeats.num_repeated > 5) == (not is_pipeline and num_requests < 5)


DRAFTING_MODES = {
    "model": DecodeCaps(max_tokens_per_step=3),
    "n-grams": DecodeCaps(max_tokens_per_step=3, continues_repeats=True),
}
CHEAP_WINDOWS = StepTimes((1, 4), (900.0, 1000.0), {0: (930.0, 1030.0), 2: (990.0, 1090.0)}, {})


@pytest.mark.parametrize("mode", DRAFTING_MODES)
@pytest.mark.parametrize(("num_requests", "depth"), [(1, 2), (3, 2), (1, 1)])
def test_steps_repeat_while_a_drafter_waits_and_not_while_it_drafts(
    monkeypatch: pytest.MonkeyPatch, mode: str, num_requests: int, depth: int
) -> None:
    # No draft is accepted. Few different tokens are sampled, so that rows repeat themselves.
    pages = spec(num_pages=200, depth=depth, lead=depth)
    engine = msgspec.structs.replace(pages, decode=DRAFTING_MODES[mode])
    repeats, chosen = Run(engine, vocab_size=9), Run(engine, vocab_size=9)
    repeats.play(300, num_requests=num_requests, times=CHEAP_WINDOWS)
    monkeypatch.setattr(scheduler_module, "repeat_step", lambda _state: False)
    chosen.play(300, num_requests=num_requests, times=CHEAP_WINDOWS)
    assert repeats.effects == chosen.effects
    assert repeats.num_repeated > 60
    assert repeats.num_windows > 8


def test_a_row_that_the_device_has_forgotten_is_sent_to_it_again() -> None:
    stage = Stage(spec())
    stage.play(request("a", [1, 2, 3], max_tokens=1))
    stage.play(request("b", [4]))
    stage.play(Cancel("a", child=None, kept=0, reason="cancelled"))
    stage.play(StepFailed(1, StepError("the device is tired").info()))
    assert [[init.row for init in batch.row_inits] for batch in stage.batches] == [[2], []]


def test_a_row_that_the_device_has_forgotten_within_a_page_is_sent_to_it_again() -> None:
    stage = Stage(spec(depth=3, lead=1))
    stage.play(request("b", [4]))
    stage.play(request("a", [1, 2, 3], max_tokens=1))
    stage.play(result(1, {1: [9]}))
    assert [rows(batch) for batch in stage.batches] == [[1]]
    stage.play(Cancel("a", child=None, kept=0, reason="cancelled"))
    stage.play(StepFailed(2, StepError("the device is tired").info()))
    assert [[init.row for init in batch.row_inits] for batch in stage.batches] == [[1]]


def test_changed_settings_hold_for_the_next_step() -> None:
    stage = Stage(spec(depth=1, lead=1))
    stage.play(*(request(name, [ord(name)], max_tokens=60) for name in "abc"))
    sampled = {1: [9], 2: [9], 3: [9]}
    for iteration in range(1, 4):
        stage.play(result(iteration, sampled))
        assert [rows(batch) for batch in stage.batches] == [[1, 2, 3]]
    stage.play(ChangeSettings(4, 2, None, "info"))
    stage.play(result(4, sampled))
    assert [rows(batch) for batch in stage.batches] == [[1, 2]]


def test_the_result_of_a_repeated_step_ends_a_row_whose_end_came_nearer() -> None:
    stage = Stage(spec())
    stage.play(request("a", [1, 2, 3], max_tokens=60))
    for iteration in range(1, 6):
        stage.play(result(iteration, {1: [9]}))
    stage.play(Amend("a", 1, max_tokens=7))
    stage.play(result(6, {1: [9]}))
    stage.play(result(7, {1: [9]}))
    assert [each.num_outputs for each in stage.of(Retired)] == [7]


def test_a_repeated_step_leaves_out_the_rows_that_cannot_go_on() -> None:
    stage = Stage(spec())
    stage.play(request("a", [1, 2, 3], max_tokens=60), request("b", [4, 5, 6], max_tokens=5))
    launched = [rows(batch) for batch in stage.batches]
    for iteration in range(1, 9):
        counts = {row: [9] for row in launched[iteration - 1]}
        stage.play(result(iteration, counts))
        launched += [rows(batch) for batch in stage.batches]
    assert launched[3:7] == [[1, 2], [1, 2], [1], [1]]
    assert all(step.repeat is not None for step in stage.scheduler.state.steps.values())
