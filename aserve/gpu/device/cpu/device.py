"""The CPU as a device. Its stream is the executor thread itself, so an event is done as soon as it
is recorded.

A step takes the same path as on a GPU, the waiter thread aside: staged words are copied, and
results go through a host buffer.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from aserve.gpu.device.base import Captured, Event, GraphBreak
from aserve.gpu.device.cpu.isa import KERNEL_DTYPES, read_isa
from aserve.gpu.device.cpu.kernels import compile_kernels_of
from aserve.gpu.device.cpu.linear import PER_TOKEN, lora_per_token
from aserve.gpu.device.cpu.weights import choose_cpu_format
from aserve.gpu.device.ops import TORCH_OPS, DeviceOps
from aserve.gpu.weights.format import WeightFormat, WeightRequest
from aserve.host.limits import available_memory_bytes
from aserve.host.memory import keep_freed_memory

LOGITS_ELEMENTS = 1 << 24  # 64 MB in float32
KV_PART = 4  # the KV cache takes at most 1 / KV_PART of the free memory
MAX_KV_BYTES = 4 << 30


class CpuEvent:
    """An event of a device on which all work is done by the time the call returns."""

    __slots__ = ()

    def synchronize(self) -> None:
        pass


class CpuDevice:
    __slots__ = (
        "about",
        "attention",
        "graph_rows",
        "logits_elements",
        "max_batched_tokens",
        "max_rows",
        "runs_behind",
        "torch_device",
    )

    def __init__(self, why: str = "") -> None:
        self.about = f"cpu ({why})" if why else "cpu"
        self.logits_elements = LOGITS_ELEMENTS
        self.max_rows = 64
        self.max_batched_tokens = 2048
        self.runs_behind = False
        self.graph_rows = 0  # WHY: torch cannot record calls of kernels that numba has compiled
        self.torch_device = torch.device("cpu")
        self.attention: tuple[str, ...] = ("paged-cpu", "paged-sdpa", "torch-ref")

    def stream(self) -> AbstractContextManager[None]:
        keep_freed_memory()
        return nullcontext()

    def mark(self) -> Event:
        return CpuEvent()

    def host_buffer(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32)

    def stage(self, host: Tensor, buffer: Tensor | None = None) -> Tensor:
        return host.clone() if buffer is None else buffer.copy_(host)

    def capture(self, body: Callable[[GraphBreak], Tensor]) -> Captured:
        """NOTE: never called, because `graph_rows` is 0."""
        raise RuntimeError("the CPU captures no graphs")

    def copy_out(self, values: Tensor, host: Tensor) -> Event:
        host.copy_(values)
        return CpuEvent()

    def weight_format(self, request: WeightRequest) -> WeightFormat:
        return choose_cpu_format(request, read_isa())

    def ops(self, dtype: torch.dtype, *, is_deterministic: bool) -> DeviceOps:
        has_kernels = dtype in KERNEL_DTYPES and importlib.util.find_spec("numba") is not None
        if is_deterministic:
            return DeviceOps(elementwise=PER_TOKEN, lora_ops=lora_per_token)
        if not has_kernels:
            return TORCH_OPS
        from aserve.gpu.device.cpu import ops as cpu_ops
        from aserve.gpu.device.cpu.fused_decoder import make_compiled_forward
        from aserve.gpu.device.cpu.fused_draft import make_compiled_draft

        compile_kernels_of(dtype, num_threads=torch.get_num_threads())

        return DeviceOps(
            elementwise=cpu_ops.compiled_elementwise(dtype),
            rope_and_store_kv=cpu_ops.compiled_store(dtype),
            sample_ops=cpu_ops.compiled_sample_ops(),
            lora_ops=partial(cpu_ops.compiled_lora, dtype),
            fused_step=make_compiled_forward,
            fused_draft=make_compiled_draft,
            make_advance_rows=partial(cpu_ops.compiled_advance_rows, dtype),
            suffix_match=cpu_ops.compiled_suffix_match(),
        )

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Anonymous memory of the operating system: it is zero, and a page of it becomes resident
        when it is first written.

        PERF: to write 1,000 KV slots of 512 bytes for the first time takes 0.30 ms, and 0.41 ms in
        memory that is mapped to be shared (one core, busy). WHY not huge pages: 0.06 ms, but then
        all layers get theirs in one step, which took 162 ms in place of 41 (Qwen3-0.6B's shape).
        """
        if not (num_bytes := math.prod(shape) * dtype.itemsize):
            return torch.zeros(shape, dtype=dtype)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def free_bytes(self) -> int:
        return available_memory_bytes()

    def kv_bytes(self, _run_largest: Callable[[], None], *, share: float) -> int:
        """Returns a quarter of the free memory, at most 4 GiB: other processes need the host's
        memory as well. Pools become resident only as they are written.
        """
        return min(self.free_bytes() // KV_PART, MAX_KV_BYTES)
