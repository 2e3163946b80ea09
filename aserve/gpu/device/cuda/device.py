"""A CUDA device with two streams: one for forwards, and one for copies of results to pinned memory.

A step's words are copied in on the forward stream, in order. Its results are copied out on the
other stream, beside the next step's forward. No method here waits for the device, except capture
and the measurements of memory at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.device.base import Captured, Event, GraphBreak
from aserve.gpu.device.cuda.graphs import capture
from aserve.gpu.device.cuda.runtime import (
    CudaEvent,
    CudaRuntime,
    SideStream,
    TorchCuda,
    WaitContext,
    WatchedEvent,
)
from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.layers.linear import prepare
from aserve.gpu.weights.format import DTYPES, WeightFormat, WeightRequest, dtype_name
from aserve.messages.base import GIB

GRAPH_ROWS = 256
# 256 MB in float32. Each slice of logits reads the head's weights once, and 441 rows of a
# vocabulary of 152,000 should not read them twice.
LOGITS_ELEMENTS = 1 << 26
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class CudaDevice:
    __slots__ = (
        "_copies",
        "_forwards",
        "_runtime",
        "_waiting",
        "about",
        "attention",
        "graph_rows",
        "logits_elements",
        "max_batched_tokens",
        "max_rows",
        "runs_behind",
        "torch_device",
    )

    def __init__(self, runtime: CudaRuntime, *, why: str = "") -> None:
        self.about = f"cuda ({', '.join(filter(None, (runtime.about, why)))})"
        self.logits_elements = LOGITS_ELEMENTS
        self.max_rows = 256
        self.max_batched_tokens = 8192
        self.runs_behind = True
        self.graph_rows = GRAPH_ROWS
        self.torch_device = runtime.torch_device
        self.attention: tuple[str, ...] = ("flashinfer", "triton", "torch-ref")
        self._runtime = runtime
        self._waiting: WaitContext | None = None
        self._forwards = runtime.new_stream()
        self._copies = SideStream(runtime)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Returns the forward stream. It waits for the stream on which the model was loaded."""
        self._forwards.wait_stream(self._runtime.current_stream())
        with self._runtime.on(self._forwards):
            yield

    def watch_waits(self, waiting: WaitContext) -> None:
        """From now on, each wait for the device is also within a context of `waiting`, which may
        raise at its end."""
        outer = self._waiting
        self._waiting = waiting if outer is None else partial(_nested, outer, waiting)

    def mark(self) -> Event:
        event = self._runtime.new_event()
        self._forwards.record_event(event)
        return self._watched(event)

    def host_buffer(self, num_words: int) -> Tensor:
        return self._runtime.pinned(num_words)

    def stage(self, host: Tensor, buffer: Tensor | None = None) -> Tensor:
        """NOTE: the copy is on the forward stream, so everything that reads it runs later."""
        if buffer is None:
            buffer = torch.empty(len(host), dtype=host.dtype, device=self.torch_device)
        return buffer.copy_(host, non_blocking=True)

    def capture(self, body: Callable[[GraphBreak], Tensor]) -> Captured:
        """NOTE: `body` runs once before the capture, because it must compile its kernels and its
        libraries must allocate their workspaces outside of it."""
        body(lambda _values: None)
        with (self._waiting or nullcontext)():
            self._runtime.synchronize()
        return capture(self._runtime.new_graph, body)

    def copy_out(self, values: Tensor, host: Tensor) -> Event:
        with self._copies.reading(values):
            host.copy_(values, non_blocking=True)
        return self._watched(self._copies.mark())

    def side_stream(self) -> SideStream:
        """Returns a new stream for work that no forward waits for."""
        return SideStream(self._runtime)

    def _watched(self, event: CudaEvent) -> Event:
        return event if self._waiting is None else WatchedEvent(event, self._waiting)

    def weight_format(self, request: WeightRequest) -> WeightFormat:
        from aserve.gpu.device.cuda.ops import prepare_few_rows, prepare_grouped
        from aserve.gpu.device.cuda.quantized import with_quantized

        format_ = replace(self._unquantized_format(request), prepare_grouped=prepare_grouped)
        if request.is_deterministic:
            format_ = self._in_fixed_tiles(format_)
        elif format_.dtype in SIXTEEN_BIT:
            format_ = replace(format_, prepare=prepare_few_rows)
        return with_quantized(format_, request, has_fp8=self._runtime.has_fp8)

    def _in_fixed_tiles(self, format_: WeightFormat) -> WeightFormat:
        from aserve.gpu.device.cuda.ops import prepare_invariant

        if format_.dtype.itemsize > 4:
            raise ConfigError(
                f"--deterministic multiplies in float32, bfloat16 or float16 on CUDA, not in "
                f"{dtype_name(format_.dtype)}; choose one of them with --dtype",
                param="dtype",
            )
        return replace(format_, prepare=prepare_invariant, about=f"{format_.about}, in fixed tiles")

    def _unquantized_format(self, request: WeightRequest) -> WeightFormat:
        if request.given is not None:
            return WeightFormat(request.given, prepare, dtype_name(request.given))
        stored = DTYPES.get(request.stored or "")
        if stored in SIXTEEN_BIT and (stored != torch.bfloat16 or self._runtime.has_bfloat16):
            return WeightFormat(stored, prepare, f"{dtype_name(stored)} (auto: as it is stored)")
        half = torch.bfloat16 if self._runtime.has_bfloat16 else torch.float16
        return WeightFormat(half, prepare, f"{dtype_name(half)} (auto: the device has it)")

    def ops(self, dtype: torch.dtype, *, is_deterministic: bool) -> DeviceOps:
        """Returns the Triton kernels. All of them are deterministic: they compute each token by
        itself.
        """
        from aserve.gpu.device.cuda.ops import (
            triton_advance_rows,
            triton_elementwise,
            triton_lora,
            triton_resolver,
            triton_row_ops,
            triton_sample_ops,
            triton_store,
        )

        return DeviceOps(
            elementwise=triton_elementwise(dtype),
            rope_and_store_kv=triton_store(dtype),
            row_ops=triton_row_ops(dtype),
            resolve=triton_resolver(dtype),
            sample_ops=triton_sample_ops(dtype),
            lora_ops=partial(triton_lora, dtype, is_deterministic=is_deterministic),
            make_advance_rows=partial(triton_advance_rows, dtype),
        )

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def free_bytes(self) -> int:
        return self._runtime.memory().free

    def kv_bytes(self, run_largest: Callable[[], None], *, share: float) -> int:
        """Returns the device's memory times `share`, less all memory in use (by other processes
        too) and less the peak of the largest step.
        """
        with (self._waiting or nullcontext)():
            step_bytes = self._runtime.growth(run_largest)
        memory = self._runtime.memory()
        left = int(memory.total * share) - (memory.total - memory.free) - step_bytes
        if left > 0:
            return left
        raise ConfigError(
            f"--gpu-memory-utilization {share} of {memory.total / GIB:.2f} GiB leaves nothing for "
            f"KV: {(memory.total - memory.free) / GIB:.2f} GiB are in use, and the largest step "
            f"takes {step_bytes / GIB:.2f} more; give a larger share, lower "
            "--max-num-batched-tokens or --max-num-seqs, or take a smaller model",
            param="gpu_memory_utilization",
        )


@contextmanager
def _nested(outer: WaitContext, inner: WaitContext) -> Iterator[None]:
    with outer(), inner():
        yield


def open_cuda(why: str, *, local_rank: int = 0, num_ranks: int = 1) -> CudaDevice:
    """Opens the current device, or that of one of several ranks on this machine."""
    if not torch.cuda.is_available():
        raise ConfigError(f"no CUDA: {why_no_cuda()}", param="device")
    if num_ranks == 1:
        return CudaDevice(TorchCuda(), why=why)
    if (num_gpus := torch.cuda.device_count()) < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks on this machine need a GPU each, and torch finds {num_gpus}; lower "
            "--tensor-parallel-size, or give more GPUs",
            param="tensor_parallel_size",
        )
    torch.cuda.set_device(local_rank)
    return CudaDevice(TorchCuda(), why=", ".join(filter(None, (f"GPU {local_rank}", why))))


def why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without it"
    return f"torch {torch.__version__} finds no device"
