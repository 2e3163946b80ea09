"""One tick of the scheduler does a bounded amount of work, whatever waits. Counted, not timed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aserve.messages.base import array_i32
from aserve.messages.executor import EngineSpec, GroupSpec, SchedulerEvent
from aserve.messages.output import Retired
from aserve.messages.requests import AdmitRequest, Grammar
from aserve.messages.results import BuildMask, MaskReady
from aserve.scheduling.queue import WaitingQueue
from aserve.scheduling.scheduler import Scheduler
from aserve.scheduling.tick import SEQUENCES_PER_ESTIMATE, Arrivals, max_received
from tests.scheduling.stage import Stage, cancel, query_lens, request, result, rows, spec
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
    """In each tick."""
    return [sum(len(batch.row_inits) for batch in tick) for tick in run.ticks]


def many(count: int, *, max_tokens: int = 60) -> list[AdmitRequest]:
    return [
        request(f"r{number}", [number % 97, number // 97, 3], max_tokens=max_tokens)
        for number in range(count)
    ]


def test_a_tick_admits_few_sequences_and_fewer_where_many_rows_run() -> None:
    run = counter(engine())
    run.send(*many(600))
    run.run()
    assert max(num_admitted(run)) <= 10
    beside_many = [
        count
        for count, tick in zip(num_admitted(run), run.ticks, strict=True)
        if tick and tick[-1].stats.num_running >= 250
    ]
    assert max(beside_many) <= 6
    assert sum(num_admitted(run)) == 600


def test_a_tick_finishes_few_of_the_sequences_that_end_at_once() -> None:
    """Those that are admitted later have shorter answers, so that all come to their ends in the
    same few steps.
    """
    run = counter(engine())
    run.send(*(request(f"r{n}", [n, 3], max_tokens=100 - n // 8) for n in range(256)))
    run.run()
    assert sum(run.num_finished) == 256
    assert max(run.num_finished) == 6


def test_tokens_behind_an_end_do_not_count_while_the_sequence_waits_to_be_finished() -> None:
    """10 end in one step, by a token with another one behind it, and a tick finishes 6 of them."""
    engine = spec(depth=1, lead=1, num_pages=99, max_rows=10, window=3)
    stage = Stage(msgspec.structs.replace(engine, max_waiting=10))
    stage.play(*(request(f"r{n}", [n, 3], end_ids=(9,)) for n in range(10)))
    stage.play(result(1, {row: [5] for row in rows(stage.batches[0])}))
    assert query_lens(stage.batches[0]) == [3] * 10
    stage.play(result(2, {row: [6, 9, 7] for row in rows(stage.batches[0])}))
    assert [retired.num_outputs for retired in stage.of(Retired)] == [3] * 6
    stage.play()
    assert [retired.num_outputs for retired in stage.of(Retired)] == [3] * 4


def test_a_tick_writes_a_bounded_number_of_cached_pages_into_the_page_table() -> None:
    """60 children of one prompt of 2,000 pages, which the first child has computed."""
    run = counter(engine(page_size=1))
    run.send(request("r", [number % 97 for number in range(2_001)], n=60, max_tokens=4))
    run.run()
    writes = [
        sum(len(array_i32(batch.page_writes[0].pages)) for batch in tick) for tick in run.ticks
    ]
    assert max(writes) <= 10 * 1024 + 2_100
    assert sum(num_admitted(run)) == 60


def test_sequences_with_slow_masks_that_have_no_row_are_not_looked_at_in_every_tick(
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


def test_new_requests_are_split_over_ticks_and_results_are_not_held() -> None:
    arrivals = Arrivals()
    events: list[SchedulerEvent] = [request(f"r{number}", [1]) for number in range(150)]
    back = [result(number, {}) for number in range(3)]
    ticks = [arrivals.next_tick([*events, *back])]
    while arrivals:
        ticks.append(arrivals.next_tick([]))
    assert ticks[0] == [*back, *events[: max_received(0)]]
    assert [event for tick in ticks for event in tick if event not in back] == events
    assert max(len(tick) for tick in ticks) == max_received(0) + len(back)


def test_children_count_and_a_large_group_comes_alone() -> None:
    arrivals = Arrivals()
    events: list[SchedulerEvent] = [request("a", [1], n=128), request("b", [1], n=60)]
    events += [request("c", [1], n=5), request("d", [1])]
    assert [arrivals.next_tick(events), arrivals.next_tick([]), arrivals.next_tick([])] == [
        events[:1],
        events[1:2],
        events[2:],
    ]
    assert not arrivals


def test_a_request_whose_wait_is_estimated_counts_as_several() -> None:
    limited = [msgspec.structs.replace(each, queue_deadline_s=1.0) for each in many(9)]
    assert received(Arrivals().next_tick([*limited])) == max_received(0) // SEQUENCES_PER_ESTIMATE


def test_a_cancel_comes_at_once_unless_its_request_is_held() -> None:
    arrivals = Arrivals()
    big, small = request("big", [1], n=64), request("small", [1])
    assert arrivals.next_tick([big, small, cancel("small"), cancel("big"), cancel("x")]) == [
        cancel("x"),
        big,
    ]
    assert arrivals.next_tick([]) == [small, cancel("small"), cancel("big")]
    assert arrivals.next_tick([cancel("small")]) == [cancel("small")]


def received(tick: list[SchedulerEvent]) -> int:
    return sum(isinstance(event, AdmitRequest) for event in tick)


def test_a_tick_that_takes_in_a_burst_receives_none_of_it_and_the_next_does() -> None:
    arrivals = Arrivals()
    assert received(arrivals.next_tick([*many(513)])) == 0
    assert received(arrivals.next_tick([*many(513)])) == max_received(0), "not twice in a row"
    assert received(Arrivals().next_tick([*many(512)])) == max_received(0)


def test_requests_wait_once_for_the_tick_that_takes_the_results_of_many_rows() -> None:
    arrivals, answer = Arrivals(), result(1, {})
    first = arrivals.next_tick([*many(30), answer], num_running=128)
    assert first == [answer]
    second = arrivals.next_tick([answer], num_running=128)
    assert (second[0], received(second)) == (answer, max_received(128))
    assert received(arrivals.next_tick([answer], num_running=128)) == 0
    assert received(arrivals.next_tick([], num_running=128)) == max_received(128)
    assert received(arrivals.next_tick([answer], num_running=127)) == max_received(127)


def test_a_tick_that_can_launch_nothing_receives_more() -> None:
    arrivals, answer = Arrivals(), result(1, {})
    assert received(arrivals.next_tick([*many(100)], may_launch=False)) == 32
    assert received(arrivals.next_tick([], may_launch=True)) == max_received(0)
    assert received(arrivals.next_tick([answer], may_launch=False)) == max_received(0)
