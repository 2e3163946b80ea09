"""The CPU as a device that notes when its events happen.

It knows no step. `last_event_s` is written by the executor thread, and read on the loop between two
steps.
"""

from __future__ import annotations

import time

from torch import Tensor

from aserve.gpu.device.base import Event
from aserve.gpu.device.cpu import CpuDevice


class TimedCpu(CpuDevice):
    """NOTE: an event of the CPU has happened when it is made; it would be late elsewhere."""

    __slots__ = ("last_event_s",)

    def __init__(self) -> None:
        super().__init__()
        self.last_event_s = 0.0  # of `time.perf_counter`

    def mark(self) -> Event:
        self.last_event_s = time.perf_counter()
        return super().mark()

    def copy_out(self, values: Tensor, host: Tensor) -> Event:
        event = super().copy_out(values, host)
        self.last_event_s = time.perf_counter()
        return event
