"""One turn of the scheduler does a bounded amount of work, whatever waits. Counted, not timed."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest

from aserve.messages.base import array_i32
from aserve.messages.executor import EngineSpec, GroupSpec, SchedulerEvent
from aserve.messages.output import Retired
from aserve.messages.requests import AdmitRequest, Grammar
from aserve.messages.results import BuildMask, MaskReady
from aserve.messages.step import Launch, ScheduleBatch
from aserve.scheduling.queue import WaitingQueue
from aserve.scheduling.scheduler import Scheduler
from tests.scheduling.stage import request, result, spec


def engine(*, page_size: int = 4, num_pages: int = 40_000) -> EngineSpec:
    return msgspec.structs.replace(
        spec(page_size=page_size, max_rows=256, max_batched_tokens=8_192),
        groups=(GroupSpec("full", num_pages),),
        max_model_len=4_000,
        max_waiting=2_000,
    )


class Turns:
    """Runs a load to its end; the device answers one step in each turn."""

    def __init__(self, engine: EngineSpec) -> None:
        self.scheduler = Scheduler(engine)
        self.batches: list[list[ScheduleBatch]] = []  # of each turn
        self.num_finished: list[int] = []  # in each turn

    def run(self, *requests: AdmitRequest) -> None:
        in_flight: deque[ScheduleBatch] = deque()
        events: list[SchedulerEvent] = list(requests)
        while events or self.scheduler.has_more:
            effects = self.scheduler.step(events)
            ended = sum(isinstance(effect, Retired) for effect in effects)
            self.num_finished.append(ended)
            launched = [effect.batches[0] for effect in effects if isinstance(effect, Launch)]
            self.batches.append(launched)
            in_flight.extend(launched)
            events = [_answer(in_flight.popleft())] if in_flight else []
        assert self.scheduler.is_idle

    def num_admitted(self) -> list[int]:
        return [sum(len(batch.row_inits) for batch in batches) for batches in self.batches]

    def num_page_writes(self) -> list[int]:
        return [
            sum(len(array_i32(batch.page_writes[0].pages)) for batch in batches)
            for batches in self.batches
        ]


def _answer(batch: ScheduleBatch) -> SchedulerEvent:
    return result(batch.iteration, {row: [7] for row in array_i32(batch.sample_rows).tolist()})


def many(count: int, *, max_tokens: int = 60) -> list[AdmitRequest]:
    return [
        request(f"r{number}", [number % 97, number // 97, 3], max_tokens=max_tokens)
        for number in range(count)
    ]


def test_a_turn_admits_few_sequences_and_fewer_where_many_rows_run() -> None:
    turns = Turns(engine())
    turns.run(*many(600))
    assert max(turns.num_admitted()) <= 32
    beside_many = [
        count
        for count, batches in zip(turns.num_admitted(), turns.batches, strict=True)
        if batches and batches[-1].stats.num_running >= 250
    ]
    assert max(beside_many) <= 12
    assert sum(turns.num_admitted()) == 600


def test_a_turn_finishes_few_of_the_sequences_that_end_at_once() -> None:
    """Those that are admitted later have shorter answers, so that all come to their ends in the
    same few steps.
    """
    turns = Turns(engine())
    turns.run(*(request(f"r{n}", [n, 3], max_tokens=100 - n // 8) for n in range(256)))
    assert sum(turns.num_finished) == 256
    assert max(turns.num_finished) == 16


def test_a_turn_writes_a_bounded_number_of_cached_pages_into_the_page_table() -> None:
    """60 children of one prompt of 2,000 pages, which the first child has computed."""
    turns = Turns(engine(page_size=1))
    turns.run(request("r", [number % 97 for number in range(2_001)], n=60, max_tokens=4))
    assert max(turns.num_page_writes()) <= 32 * 1024 + 2_100
    assert sum(turns.num_admitted()) == 60


def test_sequences_with_slow_masks_that_have_no_row_are_not_looked_at_in_every_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """500 wait for the rows of slow sequences, of which there are 32, and others go on."""
    pops: list[int] = []
    pop = WaitingQueue.pop

    def counted(queue: WaitingQueue) -> Any:
        pops.append(1)
        return pop(queue)

    scheduler = Scheduler(engine())
    grammar = Grammar("regex", "a")
    slow = [request(f"s{n}", [1, n % 97, n // 97], grammar=grammar) for n in range(500)]
    effects = scheduler.step(list(slow))
    asks = [effect for effect in effects if isinstance(effect, BuildMask)]
    ready = [MaskReady(ask.request_id, 0, 0, mask=b"\0" * 16, is_slow=True) for ask in asks]
    effects += scheduler.step(list(ready))
    monkeypatch.setattr(WaitingQueue, "pop", counted)
    fast = [request(f"f{number}", [2, number], max_tokens=8) for number in range(20)]
    events: list[SchedulerEvent] = list(fast)
    in_flight = deque(effect.batches[0] for effect in effects if isinstance(effect, Launch))
    most = 0
    for _ in range(100):
        pops.clear()
        effects = scheduler.step(events)
        most = max(most, len(pops))
        in_flight.extend(effect.batches[0] for effect in effects if isinstance(effect, Launch))
        events = [_answer(in_flight.popleft())] if in_flight else []
    assert most <= 40
    living = {sequence.request_id for sequence in scheduler.state.living()}
    assert not living & {each.request_id for each in fast}, "the others were served"
