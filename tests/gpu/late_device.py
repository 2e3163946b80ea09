"""The CPU as a device that runs behind: no event is done before the test says so, and staging
buffers are read only then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from aserve.gpu.device.base import Captured, Cut, Event
from aserve.gpu.device.cpu import CpuDevice
from aserve.gpu.future_map import RowOps
from aserve.gpu.kv.stored import StoreKv
from aserve.gpu.layers.elementwise import Elementwise
from aserve.gpu.resolve import Resolve
from aserve.gpu.sample.ops import SampleOps
from aserve.gpu.weights.form import WeightForm, WeightWish
from tests.gpu.gated_model import TIMEOUT_S


class LateDevice:
    """`staged` and `packed`: weak references to what was copied in and out."""

    def __init__(self) -> None:
        self.about = "late"
        self.runs_behind = True
        self.logits_elements = 1 << 24
        self.max_rows = 64
        self.max_batched_tokens = 2048
        self.graph_rows = 0
        self.torch_device = torch.device("cpu")
        self.is_done = threading.Event()
        self.staged: list[weakref.ref[Tensor]] = []
        self.packed: list[weakref.ref[Tensor]] = []
        self._cpu = CpuDevice()
        self.attention = self._cpu.attention
        self._reads: list[tuple[Tensor, Tensor]] = []  # since the last event: host, its content

    def stream(self) -> AbstractContextManager[None]:
        return self._cpu.stream()

    def mark(self) -> Event:
        reads, self._reads = self._reads, []
        return _LateEvent(self.is_done, reads)

    def host_buffer(self, num_words: int) -> Tensor:
        return self._cpu.host_buffer(num_words)

    def stage(self, host: Tensor, buffer: Tensor | None = None) -> Tensor:
        self._reads.append((host, host.clone()))
        copy = self._cpu.stage(host, buffer)
        self.staged.append(weakref.ref(copy))
        return copy

    def capture(self, body: Callable[[Cut], Tensor]) -> Captured:
        return self._cpu.capture(body)

    def copy_out(self, values: Tensor, host: Tensor) -> Event:
        self.packed.append(weakref.ref(values))
        host.copy_(values)
        return self.mark()

    def weight_form(self, wish: WeightWish) -> WeightForm:
        return self._cpu.weight_form(wish)

    def elementwise(self, dtype: torch.dtype) -> Elementwise:
        return self._cpu.elementwise(dtype)

    def row_ops(self, dtype: torch.dtype) -> RowOps:
        return self._cpu.row_ops(dtype)

    def resolver(self, dtype: torch.dtype) -> Resolve:
        return self._cpu.resolver(dtype)

    def sample_ops(self, dtype: torch.dtype) -> SampleOps:
        return self._cpu.sample_ops(dtype)

    def store_kv(self, dtype: torch.dtype) -> StoreKv:
        return self._cpu.store_kv(dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._cpu.zeros(shape, dtype)

    def free_bytes(self) -> int:
        return self._cpu.free_bytes()

    def kv_bytes(self, run_largest: Callable[[], None], *, share: float) -> int:
        return self._cpu.kv_bytes(run_largest, share=share)


class _LateEvent:
    def __init__(self, is_done: threading.Event, reads: list[tuple[Tensor, Tensor]]) -> None:
        self._is_done = is_done
        self._reads = reads

    def synchronize(self) -> None:
        """The device reads its staging buffers at the last moment: they must be as they were."""
        assert self._is_done.wait(TIMEOUT_S)
        for host, content in self._reads:
            if not torch.equal(host, content):
                raise AssertionError("a staging buffer was reused before its event")
