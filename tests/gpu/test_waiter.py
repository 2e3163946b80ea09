"""The waiter: reads results after their events, in launch order, and completes on the loop."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable

from aserve.gpu.waiter import Landing, Waiter
from tests.fakes.gated_model import TIMEOUT_S


class ManualEvent:
    def __init__(self) -> None:
        self.is_done = threading.Event()

    def synchronize(self) -> None:
        assert self.is_done.wait(TIMEOUT_S)


class Ends:
    """What the waiter reported of its end."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    def __call__(self, error: BaseException | None) -> None:
        self.errors.append(error)


async def test_landings_are_read_in_launch_order_whichever_event_is_done_first() -> None:
    log: list[str] = []
    all_completed = asyncio.Event()
    events = [ManualEvent() for _ in range(3)]
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

    ends = Ends()
    waiter = Waiter(asyncio.get_running_loop(), on_end=ends)
    waiter.start()
    for number, event in enumerate(events):
        waiter.land(Landing(event, landing(number)))
    for number in (2, 1, 0):
        assert log == []
        events[number].is_done.set()
    await asyncio.wait_for(all_completed.wait(), TIMEOUT_S)
    waiter.close()
    assert [entry for entry in log if entry.startswith("read")] == ["read 0", "read 1", "read 2"]
    completed = [entry for entry in log if entry.startswith("complete")]
    assert completed == ["complete 0", "complete 1", "complete 2"]
    assert ends.errors == [None]


async def test_what_was_given_before_the_close_still_lands() -> None:
    landed: list[int] = []
    waiter = Waiter(asyncio.get_running_loop(), on_end=Ends())
    waiter.start()
    for number in range(5):
        event = ManualEvent()
        event.is_done.set()
        waiter.land(Landing(event, functools.partial(landed.append, number)))
    waiter.close()
    assert landed == [0, 1, 2, 3, 4]


async def test_a_waiter_that_dies_says_why() -> None:
    def read() -> None:
        raise MemoryError("no room to copy")

    ends = Ends()
    waiter = Waiter(asyncio.get_running_loop(), on_end=ends)
    waiter.start()
    event = ManualEvent()
    event.is_done.set()
    waiter.land(Landing(event, read))
    waiter.close()
    assert [type(error) for error in ends.errors] == [MemoryError]


def test_a_loop_that_has_ended_does_not_kill_the_waiter() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    ends = Ends()
    waiter = Waiter(loop, on_end=ends)
    waiter.start()
    for _ in range(2):
        event = ManualEvent()
        event.is_done.set()
        waiter.land(Landing(event, lambda: lambda: None))
    waiter.close()
    assert ends.errors == [None]
