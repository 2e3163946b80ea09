"""The CPU as a device whose captures and replays are counted, and of which some may fail."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from aserve.gpu.device.base import Captured, GraphBreak
from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.sampling.ops import SHAPED_OPS
from tools.gpu_check.recorded_graphs import RecordingCpu


class GraphDevice(RecordingCpu):
    """Captures and replays are counted from 1 on; those in `failing_captures` and
    `failing_replays` raise."""

    def __init__(
        self, *, failing_captures: Collection[int] = (), failing_replays: Collection[int] = ()
    ) -> None:
        super().__init__()
        self.graph_rows = 256
        self.num_captures = 0
        self.num_replays = 0
        self.has_captured = threading.Event()
        self._failing_captures = failing_captures
        self.failing_replays = failing_replays

    def ops(self, dtype: torch.dtype, *, is_deterministic: bool) -> DeviceOps:
        ops = super().ops(dtype, is_deterministic=is_deterministic)
        return dataclasses.replace(ops, sample_ops=SHAPED_OPS)

    def capture(self, body: Callable[[GraphBreak], Tensor]) -> Captured:
        self.num_captures += 1
        if self.num_captures in self._failing_captures:
            raise RuntimeError("no capture, as the test wants it")
        captured = super().capture(body)
        self.has_captured.set()
        return _Counted(captured, self)


class _Counted:
    def __init__(self, captured: Captured, device: GraphDevice) -> None:
        self._captured = captured
        self._device = device

    def replay(self, on_break: GraphBreak) -> Tensor:
        self._device.num_replays += 1
        if self._device.num_replays in self._device.failing_replays:
            raise RuntimeError("no replay, as the test wants it")
        return self._captured.replay(on_break)
