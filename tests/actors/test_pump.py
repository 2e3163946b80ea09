"""The pump keeps launch order, whatever order the steps end in."""

from __future__ import annotations

import asyncio

from aserve.actors.scheduler import Pump
from aserve.channel import Channel
from aserve.errors import ErrorInfo
from aserve.messages.executor import SchedulerEvent
from aserve.messages.results import StepFailed, StepResult
from tests.fakes.executor import FakeTicket


def result(iteration: int) -> StepResult:
    return StepResult(iteration, rows=b"", counts=b"", tokens=b"")


def fail_the_test(name: str, error: BaseException) -> None:
    raise AssertionError(f"{name} died") from error


async def test_results_are_posted_in_launch_order_even_if_a_later_step_ends_first() -> None:
    results: Channel[SchedulerEvent] = Channel()
    pump = Pump(results=results)
    first, second = FakeTicket(1), FakeTicket(2)
    pump.start(fail_the_test)
    pump.inbox.send(first)
    pump.inbox.send(second)
    second.result.set_result(result(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(results) == 0
    first.result.set_result(result(1))
    posted = await anext(results.batches())
    assert [getattr(event, "iteration", None) for event in posted] == [1, 2]
    await pump.stop()


async def test_a_failed_step_is_a_value_and_does_not_stop_the_pump() -> None:
    results: Channel[SchedulerEvent] = Channel()
    pump = Pump(results=results)
    bad, good = FakeTicket(1), FakeTicket(2)
    error = ErrorInfo(message="broken", type="server_error", code="step_failed", status=500)
    bad.result.set_result(StepFailed(1, error))
    good.result.set_result(result(2))
    pump.start(fail_the_test)
    pump.inbox.send(bad)
    pump.inbox.send(good)
    assert await anext(results.batches()) == [StepFailed(1, error), result(2)]
    await pump.stop()


async def test_stop_does_not_wait_for_a_step_that_never_ends() -> None:
    pump = Pump(results=Channel())
    pump.start(fail_the_test)
    pump.inbox.send(FakeTicket(1))
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        await pump.stop()
