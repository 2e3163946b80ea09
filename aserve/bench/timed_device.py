"""The CPU as a device that notes when its events happen.

It knows no step. `last_event_s` is written by the executor thread, and read on the loop between two
steps.
"""

from __future__ import annotations

import time

from aserve.gpu.device.base import Event
from aserve.gpu.device.cpu import CpuDevice, CpuEvent


class TimedCpu(CpuDevice):
    """NOTE: an event of the CPU has happened when it is recorded; it would be late elsewhere."""

    __slots__ = ("last_event_s",)

    def __init__(self) -> None:
        super().__init__()
        self.last_event_s = 0.0  # of `time.perf_counter`

    def new_event(self) -> Event:
        return _TimedEvent(self)


class _TimedEvent(CpuEvent):
    __slots__ = ("_device",)

    def __init__(self, device: TimedCpu) -> None:
        super().__init__()
        self._device = device

    def record(self) -> None:
        self._device.last_event_s = time.perf_counter()
        super().record()
