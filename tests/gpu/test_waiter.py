"""The waiter: reads results after their events, in launch order, and completes on the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from aserve.gpu.waiter import Landing, Waiter
from tests.fakes.gated_model import TIMEOUT_S


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
