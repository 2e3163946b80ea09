"""The device: streams, copies and graphs. A recording of torch's operators is its graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from aserve.gpu.device.base import Captured, Event, GraphBreak
from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.layers.linear import prepare
from aserve.gpu.weights.format import WeightFormat, WeightRequest
from tools.gpu_check.recorded_graphs import record


class _Done:
    def synchronize(self) -> None:
        """All work is done when its call returns."""


class ExampleNpu:
    def __init__(self, why: str) -> None:
        self.about = f"example-npu ({why})" if why else "example-npu"
        self.torch_device = torch.device("cpu")
        self.runs_behind = False
        self.graph_rows = 4
        self.max_rows = 16
        self.max_batched_tokens = 256
        # What its own operator lacks (latents, draft trees, lengths that the host does not know) is
        # attended by the reference.
        self.attention: tuple[str, ...] = ("example-npu", "torch-ref")
        self.logits_elements = 1 << 20

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> Event:
        return _Done()

    def host_buffer(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32)

    def stage(self, host: Tensor, buffer: Tensor | None = None) -> Tensor:
        return host.clone() if buffer is None else buffer.copy_(host)

    def capture(self, body: Callable[[GraphBreak], Tensor]) -> Captured:
        return record(body)

    def copy_out(self, values: Tensor, host: Tensor) -> Event:
        host.copy_(values)
        return _Done()

    def weight_format(self, request: WeightRequest) -> WeightFormat:
        return WeightFormat(request.given or torch.float32, prepare, "as the example computes")

    def ops(self, dtype: torch.dtype, *, is_deterministic: bool) -> DeviceOps:
        return DeviceOps()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def free_bytes(self) -> int:
        return 4 << 30

    def kv_bytes(self, run_largest: Callable[[], None], *, share: float) -> int:
        return 64 << 20
