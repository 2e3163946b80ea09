"""Wraps a device to record when the work of each step begins and ends on it, and which captured
step ran last.

A step begins before its values are copied to the device, and ends when the copy of its results to
the host is requested. The executor's thread writes the records; read them when no step is in
flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor

from aserve.gpu.device.base import Captured, Device, Event, GraphBreak


class Mark(Protocol):
    """A time on the device's clock, like `torch.cuda.Event`."""

    def elapsed_time(self, end: Mark, /) -> float:
        """Returns the milliseconds from this one to `end`, after both have happened."""


@dataclass(slots=True)
class StepMarks:
    begin: Mark
    end: Mark


class Watch:
    """The records since the last `clear`."""

    def __init__(self, where: torch.device) -> None:
        self.steps: list[StepMarks] = []
        self.last: Captured | None = None
        self.num_replays = 0
        self._is_cuda = where.type == "cuda"
        self._begin: Mark | None = None

    def clear(self) -> None:
        self.steps.clear()
        self.last = None
        self.num_replays = 0

    def gaps_us(self) -> Iterator[float]:
        """Yields the time from the end of each step to the beginning of the next. If the next step
        is launched in time, the stream has nothing between them.
        """
        for before, after in pairwise(self.steps):
            yield before.end.elapsed_time(after.begin) * 1e3

    def begun(self) -> None:
        if self._begin is None:
            self._begin = self._mark()

    def ended(self) -> None:
        """NOTE: a step that publishes its lengths early ends with the last of its results."""
        if self._begin is None:
            self.steps[-1].end = self._mark()
        else:
            self.steps.append(StepMarks(self._begin, self._mark()))
            self._begin = None

    def _mark(self) -> Mark:
        """Records an event on the stream of the calling thread."""
        if not self._is_cuda:
            return _HostMark()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cast(Mark, event)


def watched(device: Device) -> tuple[Device, Watch]:
    watch = Watch(device.torch_device)
    return cast(Device, _WatchedDevice(device, watch)), watch


class _WatchedDevice:
    """A `Device`. WHY __getattr__: it passes on all other methods, also those added later."""

    def __init__(self, device: Device, watch: Watch) -> None:
        self._device = device
        self._watch = watch

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def stage(self, host: Tensor, *into: Tensor | None) -> Tensor:
        self._watch.begun()
        return self._device.stage(host, *into)

    def copy_out(self, values: Tensor, host: Tensor) -> Event:
        self._watch.ended()
        return self._device.copy_out(values, host)

    def capture(self, body: Callable[[GraphBreak], Tensor]) -> Captured:
        return _WatchedCapture(self._device.capture(body), self._watch)


class _WatchedCapture:
    """A `Captured` that counts its replays."""

    def __init__(self, captured: Captured, watch: Watch) -> None:
        self._captured = captured
        self._watch = watch

    def replay(self, on_break: GraphBreak) -> Tensor:
        self._watch.last = self._captured
        self._watch.num_replays += 1
        return self._captured.replay(on_break)


class _HostMark:
    """A mark of a device that computes in the calling thread."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: Mark, /) -> float:
        assert isinstance(end, _HostMark)
        return (end._at_s - self._at_s) * 1e3
