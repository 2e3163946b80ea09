"""Measures how long decode steps take with and without drafts, when an engine starts.

A scheduler of its own runs rows on the executor, which nobody else uses yet. So a time has
everything that a step costs: the device, the scheduler, and the way between them. Per number of
rows, the kinds of steps take turns, so that a slow moment of the machine hits all of them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from aserve.errors import BugError, EngineDead
from aserve.messages.base import pack_i32
from aserve.messages.executor import EngineSpec, Executor, SchedulerEvent, Ticket
from aserve.messages.output import Refused
from aserve.messages.requests import AdmitRequest, Cancel, SamplingParams
from aserve.messages.results import StepFailed, StepTimes
from aserve.messages.step import Launch
from aserve.progress import shown_progress
from aserve.scheduling.scheduler import Scheduler

NUM_ROWS = (1, 4, 16, 64)
PROMPT_LEN = 12
STEPS = 3  # of one kind in a turn
MIN_TURNS = 2
MAX_TURNS = 10
TURNS_S = 0.2  # after that, and MIN_TURNS, no more turns
LONGEST_S = 3.0  # after that, larger numbers of rows are not measured
US = 1e6
SKIPPED = (0, -1)  # rows that draft, and their drafts, in steps that skip the drafter
Kind = tuple[int, int]  # rows that draft, and their drafts


class WarmExecutor(Executor, Protocol):
    async def warm_up(self) -> None: ...


async def warm_up(executor: WarmExecutor) -> list[StepTimes]:
    """Warms the executor up. Returns the events that a scheduler must have first."""
    await executor.warm_up()
    caps = executor.spec.decode
    is_drafting = caps.max_tokens_per_step > caps.root_len and not caps.whole_windows
    if not is_drafting or PROMPT_LEN + 1 + _room(executor.spec) > _row_len(executor.spec):
        return []
    return [await measure_steps(executor)]


async def measure_steps(executor: Executor) -> StepTimes:
    caps, spec = executor.spec.decode, executor.spec
    most = caps.max_tokens_per_step - caps.root_len
    kinds = (SKIPPED, (0, 0), (1, most), (spec.max_rows, most))
    found: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    counts = [count for count in NUM_ROWS if count <= _most_rows(spec)] or [1]
    start_s = time.perf_counter()
    with shown_progress("measuring steps") as show:
        for number, num_rows in enumerate(counts):
            for kind, time_s in (await _measure(executor, num_rows, kinds)).items():
                found[kind].append(time_s * US)
            show(number + 1, len(counts))
            if time.perf_counter() - start_s > LONGEST_S:
                break
    plain, followed, first, whole = (tuple(found[kind]) for kind in kinds)
    return StepTimes(tuple(counts[: len(plain)]), plain, {0: followed, most: whole}, {most: first})


def _most_rows(spec: EngineSpec) -> int:
    """Returns how many rows have pages for all their tokens."""
    pages = min(group.num_pages - 1 for group in spec.groups)
    by_pages = pages // (-(-_row_len(spec) // spec.page_size) + 1)
    return min(spec.max_rows, by_pages, spec.max_batched_tokens // spec.decode.max_tokens_per_step)


def _row_len(spec: EngineSpec) -> int:
    """Returns the tokens after which a row ends: it may have no more, or the pool has no pages for
    more. One whose drafts are all accepted may begin anew before the last turn."""
    steps = MAX_TURNS * (spec.lead + 1 + STEPS)
    num_tokens = PROMPT_LEN + 2 + steps * (spec.decode.max_tokens_per_step + 2)
    pages = [group.num_pages - 1 for group in spec.groups if group.window is None]
    room = [num_pages * spec.page_size - spec.decode.block_len for num_pages in pages]
    return min(num_tokens, spec.max_model_len, *room)


def _room(spec: EngineSpec) -> int:
    """Returns how many tokens a row may get while one kind of step is timed, with the steps that
    are in flight then."""
    return (2 * (spec.lead + 1) + STEPS) * spec.decode.max_tokens_per_step


async def _measure(executor: Executor, num_rows: int, kinds: tuple[Kind, ...]) -> dict[Kind, float]:
    """Returns the time of each kind of step in its fastest turn, in seconds. There may be only two
    turns, and one of them may have waited for something else."""
    rows = _Rows(executor, num_rows)
    times: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    await rows.begin()
    start_s = time.perf_counter()
    for turn in range(MAX_TURNS):
        for kind in kinds:
            times[kind].append(await rows.time_of(kind))
        if turn + 1 >= MIN_TURNS and time.perf_counter() - start_s > TURNS_S:
            break
    await rows.end()
    return {kind: min(found) for kind, found in times.items()}


class _Rows:
    """Rows that decode until `end`."""

    def __init__(self, executor: Executor, num_rows: int) -> None:
        self._executor = executor
        self._num_rows = num_rows
        self._scheduler = Scheduler(executor.spec)
        self._flights: deque[Ticket] = deque()

    async def begin(self) -> None:
        spec = self._executor.spec
        max_tokens = _row_len(spec) - PROMPT_LEN
        params = SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens)
        self._scheduler.state.draft_choice.fix(*SKIPPED)
        requests: list[SchedulerEvent] = [
            AdmitRequest(str(row), pack_i32(_prompt(spec)), params, namespace=str(row))
            for row in range(self._num_rows)
        ]
        self._step(requests)
        while not all(sequence.num_outputs for sequence in self._scheduler.state.living()):
            await self._land()

    async def time_of(self, kind: Kind) -> float:
        spec = self._executor.spec
        num_outputs = max(sequence.num_outputs for sequence in self._scheduler.state.living())
        if PROMPT_LEN + num_outputs + _room(spec) > _row_len(spec):
            await self.end()
            await self.begin()
        self._scheduler.state.draft_choice.fix(*kind)
        for _ in range(spec.lead + 1):  # steps of the kind before, and the first
            await self._land()
        start_s = time.perf_counter()
        for _ in range(STEPS):
            await self._land()
        return (time.perf_counter() - start_s) / STEPS

    async def end(self) -> None:
        self._step([Cancel(str(row), None, 0, "cancelled") for row in range(self._num_rows)])
        while self._flights:
            await self._land()

    async def _land(self) -> None:
        result = await self._flights.popleft()
        if isinstance(result, StepFailed):
            raise EngineDead(f"a step to measure its time failed: {result.error.message}")
        self._step([result])

    def _step(self, events: list[SchedulerEvent]) -> None:
        for effect in self._scheduler.step(events):
            if isinstance(effect, Launch):
                self._flights.append(self._executor.launch(*effect.batches))
            elif isinstance(effect, Refused):
                raise BugError(f"a request to measure steps was refused: {effect.error.message}")


def _prompt(spec: EngineSpec) -> list[int]:
    """The prompt of all rows, behind which drafts are mostly accepted once the text repeats: rows
    that get many tokens cost more."""
    return [(7 + 13 * place) % spec.vocab_size for place in range(PROMPT_LEN)]
