"""One turn of the scheduler does a bounded amount of work, whatever waits. Counted, not timed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aserve.messages.base import array_i32
from aserve.messages.executor import EngineSpec, GroupSpec
from aserve.messages.requests import AdmitRequest, Grammar
from aserve.messages.results import BuildMask, MaskReady
from aserve.scheduling.queue import WaitingQueue
from aserve.scheduling.scheduler import Scheduler
from tests.scheduling.stage import request, spec
from tests.scheduling.step_counter import StepCounter


def engine(*, page_size: int = 4, num_pages: int = 40_000) -> EngineSpec:
    return msgspec.structs.replace(
        spec(page_size=page_size, max_rows=256, max_batched_tokens=8_192),
        groups=(GroupSpec("full", num_pages),),
        max_model_len=4_000,
        max_waiting=2_000,
    )


def counter(spec: EngineSpec) -> StepCounter:
    return StepCounter(Scheduler(spec))


def num_admitted(run: StepCounter) -> list[int]:
    """In each turn."""
    return [sum(len(batch.row_inits) for batch in turn) for turn in run.turns]


def many(count: int, *, max_tokens: int = 60) -> list[AdmitRequest]:
    return [
        request(f"r{number}", [number % 97, number // 97, 3], max_tokens=max_tokens)
        for number in range(count)
    ]


def test_a_turn_admits_few_sequences_and_fewer_where_many_rows_run() -> None:
    run = counter(engine())
    run.send(*many(600))
    run.run()
    assert max(num_admitted(run)) <= 32
    beside_many = [
        count
        for count, turn in zip(num_admitted(run), run.turns, strict=True)
        if turn and turn[-1].stats.num_running >= 250
    ]
    assert max(beside_many) <= 12
    assert sum(num_admitted(run)) == 600


def test_a_turn_finishes_few_of_the_sequences_that_end_at_once() -> None:
    """Those that are admitted later have shorter answers, so that all come to their ends in the
    same few steps.
    """
    run = counter(engine())
    run.send(*(request(f"r{n}", [n, 3], max_tokens=100 - n // 8) for n in range(256)))
    run.run()
    assert sum(run.num_finished) == 256
    assert max(run.num_finished) == 16


def test_a_turn_writes_a_bounded_number_of_cached_pages_into_the_page_table() -> None:
    """60 children of one prompt of 2,000 pages, which the first child has computed."""
    run = counter(engine(page_size=1))
    run.send(request("r", [number % 97 for number in range(2_001)], n=60, max_tokens=4))
    run.run()
    writes = [
        sum(len(array_i32(batch.page_writes[0].pages)) for batch in turn) for turn in run.turns
    ]
    assert max(writes) <= 32 * 1024 + 2_100
    assert sum(num_admitted(run)) == 60


def test_sequences_with_slow_masks_that_have_no_row_are_not_looked_at_in_every_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """500 wait for the rows of slow sequences, of which there are 32, and others go on."""
    pops: list[int] = []
    pop = WaitingQueue.pop

    def counted(queue: WaitingQueue) -> Any:
        pops.append(1)
        return pop(queue)

    run = counter(engine())
    grammar = Grammar("regex", "a")
    slow = [request(f"s{n}", [1, n % 97, n // 97], grammar=grammar) for n in range(500)]
    asks = [effect for effect in run.play(*slow) if isinstance(effect, BuildMask)]
    run.play(*(MaskReady(ask.request_id, 0, 0, mask=b"\0" * 16, is_slow=True) for ask in asks))
    monkeypatch.setattr(WaitingQueue, "pop", counted)
    fast = [request(f"f{number}", [2, number], max_tokens=8) for number in range(20)]
    run.send(*fast)
    most = len(pops)
    for _ in range(100):
        pops.clear()
        num_steps = run.num_steps
        run.run(1)
        if run.num_steps == num_steps:
            run.play()
        most = max(most, len(pops))
    assert most <= 40
    living = {sequence.request_id for sequence in run.scheduler.state.living()}
    assert not living & {each.request_id for each in fast}, "the others were served"
