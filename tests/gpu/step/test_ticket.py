"""Tickets and their futures, and the waiter that completes them in launch order."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aserve.errors import BugError, StepError
from aserve.gpu.step.ticket import StepTicket
from aserve.gpu.waiter import Landing, Waiter
from aserve.messages.base import pack_i32
from aserve.messages.results import SeqLens, StepFailed, StepResult
from tests.fakes.gated_model import TIMEOUT_S

RESULT = StepResult(
    3,
    rows=pack_i32([4, 1, 2]),
    counts=pack_i32([2, 1, 3]),
    tokens=pack_i32([10, 11, 12, 13, 14, 15]),
)
FAILED = StepFailed(3, StepError("burst").info())
LENS = SeqLens(3, rows=pack_i32([1]), lens=pack_i32([7]))


def ticket() -> StepTicket:
    return StepTicket(3, asyncio.get_running_loop())


async def test_each_row_gets_its_own_tokens_and_one_that_was_not_sampled_is_a_bug() -> None:
    step = ticket()
    step.complete(RESULT)
    assert [await step[row] for row in (1, 2, 4)] == [(12,), (13, 14, 15), (10, 11)]
    with pytest.raises(BugError, match="samples no row 3"):
        await step[3]


async def wait(step: StepTicket) -> object:
    return await step


async def test_a_ticket_can_be_awaited_by_many_and_one_that_leaves_takes_nobody_along() -> None:
    step = ticket()
    waiters = [asyncio.ensure_future(wait(step)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiters[0]
    step.complete(RESULT)
    assert await asyncio.gather(*waiters[1:]) == [RESULT, RESULT]


async def test_an_awaiter_wakes_in_the_turn_after_the_result() -> None:
    """A loop that is never idle takes long for each turn."""
    step = ticket()
    waiter = asyncio.ensure_future(wait(step))
    await asyncio.sleep(0)
    step.complete(RESULT)
    await asyncio.sleep(0)
    assert waiter.done()


async def test_a_failure_is_a_value_of_the_ticket_and_an_error_of_its_parts() -> None:
    step = ticket()
    step.complete(FAILED)
    assert await step == FAILED
    with pytest.raises(StepError, match="burst"):
        await step[1]
    with pytest.raises(StepError, match="burst"):
        await step.seq_lens


async def test_lengths_that_were_published_survive_a_late_failure() -> None:
    step = ticket()
    step.publish(lambda: LENS)
    assert await step.seq_lens == LENS
    step.complete(FAILED)
    assert await step.seq_lens == LENS


async def test_a_ticket_that_nobody_awaits_says_nothing() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    for outcome in (RESULT, FAILED):
        step = ticket()
        rows, lens = step[1], step.seq_lens
        step.complete(outcome)
        del step, rows, lens
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


class ManualEvent:
    def __init__(self, *, is_done: bool = False) -> None:
        self.is_done = threading.Event()
        if is_done:
            self.is_done.set()

    def synchronize(self) -> None:
        assert self.is_done.wait(TIMEOUT_S)


def started(loop: asyncio.AbstractEventLoop) -> tuple[Waiter, list[BaseException | None]]:
    """A waiter, and what it reports of its end."""
    ends: list[BaseException | None] = []
    waiter = Waiter(loop, on_end=ends.append)
    waiter.start()
    return waiter, ends


async def test_landings_are_read_in_launch_order_whichever_event_is_done_first() -> None:
    """And what was given before the close still lands."""
    log: list[str] = []
    events = [ManualEvent() for _ in range(3)]
    all_completed = asyncio.Event()
    loop_thread = threading.get_ident()

    def landing(number: int) -> Callable[[], Callable[[], None]]:
        def complete() -> None:
            assert threading.get_ident() == loop_thread
            log.append(f"complete {number}")
            if number == 2:
                all_completed.set()

        def read() -> Callable[[], None]:
            assert threading.get_ident() != loop_thread
            assert events[number].is_done.is_set()
            log.append(f"read {number}")
            return complete

        return read

    waiter, ends = started(asyncio.get_running_loop())
    for number, event in enumerate(events):
        waiter.land(Landing(event, landing(number)))
    for number in (2, 1, 0):
        assert log == []
        events[number].is_done.set()
    waiter.close()
    assert log == ["read 0", "read 1", "read 2"]
    await asyncio.wait_for(all_completed.wait(), TIMEOUT_S)
    assert log[3:] == ["complete 0", "complete 1", "complete 2"]
    assert ends == [None]


def test_a_loop_that_has_ended_does_not_kill_the_waiter() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    waiter, ends = started(loop)
    for _ in range(2):
        waiter.land(Landing(ManualEvent(is_done=True), lambda: lambda: None))
    waiter.close()
    assert ends == [None]
