"""The CPU as a device that runs behind: no event is done before the test says so, and staging
buffers are read only then.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from aserve.gpu.device.base import Event
from aserve.gpu.device.cpu.device import CpuDevice
from tests.fakes.gated_model import TIMEOUT_S


class LateDevice(CpuDevice):
    """`staged` and `packed`: weak references to what was copied in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.runs_behind = True
        self.is_done = threading.Event()
        self.staged: list[weakref.ref[Tensor]] = []
        self.packed: list[weakref.ref[Tensor]] = []
        self._reads: list[tuple[Tensor, Tensor]] = []  # since the last event: host, its content

    def mark(self) -> Event:
        reads, self._reads = self._reads, []
        return _LateEvent(self.is_done, reads)

    def stage(self, host: Tensor, buffer: Tensor | None = None) -> Tensor:
        self._reads.append((host, host.clone()))
        copy = super().stage(host, buffer)
        self.staged.append(weakref.ref(copy))
        return copy

    def copy_out(self, values: Tensor, host: Tensor) -> Event:
        self.packed.append(weakref.ref(values))
        host.copy_(values)
        return self.mark()


class _LateEvent:
    def __init__(self, is_done: threading.Event, reads: list[tuple[Tensor, Tensor]]) -> None:
        self._is_done = is_done
        self._reads = reads
        self._lock = threading.Lock()

    def synchronize(self) -> None:
        """The device reads its staging buffers at the last moment: they must be as they were."""
        assert self._is_done.wait(TIMEOUT_S)
        with self._lock:  # two threads may wait for one event
            for host, content in self._reads:
                if not torch.equal(host, content):
                    raise AssertionError("a staging buffer was reused before its event")
            self._reads = []  # whoever waits again finds the device done
